"""`hf.GRU`: torch.nn.GRU with resets inside the sequence.

    core = hf.GRU(64, 128)
    y, state = core(x, state, resets)      # state {"h": [B, L, H]}

Weights carry torch.nn.GRU's names, so `state_dict`s interchange.
"""

from __future__ import annotations

import torch
from torch import Tensor

from holdfast.cores.gated import HALF, GatedCore, stack_layers
from holdfast.kernels import dispatch
from holdfast.state import State


class GRU(GatedCore):
    """Gated recurrent unit, one or several layers."""

    leaf_names = ("h",)
    gates = 3

    def _step(self, x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor, State]:
        fused = dispatch.fused_step(self, x)
        dtype = self._compute_dtype(x)
        if fused is None and (dtype in HALF or x.is_cuda):
            return self._step_of_sequence(x, state, resets)
        if fused is None:
            state = self._reset(state, resets)
        elif self.reset == "detach":
            resets = None  # without gradients there is nothing to cut
        y, hs = x, []
        for layer, h in enumerate(state["h"].unbind(1)):
            weights = self._weights(layer, dtype)
            if fused is not None:
                mask, fills = self._reset_arguments(layer, resets)
                h = fused.gru_step(y, h, mask, *fills, *weights)
            else:
                h = torch.gru_cell(y, h, *weights)
            y = h
            hs.append(h)
        return y.clone(), {"h": stack_layers(hs)}

    def _sequence(self, x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor, State]:
        dtype = self._compute_dtype(x)
        kernel = dispatch.choose("gru", self, x)
        y, hs = x.to(dtype), []
        for layer, h in enumerate(state["h"].unbind(1)):
            mask, fills = self._reset_arguments(layer, resets)
            y, h = kernel.gru(y, h, mask, *fills, *self._weights(layer, dtype), cut=self.reset == "detach")
            hs.append(h)
        return y, {"h": stack_layers(hs)}

    def _trace(self, x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor, State, State]:
        dtype, kernel = self._compute_dtype(x), dispatch.choose("gru", self, x)
        if dtype != self.state_dtype():
            return super()._trace(x, state, resets)
        y, hs, all_h = x, [], []
        for layer, h in enumerate(state["h"].unbind(1)):
            mask, fills = self._reset_arguments(layer, resets)
            y, h = kernel.gru(y, h, mask, *fills, *self._weights(layer, dtype), cut=self.reset == "detach")
            hs.append(h)
            all_h.append(y.detach())
        return y, {"h": stack_layers(hs)}, {"h": torch.stack(all_h, 2)}
