"""What LSTM and GRU share: parameters named as in torch.nn, the four reset modes, dtypes under autocast."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from holdfast import state as state_ops
from holdfast.cores.base import Core, RowShape, check_reset_mode
from holdfast.state import State

HALF = (torch.bfloat16, torch.float16)


def stack_layers(rows: list[Tensor]) -> Tensor:
    """One [B, H] per layer -> [B, L, H]."""
    return rows[0].unsqueeze(1) if len(rows) == 1 else torch.stack(rows, 1)


class GatedCore(Core):
    """Layers of gates over a hidden state; every leaf of the state is [B, num_layers, hidden_size].

    reset: "zero" (fresh at each episode), "learned" (a trained start, one vector per layer and leaf), "detach" (the
    value crosses episodes, its gradient does not), "never" (flags are ignored).
    kernel: "auto", or a name from `holdfast.kernels.dispatch`; precision: "fast" or "exact", for GPU kernels.
    """

    leaf_names: tuple[str, ...]
    gates: int

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        bias: bool = True,
        reset: str = "zero",
        kernel: str = "auto",
        precision: str = "fast",
    ) -> None:
        super().__init__()
        for name, value in (("input_size", input_size), ("hidden_size", hidden_size), ("num_layers", num_layers)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if precision not in ("fast", "exact"):
            raise ValueError(f"unknown precision {precision!r}; 'fast' or 'exact'")
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.output_size = hidden_size
        self.bias, self.reset = bias, check_reset_mode(reset)
        self.kernel, self.precision = kernel, precision
        self._row_shapes = {leaf: RowShape((num_layers, hidden_size)) for leaf in self.leaf_names}
        kinds = ("weight_ih", "weight_hh", "bias_ih", "bias_hh") if bias else ("weight_ih", "weight_hh")
        self._names = [[f"{kind}_l{layer}" for kind in kinds] for layer in range(num_layers)]
        for layer in range(num_layers):
            size = input_size if layer == 0 else hidden_size
            self.register_parameter(f"weight_ih_l{layer}", nn.Parameter(torch.empty(self.gates * hidden_size, size)))
            self.register_parameter(
                f"weight_hh_l{layer}", nn.Parameter(torch.empty(self.gates * hidden_size, hidden_size))
            )
            if bias:
                self.register_parameter(f"bias_ih_l{layer}", nn.Parameter(torch.empty(self.gates * hidden_size)))
                self.register_parameter(f"bias_hh_l{layer}", nn.Parameter(torch.empty(self.gates * hidden_size)))
        if reset == "learned":
            for leaf in self.leaf_names:
                self.register_parameter(f"initial_{leaf}", nn.Parameter(torch.zeros(num_layers, hidden_size)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """torch.nn's initialisation: uniform within 1/sqrt(hidden_size). Learned starts begin at 0."""
        bound = 1 / math.sqrt(self.hidden_size)
        for name, p in self.named_parameters():
            if name.startswith("initial_"):
                nn.init.zeros_(p)
            else:
                nn.init.uniform_(p, -bound, bound)

    def extra_repr(self) -> str:
        layers = f", num_layers={self.num_layers}" if self.num_layers > 1 else ""
        return f"{self.input_size}, {self.hidden_size}{layers}, reset={self.reset!r}"

    def row_shapes(self) -> State:
        return self._row_shapes

    def initial_rows(self) -> State | None:
        if self.reset != "learned":
            return None
        return {leaf: getattr(self, f"initial_{leaf}") for leaf in self.leaf_names}

    def dtype_and_device(self) -> tuple[torch.dtype, torch.device]:
        weight: Tensor = self.weight_hh_l0  # type: ignore[assignment]
        return weight.dtype, weight.device

    def _compute_dtype(self, x: Tensor) -> torch.dtype:
        """The dtype of products: the module's, or autocast's. The state keeps the module's."""
        kind = x.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.dtype_and_device()[0]

    def _weights(self, layer: int, dtype: torch.dtype) -> tuple[Any, Any, Any, Any]:
        """w_ih, w_hh, b_ih, b_hh in `dtype`. Cast anew in each call: autocast's cache would keep casts made under
        no_grad, and the next pass would get no gradients."""
        names = self._names[layer]
        w_ih, w_hh = getattr(self, names[0]), getattr(self, names[1])
        b_ih, b_hh = (getattr(self, names[2]), getattr(self, names[3])) if self.bias else (None, None)
        if dtype == w_hh.dtype:
            return w_ih, w_hh, b_ih, b_hh
        return (
            w_ih.to(dtype),
            w_hh.to(dtype),
            None if b_ih is None else b_ih.to(dtype),
            None if b_hh is None else b_hh.to(dtype),
        )

    def _reset(self, state: State, resets: Tensor | None) -> State:
        """The state after the resets of one step; resets [B]."""
        if resets is None or self.reset == "never":
            return state
        if self.reset == "zero":
            mask = resets.view(-1, 1, 1)
            return {leaf: s.masked_fill(mask, 0.0) for leaf, s in state.items()}
        if self.reset == "detach":
            return state_ops.where(resets, state_ops.detach(state), state)
        return state_ops.where(resets, self.initial_state(resets.shape[0]), state)

    def _step_of_sequence(self, x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor, State]:
        """A step as a sequence of one. In half precision the order of roundings shows in the result, so both legs must
        run the same code to agree."""
        y, state = self._sequence(x.unsqueeze(0), state, None if resets is None else resets.unsqueeze(0))
        return y.squeeze(0), state

    def _reset_arguments(self, layer: int, resets: Tensor | None) -> tuple[Tensor | None, list[Tensor | None]]:
        """(resets, [fill per leaf]) as the kernels take them."""
        if self.reset == "never":
            resets = None
        if self.reset != "learned":
            return resets, [None] * len(self.leaf_names)
        return resets, [getattr(self, f"initial_{leaf}")[layer] for leaf in self.leaf_names]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        # Learned starts are optional, so that a torch.nn state_dict loads; they then stay as they are.
        super()._load_from_state_dict(state_dict, prefix, *args)
        missing = args[2]
        missing[:] = [k for k in missing if not k.startswith(f"{prefix}initial_")]
