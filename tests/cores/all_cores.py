"""Every core that the tests run over: small ones whose sizes all differ, so that a swapped dimension is noticed.

A new core is one entry in `KINDS`. The laws, precision, compilation, export, checkpoints and the integrations are then
tested for it with reset mode "zero"; chunking, gradients and what a reset does in every mode that it accepts. A cell with
reset code of its own is also an entry in `FAMILIES`: the laws are tested for it in every mode.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

import holdfast as hf
from holdfast import state as state_ops
from holdfast.cores import RESET_MODES
from holdfast.state import State


@dataclass(frozen=True)
class Kind:
    """make(input_size, reset) -> a core. resets: the modes it accepts."""

    make: Callable[[int, str], hf.Core]
    resets: tuple[str, ...] = RESET_MODES


KINDS: dict[str, Kind] = {
    "lstm": Kind(lambda size, reset: hf.LSTM(size, 7, reset=reset)),
    "gru": Kind(lambda size, reset: hf.GRU(size, 5, num_layers=2, reset=reset)),
    "mingru": Kind(lambda size, reset: hf.MinGRU(size, 5, num_layers=2, reset=reset)),
    "lru": Kind(lambda size, reset: hf.LRU(size, 5, modes=9, reset=reset)),
    "ffm": Kind(lambda size, reset: hf.FFM(size, 7, memory_size=5, context_size=3, reset=reset)),
    "stack": Kind(
        lambda size, reset: hf.Stack([hf.LSTM(size, size, reset=reset), hf.GRU(size, 5, reset=reset)], residual=True)
    ),
    "parallel": Kind(
        lambda size, reset: hf.Parallel(actor=hf.LSTM(size, 5, reset=reset), critic=hf.GRU(size, 4, reset=reset))
    ),
    "block": Kind(lambda size, reset: hf.Block(hf.GRU(size, 5, reset=reset))),
    "mlstm": Kind(lambda size, reset: hf.MLSTM(size, 6, num_heads=2, reset=reset)),
    "window": Kind(
        lambda size, reset: hf.WindowAttention(size, 6, window=6, num_heads=2, reset=reset), resets=("zero", "never")
    ),
}
CELLS = [name for name in KINDS if name not in ("stack", "parallel", "block")]
"""The kinds that are one cell, not cores made of cores."""

KINDS_AND_RESETS = [(kind, reset) for kind, entry in KINDS.items() for reset in entry.resets]
FAMILIES = ("lstm", "lru", "mlstm", "window")
"""One cell for each implementation of the reset modes: gated cells, linear recurrences, and two that have their own."""

CONFORMING = [(kind, reset) for kind, reset in KINDS_AND_RESETS if reset == "zero" or kind in FAMILIES]
"""What goes through the whole conformance suite."""


def core_of(kind: str, reset: str = "zero", size: int = 6) -> hf.Core:
    return KINDS[kind].make(size, reset)


def kinds_with(reset: str) -> list[str]:
    """The kinds that accept this reset mode."""
    return [kind for kind, entry in KINDS.items() if reset in entry.resets]


def cells_side_by_side(size: int, reset: str = "zero") -> hf.Parallel:
    """One of every cell that accepts `reset`, reading the same input: an error in any shows in the output.

    Not one after another: with large weights that makes numbers of which float32 holds too few digits to compare.
    """
    return hf.Parallel(**{kind: core_of(kind, reset, size) for kind in CELLS if reset in KINDS[kind].resets})


def returned_state(core: hf.Core, batch: int, seed: int = 1) -> State:
    """A state that `core` returned after a few steps, without a graph. Arbitrary numbers may be no state of a core."""
    dtype, device = core.dtype_and_device()
    x = torch.randn(3, batch, core.input_size, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return state_ops.clone(core(x.to(device, dtype))[1])


def leaf_dtypes(core: hf.Core, dtype: torch.dtype) -> list[torch.dtype]:
    """The dtypes of the leaves of a state when the module's is `dtype`."""
    return [row.dtype or dtype for row in state_ops.leaves(core.row_shapes())]
