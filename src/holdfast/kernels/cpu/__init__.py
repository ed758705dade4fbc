"""The kernels in C for CPUs, float32 only: recurrences, linear layers, PPO's objective, Adam.

`build` compiles `c/`, `library` loads it. The C code gets sizes and pointers through ctypes; it knows nothing of torch.
"""

from holdfast.kernels.cpu import linear
from holdfast.kernels.cpu.recurrence import gru, lstm

__all__ = ["gru", "linear", "lstm"]
