"""Cores: the parts of a network that remember. `base.py` holds the contract."""

from holdfast.cores.base import RESET_MODES, Core
from holdfast.cores.block import Block
from holdfast.cores.compose import Memoryless, Parallel, Stack
from holdfast.cores.ffm import FFM
from holdfast.cores.gru import GRU
from holdfast.cores.lru import LRU
from holdfast.cores.lstm import LSTM
from holdfast.cores.mingru import MinGRU
from holdfast.cores.mlstm import MLSTM
from holdfast.cores.window import WindowAttention

__all__ = [
    "FFM",
    "GRU",
    "LRU",
    "LSTM",
    "MLSTM",
    "RESET_MODES",
    "Block",
    "Core",
    "Memoryless",
    "MinGRU",
    "Parallel",
    "Stack",
    "WindowAttention",
]
