"""LSTM and GRU on NVIDIA GPUs by the CUDA C++ of `kernels/cuda`, behind the signatures of `reference/`.

Products run in fp16 with fp32 sums, the state is fp32: about TF32's accuracy. docs/performance/gpu.md explains the design.
Importing this package imports neither Triton nor torch's compiler.
"""

from holdfast.kernels.gpu import linear
from holdfast.kernels.gpu.gated_operator import gru, lstm, supports

__all__ = ["gru", "linear", "lstm", "supports"]
