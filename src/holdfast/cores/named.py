"""Cores by name, as configs and flags give them. A new cell gets its name here."""

from __future__ import annotations

from holdfast.cores.base import Core
from holdfast.cores.compose import Memoryless
from holdfast.cores.gru import GRU
from holdfast.cores.lstm import LSTM

CORES: dict[str, type[LSTM] | type[GRU]] = {"lstm": LSTM, "gru": GRU}


def make_core(core: str | Core | None, input_size: int, hidden_size: int, num_layers: int, reset: str) -> Core:
    """A core by name; None is the memoryless control: an MLP of the same width, without state."""
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
    return CORES[core](input_size, hidden_size, num_layers, reset=reset)
