"""Memories that last for a given number of steps from the first update on.

For gates this is chrono initialization (Tallec and Ollivier, 2018). Linear memories start out fading over as many steps, with
pitches that tell these steps apart. Where no number of steps is given, the forget gates of an LSTM lean to remembering.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from holdfast.cores.base import Core
from holdfast.cores.ffm import FFM
from holdfast.cores.gated import GatedCore
from holdfast.cores.lru import LRU
from holdfast.cores.lstm import LSTM
from holdfast.cores.mingru import MinGRU
from holdfast.cores.mlstm import MLSTM


@torch.no_grad()
def chrono_init_(core: Core, span: int) -> None:
    """Make the cells inside `core` start out remembering for up to about `span` steps.

    Forget biases of an LSTM are log(u) with u uniform in [1, span - 1]; input biases are their negative. In a GRU and a
    MinGRU the update gate does both; a MinGRU's slow units get larger candidates. Modes of an LRU, memories of an FFM and
    heads of an MLSTM fade to 1/e over `span` to 4 `span` steps. A cell of another kind stays as it is.
    """
    for cell in core.modules():
        if isinstance(cell, GatedCore):
            _open_gates_(cell, span)
        elif isinstance(cell, MinGRU):
            for layer in range(cell.num_layers):
                steps = 1 + _log_spans(cell.hidden_size, span).exp()  # h = (1 - z) h + z candidate, z = 1 / steps
                cell.init_layer_(layer, steps, loud=True)
        elif isinstance(cell, LRU):
            cell.set_radii_(torch.exp(-1 / _fading_steps(cell.modes, span)))
        elif isinstance(cell, FFM):
            cell.log_alpha.copy_(-_fading_steps(cell.memory_size, span).log())
            evenly = math.pi * torch.arange(cell.context_size) / cell.context_size
            cell.log_omega.copy_(evenly.clamp_min(1e-4 * math.pi).log())  # the first one hardly turns
        elif isinstance(cell, MLSTM):
            cell.gates.bias[cell.num_heads :] = _fading_steps(cell.num_heads, span).log()


@torch.no_grad()
def open_forget_gates_(core: Core) -> None:
    """Add 1 to the forget biases of LSTMs inside `core`: at first they keep three quarters of their state per step, not half."""
    for cell in core.modules():
        if isinstance(cell, LSTM) and cell.bias:
            for layer in range(cell.num_layers):
                getattr(cell, f"bias_ih_l{layer}")[cell.hidden_size : 2 * cell.hidden_size] += 1.0  # gates i, f, g, o


def _open_gates_(cell: GatedCore, span: int) -> None:
    if not cell.bias:
        return
    H = cell.hidden_size
    for layer in range(cell.num_layers):
        keep = _log_spans(H, span)
        ih, hh = getattr(cell, f"bias_ih_l{layer}"), getattr(cell, f"bias_hh_l{layer}")
        if isinstance(cell, LSTM):  # gates i, f, g, o
            ih[:H], hh[:H] = -keep, 0.0
        ih[H : 2 * H], hh[H : 2 * H] = keep, 0.0  # an LSTM's f; a GRU's z of r, z, n: h = (1 - z) n + z h


def _log_spans(count: int, span: int) -> Tensor:
    return torch.empty(count).uniform_(1.0, max(1.01, span - 1.0)).log_()


def _fading_steps(count: int, span: int) -> Tensor:
    """From `span` to 4 `span`, evenly in the logarithm, in random order: pitches must not come with their own rates."""
    return (span * 4 ** torch.linspace(0, 1, count))[torch.randperm(count)]
