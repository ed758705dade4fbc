"""`hf.GRU`: torch.nn.GRU with resets inside the sequence.

    core = hf.GRU(64, 128)
    y, state = core(x, state, resets)      # state {"h": [B, L, H]}

Weights have torch.nn.GRU's names, so `state_dict`s interchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from holdfast.cores.gated import GatedCore
from holdfast.kernels.operands import Weights


class GRU(GatedCore):
    """Gated recurrent unit, one or several layers."""

    cell = "gru"
    leaf_names = ("h",)
    gates = 3

    def _torch_cell(self, x: Tensor, state: Sequence[Tensor], weights: Weights) -> tuple[Tensor, ...]:
        return (torch.gru_cell(x, state[0], *weights),)

    def _trace_layer(self, kernel: ModuleType, *arguments: Any) -> tuple[Tensor, Sequence[Tensor], Sequence[Tensor]]:
        y, final = kernel.sequence(*arguments)
        outputs = y.detach()  # a GRU's output is its state
        return y, (final,), (outputs,)
