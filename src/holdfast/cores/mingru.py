"""`hf.MinGRU`: a gated recurrent unit whose gate and candidate read the input alone, so that it is linear in its state.

    core = hf.MinGRU(64, 128)
    y, state = core(x, state, resets)      # state {"h": [B, L, H]}, float32

    z = sigmoid(W_z x + b_z)               # how much of the state is replaced
    h = (1 - z) h + z (W_h x + b_h)        # y = h

One product for all steps and no recurrent weights: a third of a GRU's arithmetic, and no product inside the loop over
time. The reference is Feng et al. 2024, "Were RNNs all we needed?".
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from holdfast.cores.base import check_sizes
from holdfast.cores.linear_core import LinearCore
from holdfast.state import State

# A fresh unit replaces its state over about this many steps: drawn between the two, evenly in their logarithm.
_SHORTEST, _LONGEST = 2.0, 64.0


class MinGRU(LinearCore):
    """Minimal gated recurrent unit, one or several layers.

    weight_l{k} [2 H, I] and bias_l{k} [2 H] hold the gate z, then the candidate. Gates start with biases for memories of 2
    to 64 steps; `memory_span` of `hf.ActorCritic` (chrono initialization) chooses others.
    """

    leaf_names = ("h",)

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        reset: str = "zero",
        kernel: str = "auto",
        precision: str = "fast",
    ) -> None:
        check_sizes(input_size=input_size, hidden_size=hidden_size, num_layers=num_layers)
        super().__init__((num_layers, hidden_size), reset, kernel, precision)
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.output_size = hidden_size
        for layer in range(num_layers):
            size = input_size if layer == 0 else hidden_size
            self.register_parameter(f"weight_l{layer}", nn.Parameter(torch.empty(2 * hidden_size, size)))
            self.register_parameter(f"bias_l{layer}", nn.Parameter(torch.empty(2 * hidden_size)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights uniform within 1/sqrt(inputs), gates for short and long memories. Learned starts begin at 0."""
        for layer in range(self.num_layers):
            steps = torch.empty(self.hidden_size).uniform_(math.log(_SHORTEST), math.log(_LONGEST)).exp_()
            self.init_layer_(layer, steps)
        if self.reset == "learned":
            nn.init.zeros_(self.initial_h)  # type: ignore[arg-type]

    @torch.no_grad()
    def init_layer_(self, layer: int, steps: Tensor, loud: bool = False) -> None:
        """Weights for units that replace their state over this many steps each, [H].

        loud: a slow unit gets a larger candidate, so that its state varies as much as what enters it. Otherwise something
        seen once leaves 1 / steps of itself. Inputs that stay the same then make large states, and large states cost digits.
        """
        (weight, bias), H = self._layer(layer), self.hidden_size
        bound = 1 / math.sqrt(weight.shape[1])
        nn.init.uniform_(weight, -bound, bound)
        nn.init.zeros_(bias)
        bias[:H] = -torch.log(steps - 1)  # sigmoid of it is 1 / steps
        if loud:
            weight[H:] *= torch.sqrt(2 * steps - 1).unsqueeze(1)

    def extra_repr(self) -> str:
        layers = f", num_layers={self.num_layers}" if self.num_layers > 1 else ""
        return f"{self.input_size}, {self.hidden_size}{layers}, reset={self.reset!r}"

    def dtype_and_device(self) -> tuple[torch.dtype, torch.device]:
        weight: Tensor = self.weight_l0  # type: ignore[assignment]
        return weight.dtype, weight.device

    def _layer(self, layer: int) -> tuple[Tensor, Tensor]:
        return getattr(self, f"weight_l{layer}"), getattr(self, f"bias_l{layer}")

    def _unroll(self, x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor, State, State]:
        dtype, learned = self._compute_dtype(x), self._learned("h")
        y, states, finals = x.to(dtype), [], []
        for layer, start in enumerate(state["h"].unbind(1)):
            weight, bias = self._layer(layer)
            gates = self._linear(y, weight, bias)  # [T, B, 2 H]
            fill = None if learned is None else learned[layer]
            h, final = self._recur(None, gates, start, resets, fill, "gated")
            y = h.to(dtype)
            states.append(h)
            finals.append(final)
        if self.num_layers == 1:
            return y, {"h": finals[0].unsqueeze(1)}, {"h": states[0].unsqueeze(2)}
        return y, {"h": torch.stack(finals, 1)}, {"h": torch.stack(states, 2)}
