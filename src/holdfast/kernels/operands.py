"""The arguments, states and gradients of the kernels, named once for all of them. Nothing is computed here.

Operators of torch.library take flat arguments. All of them that run both cells use one order: x, h0, c0 (None for a
GRU), `Resets` without `detach`, `Weights`, then `detach_at_reset` and whether to keep what the backward needs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def refuse_second_derivative() -> None:
    """For a backward without a backward. `once_differentiable` lets a constant incoming gradient through, with a wrong result."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "the fast kernels have no second derivative (backward was called with create_graph=True); "
            'use kernel="reference"'
        )


class Weights(NamedTuple):
    """Weights of one layer as in torch.nn. G gates: i, f, g, o for an LSTM, r, z, n for a GRU."""

    w_ih: Tensor  # [G * H, I]
    w_hh: Tensor  # [G * H, H]
    b_ih: Tensor | None = None  # [G * H]
    b_hh: Tensor | None = None


class Resets(NamedTuple):
    """Which rows start a new episode before which step, and the state they start from."""

    mask: Tensor | None = None  # bool, [T, B] for a sequence, [B] for a step; None: no resets
    h: Tensor | None = None  # [H]; None: zeros
    c: Tensor | None = None  # the same for the LSTM's cell
    detach: bool = False  # reset mode "detach": the state goes on, its gradient stops; h and c are not used


class Ring(NamedTuple):
    """The last steps of each row's episode, for attention over a window. R slots for a window of R + 1."""

    keys: Tensor  # [B, h, R, d]; the episode's step n is in slot n % R; slots that its steps have not reached are 0
    values: Tensor  # the same
    age: Tensor  # [B], integers: steps of the episode so far; from 2 R on a number in [R, 2 R) with the same slot

    @property
    def slots(self) -> int:
        return self.keys.shape[2]

    def as_state(self) -> dict[str, Tensor]:
        return {"keys": self.keys, "values": self.values, "age": self.age}


class MatrixInputs(NamedTuple):
    """What a matrix memory reads in each step, per head: [..., h, d] or [..., h]."""

    q: Tensor
    k: Tensor  # of length 1
    v: Tensor
    i: Tensor  # input gate
    log_f: Tensor  # logarithm of the forget gate


class Needed(NamedTuple):
    """Which gradients are needed."""

    x: bool
    h0: bool
    c0: bool
    reset_h: bool
    reset_c: bool
    w_ih: bool
    w_hh: bool
    b_ih: bool
    b_hh: bool


class Gradients(NamedTuple):
    """Gradients of one layer, None where not needed. Those of the biases have the dtype of the weights."""

    x: Tensor | None
    h0: Tensor | None
    c0: Tensor | None
    reset_h: Tensor | None
    reset_c: Tensor | None
    w_ih: Tensor | None
    w_hh: Tensor | None
    b_ih: Tensor | None
    b_hh: Tensor | None
