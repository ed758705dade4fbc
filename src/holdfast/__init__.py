"""Holdfast: reinforcement-learning policies that remember, right by construction, and fast."""

from holdfast.checks import debug
from holdfast.cores import GRU, LSTM, Core, Memoryless, Parallel, Stack

__version__ = "0.1.0"

__all__ = ["GRU", "LSTM", "Core", "Memoryless", "Parallel", "Stack", "debug"]
