"""How gates start: forget gates that lean to remembering, and chrono initialization (Tallec and Ollivier, 2018)."""

from __future__ import annotations

import torch

from holdfast.cores.base import Core
from holdfast.cores.gated import GatedCore
from holdfast.cores.lstm import LSTM
from holdfast.cores.mingru import MinGRU


@torch.no_grad()
def chrono_init_(core: Core, span: int) -> None:
    """Bias the gates of LSTMs, GRUs and MinGRUs inside `core` so that they start out remembering for up to about `span` steps.

    Forget biases are log(u) with u uniform in [1, span - 1]; input biases are their negative. In a GRU and a
    MinGRU the update gate does both. Other cells have no such gates and stay as they are.
    """
    for cell in core.modules():
        if isinstance(cell, MinGRU):
            for layer in range(cell.num_layers):
                bias = getattr(cell, f"bias_l{layer}")
                bias[: cell.hidden_size] = -_log_spans(cell.hidden_size, span)  # h = (1 - z) h + z candidate
        if not isinstance(cell, GatedCore) or not cell.bias:
            continue
        H = cell.hidden_size
        for layer in range(cell.num_layers):
            keep = _log_spans(H, span)
            ih, hh = getattr(cell, f"bias_ih_l{layer}"), getattr(cell, f"bias_hh_l{layer}")
            if isinstance(cell, LSTM):  # gates i, f, g, o
                ih[:H], hh[:H] = -keep, 0.0
            ih[H : 2 * H], hh[H : 2 * H] = keep, 0.0  # an LSTM's f; a GRU's z of r, z, n: h = (1 - z) n + z h


@torch.no_grad()
def open_forget_gates_(core: Core) -> None:
    """Add 1 to the forget biases of LSTMs inside `core`: at first they keep three quarters of their state per step, not half."""
    for cell in core.modules():
        if isinstance(cell, LSTM) and cell.bias:
            for layer in range(cell.num_layers):
                getattr(cell, f"bias_ih_l{layer}")[cell.hidden_size : 2 * cell.hidden_size] += 1.0  # gates i, f, g, o


def _log_spans(count: int, span: int) -> torch.Tensor:
    return torch.empty(count).uniform_(1.0, max(1.01, span - 1.0)).log_()
