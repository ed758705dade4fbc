"""Chrono initialization: gates that remember for long from the first update on (Tallec and Ollivier, 2018)."""

from __future__ import annotations

import torch

from holdfast.cores.base import Core
from holdfast.cores.gated import GatedCore
from holdfast.cores.lstm import LSTM


@torch.no_grad()
def chrono_init_(core: Core, span: int) -> None:
    """Bias the gates of LSTMs and GRUs inside `core` so that they start out remembering for up to about `span` steps.

    Forget biases are log(u) with u uniform in [1, span - 1]; input biases are their negative. In a GRU the update gate
    does both.
    """
    for cell in core.modules():
        if not isinstance(cell, GatedCore) or not cell.bias:
            continue
        H = cell.hidden_size
        for layer in range(cell.num_layers):
            keep = torch.empty(H).uniform_(1.0, max(1.01, span - 1.0)).log_()
            ih, hh = getattr(cell, f"bias_ih_l{layer}"), getattr(cell, f"bias_hh_l{layer}")
            if isinstance(cell, LSTM):  # gates i, f, g, o
                ih[:H], hh[:H] = -keep, 0.0
            ih[H : 2 * H], hh[H : 2 * H] = keep, 0.0  # an LSTM's f; a GRU's z of r, z, n: h = (1 - z) n + z h
