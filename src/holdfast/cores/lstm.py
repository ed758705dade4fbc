"""`hf.LSTM`: torch.nn.LSTM with resets inside the sequence.

    core = hf.LSTM(64, 128)
    y, state = core(x, state, resets)      # state {"h": [B, L, H], "c": [B, L, H]}

Weights have torch.nn.LSTM's names, so `state_dict`s interchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from holdfast.cores.gated import GatedCore
from holdfast.kernels import portable
from holdfast.kernels.operands import Weights


class LSTM(GatedCore):
    """Long short-term memory, one or several layers."""

    cell = "lstm"
    leaf_names = ("h", "c")
    gates = 4

    def _torch_cell(self, x: Tensor, state: Sequence[Tensor], weights: Weights) -> tuple[Tensor, ...]:
        return torch.lstm_cell(x, list(state), *weights)

    def _trace_layer(self, kernel: ModuleType, *arguments: Any) -> tuple[Tensor, Sequence[Tensor], Sequence[Tensor]]:
        if hasattr(kernel, "sequence_with_cells"):
            y, *final, cells = kernel.sequence_with_cells(*arguments)
            outputs = y.detach()
        else:
            y, *final = kernel.sequence(*arguments)
            with torch.no_grad():  # a second run, with a kernel that returns its cells
                outputs, _, _, cells = portable.lstm.sequence_with_cells(*arguments)
        return y, final, (outputs, cells)
