"""`hf.LSTM`: torch.nn.LSTM with resets inside the sequence.

    core = hf.LSTM(64, 128)
    y, state = core(x, state, resets)      # state {"h": [B, L, H], "c": [B, L, H]}

Weights carry torch.nn.LSTM's names, so `state_dict`s interchange.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from holdfast.cores.gated import HALF, GatedCore, stack_layers
from holdfast.kernels import dispatch, portable
from holdfast.state import State


class LSTM(GatedCore):
    """Long short-term memory, one or several layers."""

    leaf_names = ("h", "c")
    gates = 4

    def _step(self, x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor, State]:
        fused = dispatch.fused_step(self, x)
        dtype = self._compute_dtype(x)
        if fused is None and (dtype in HALF or x.is_cuda):
            return self._step_of_sequence(x, state, resets)
        if fused is None:
            state = self._reset(state, resets)
        elif self.reset == "detach":
            resets = None  # without gradients there is nothing to cut
        y, hs, cs = x, [], []
        for layer, (h, c) in enumerate(zip(state["h"].unbind(1), state["c"].unbind(1))):
            weights = self._weights(layer, dtype)
            if fused is not None:
                mask, fills = self._reset_arguments(layer, resets)
                h, c = fused.lstm_step(y, h, c, mask, *fills, *weights)
            else:
                h, c = torch.lstm_cell(y, (h, c), *weights)
            y = h
            hs.append(h)
            cs.append(c)
        return y.clone(), {"h": stack_layers(hs), "c": stack_layers(cs)}

    def _sequence(self, x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor, State]:
        dtype = self._compute_dtype(x)
        kernel = dispatch.choose("lstm", self, x)
        y, hs, cs = x.to(dtype), [], []
        for layer, (h, c) in enumerate(zip(state["h"].unbind(1), state["c"].unbind(1))):
            mask, fills = self._reset_arguments(layer, resets)
            y, h, c = kernel.lstm(y, h, c, mask, *fills, *self._weights(layer, dtype), cut=self.reset == "detach")
            hs.append(h)
            cs.append(c)
        return y, {"h": stack_layers(hs), "c": stack_layers(cs)}

    def _trace(self, x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor, State, State]:
        kernel = dispatch.choose("lstm", self, x)
        if self._compute_dtype(x) != self.state_dtype():
            return super()._trace(x, state, resets)
        if hasattr(kernel, "lstm_with_cells"):
            return self._layers_with_cells(kernel, x, state, resets)
        y, final = self._sequence(x, state, resets)
        with torch.no_grad():  # once more, with a kernel that hands out its cells
            return y, final, self._layers_with_cells(portable, x, state, resets)[2]

    def _layers_with_cells(
        self, kernel: ModuleType, x: Tensor, state: State, resets: Tensor | None
    ) -> tuple[Tensor, State, State]:
        y, hs, cs, all_h, all_c = x, [], [], [], []
        for layer, (h, c) in enumerate(zip(state["h"].unbind(1), state["c"].unbind(1))):
            mask, fills = self._reset_arguments(layer, resets)
            weights = self._weights(layer, self.state_dtype())
            y, h, c, cells = kernel.lstm_with_cells(y, h, c, mask, *fills, *weights, cut=self.reset == "detach")
            hs.append(h)
            cs.append(c)
            all_h.append(y.detach())
            all_c.append(cells)
        final = {"h": stack_layers(hs), "c": stack_layers(cs)}
        return y, final, {"h": torch.stack(all_h, 2), "c": torch.stack(all_c, 2)}
