"""Cores by name, as configs and flags give them. A new cell gets its name here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.cores.base import Core
from holdfast.cores.block import Block
from holdfast.cores.compose import Memoryless, Stack
from holdfast.cores.gru import GRU
from holdfast.cores.lru import LRU
from holdfast.cores.lstm import LSTM
from holdfast.cores.mingru import MinGRU
from holdfast.cores.mlstm import MLSTM
from holdfast.cores.window import WindowAttention


def blocks(cell: Callable[..., Core]) -> Callable[..., Core]:
    """What makes `num_layers` residual blocks around a cell that has one layer and is linear, or close to it."""

    def make(input_size: int, hidden_size: int, num_layers: int = 1, **options: Any) -> Core:
        sizes = [input_size, *[hidden_size] * (num_layers - 1)]
        made: list[Core] = [Block(cell(size, hidden_size, **options)) for size in sizes]
        return made[0] if num_layers == 1 else Stack(made)

    return make


CORES: dict[str, Callable[..., Any]] = {
    "lstm": LSTM,
    "gru": GRU,
    "mingru": MinGRU,
    "lru": blocks(LRU),
    "mlstm": blocks(MLSTM),
    "window": blocks(WindowAttention),
}
"""name -> make(input_size, hidden_size, num_layers, *, reset)."""


def make_core(
    core: str | Core | None,
    input_size: int,
    hidden_size: int,
    num_layers: int,
    reset: str,
    memory_span: int | None = None,
) -> Core:
    """A core by name; None is the memoryless control: an MLP of the same width, without state.

    memory_span: the length of a window. What it means for gates is `chrono_init_`'s.
    """
    if isinstance(core, Core):
        if core.input_size != input_size:
            raise ValueError(
                f"the core takes {core.input_size} features, the encoder gives {input_size}; set encoder_sizes"
            )
        return core
    if core is None or core == "none":
        return Memoryless(input_size)
    if core not in CORES:
        raise ValueError(f"unknown core {core!r}; one of {', '.join(map(repr, CORES))}, None, or a holdfast core")
    options = {"window": memory_span} if core == "window" and memory_span is not None else {}
    return CORES[core](input_size, hidden_size, num_layers, reset=reset, **options)
