"""What LSTM and GRU share: parameters named as in torch.nn, reset modes, dtypes under autocast, the loop over layers.

A cell (`lstm.py`, `gru.py`) says what its state holds; `kernels/` computes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from holdfast import state as state_ops
from holdfast.cores.base import Core, RowShape, check_precision, check_reset_mode, check_sizes
from holdfast.kernels import dispatch
from holdfast.kernels.autocast import autocast_dtype
from holdfast.kernels.operands import Resets, Weights
from holdfast.state import State

_HALF = (torch.bfloat16, torch.float16)
# What torch.nn.LSTM takes besides: its default, and what to use here.
_TORCH_OPTIONS: dict[str, tuple[Any, str]] = {
    "batch_first": (False, "sequences are time first, [T, B, ...]: pass x.transpose(0, 1)"),
    "dropout": (0.0, "a rollout and its training would drop other units: use weight decay or a smaller hidden_size"),
    "bidirectional": (False, "a policy cannot see the future"),
    "proj_size": (0, "put an nn.Linear behind the core"),
}


class GatedCore(Core):
    """Layers of gates over a hidden state; every leaf of the state is [B, num_layers, hidden_size].

    reset: "zero" (each episode starts from zeros), "learned" (from a trained vector per layer and leaf), "detach" (the
    values cross episodes, their gradient does not), "never" (flags are ignored).
    kernel: "auto", or a name from `holdfast.kernels.dispatch`; precision: "fast" or "exact", for GPU kernels.

    Other than torch.nn's: the state is a dict of leaves [B, num_layers, hidden_size], not a tuple, and `batch_first`,
    `dropout`, `bidirectional` and `proj_size` are refused.
    """

    cell: str  # the cell's module in each folder of `kernels`
    leaf_names: tuple[str, ...]  # the leaves of the state, in the order of the kernels' arguments
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
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **torch_options: Any,
    ) -> None:
        super().__init__()
        _refuse_torch_options(type(self).__name__, torch_options)
        check_sizes(input_size=input_size, hidden_size=hidden_size, num_layers=num_layers)
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.output_size = hidden_size
        self.bias, self.reset = bias, check_reset_mode(reset)
        self.kernel, self.precision = dispatch.known_kernel(kernel), check_precision(precision)
        self._row_shapes = {leaf: RowShape((num_layers, hidden_size)) for leaf in self.leaf_names}
        kinds = ("weight_ih", "weight_hh", "bias_ih", "bias_hh") if bias else ("weight_ih", "weight_hh")
        self._parameter_names = [[f"{kind}_l{layer}" for kind in kinds] for layer in range(num_layers)]
        rows = self.gates * hidden_size
        for layer, names in enumerate(self._parameter_names):
            size = input_size if layer == 0 else hidden_size
            for name, shape in zip(names, ((rows, size), (rows, hidden_size), (rows,), (rows,))):
                self.register_parameter(name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
        if reset == "learned":
            for leaf in self.leaf_names:
                start = torch.empty(num_layers, hidden_size, device=device, dtype=dtype)
                self.register_parameter(f"initial_{leaf}", nn.Parameter(start))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """torch.nn's initialization: uniform within 1/sqrt(hidden_size). Learned starts begin at 0."""
        bound = 1 / math.sqrt(self.hidden_size)
        for name, p in self.named_parameters():
            if name.startswith("initial_"):
                nn.init.zeros_(p)
            else:
                nn.init.uniform_(p, -bound, bound)

    @property
    def all_weights(self) -> list[list[nn.Parameter]]:
        """The parameters of each layer, as torch.nn gives them."""
        return [[getattr(self, name) for name in names] for names in self._parameter_names]

    def flatten_parameters(self) -> None:
        """Does nothing; torch.nn's prepares cuDNN. For programs that call it."""

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

    def compute_dtype(self, x: Tensor) -> torch.dtype:
        """The dtype of products: the module's, or autocast's. The state keeps the module's."""
        return autocast_dtype(x.device) or self.weight_hh_l0.dtype  # type: ignore[return-value]

    def parameter_names(self, layer: int) -> list[str]:
        """The names of a layer's parameters, in the order of `Weights`."""
        return self._parameter_names[layer]

    def weights(self, layer: int, dtype: torch.dtype) -> Weights:
        """A layer's weights in `dtype`. Cast in every call: autocast's cache would keep casts made under no_grad, and
        the next pass would get no gradients."""
        registered, names = self._parameters, self._parameter_names[layer]
        # getattr alone would do; it takes a tenth of a step. A parametrized weight is an attribute, not registered.
        tensors: Any = [registered[name] if name in registered else getattr(self, name) for name in names]
        return Weights(*(tensors if dtype == tensors[1].dtype else [tensor.to(dtype) for tensor in tensors]))

    def kernel_resets(self, layer: int, resets: Tensor | None) -> Resets:
        """A layer's resets as the kernels take them."""
        if self.reset == "zero":
            return Resets(resets)
        if self.reset == "learned":
            return Resets(resets, *[getattr(self, f"initial_{leaf}")[layer] for leaf in self.leaf_names])
        return Resets(resets, detach=True) if self.reset == "detach" else Resets()

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

    def _layer_states(self, state: State) -> list[Sequence[Tensor]]:
        """The leaves of the state by layer, [B, H] each."""
        leaves = [state[leaf] for leaf in self.leaf_names]
        if self.num_layers == 1:  # the usual case; a step takes only microseconds
            return [[leaf.squeeze(1) for leaf in leaves]]
        return list(zip(*[leaf.unbind(1) for leaf in leaves]))

    def _join_layers(self, layers: Sequence[Sequence[Tensor]]) -> State:
        """One [B, H] per layer and leaf -> leaves [B, L, H]."""
        if len(layers) == 1:
            return {leaf: rows.unsqueeze(1) for leaf, rows in zip(self.leaf_names, layers[0])}
        return {leaf: torch.stack(rows, 1) for leaf, rows in zip(self.leaf_names, zip(*layers))}

    def _step(self, x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor, State]:
        kernel, dtype = dispatch.choose_step(self, x), self.compute_dtype(x)
        if kernel is None and (dtype in _HALF or x.is_cuda or dispatch.needs_reference()):
            # A sequence of one: in half precision the order of roundings shows in the result, so both legs must run the
            # same code to agree. And torch.vmap and ONNX have no rule for torch's cells.
            y, state = self._sequence(x.unsqueeze(0), state, None if resets is None else resets.unsqueeze(0))
            return y.squeeze(0), state
        if kernel is None:
            state = self._reset(state, resets)
        elif self.reset == "detach":
            resets = None  # without gradients a reset changes nothing
        y, finals = x, []
        for layer, start in enumerate(self._layer_states(state)):
            weights = self.weights(layer, dtype)
            if kernel is None:
                final = self._torch_cell(y, start, weights)
            else:
                final = kernel.step(y, *start, self.kernel_resets(layer, resets), weights)
            y = final[0]
            finals.append(final)
        return y.clone(), self._join_layers(finals)

    def _torch_cell(self, x: Tensor, state: Sequence[Tensor], weights: Weights) -> tuple[Tensor, ...]:
        """One step of one layer by torch's own cell, from a state that is already reset."""
        raise NotImplementedError

    def _sequence(self, x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor, State]:
        kernel, dtype = dispatch.choose(self, x), self.compute_dtype(x)
        y, finals = x.to(dtype), []
        for layer, start in enumerate(self._layer_states(state)):
            y, *final = kernel.sequence(y, *start, self.kernel_resets(layer, resets), self.weights(layer, dtype))
            finals.append(final)
        return y, self._join_layers(finals)

    def _trace(self, x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor, State, State]:
        kernel, dtype = dispatch.choose(self, x), self.compute_dtype(x)
        if dtype != self.state_dtype():
            return super()._trace(x, state, resets)
        y, finals, traces = x, [], []
        for layer, start in enumerate(self._layer_states(state)):
            arguments = (y, *start, self.kernel_resets(layer, resets), self.weights(layer, dtype))
            y, final, trace = self._trace_layer(kernel, *arguments)
            finals.append(final)
            traces.append(trace)
        states = {leaf: torch.stack(rows, 2) for leaf, rows in zip(self.leaf_names, zip(*traces))}
        return y, self._join_layers(finals), states

    def _trace_layer(self, kernel: ModuleType, *arguments: Any) -> tuple[Tensor, Sequence[Tensor], Sequence[Tensor]]:
        """y, the final state, and the state after every step without gradients: leaves [T, B, H]."""
        raise NotImplementedError

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        # Learned starts are optional, so that a torch.nn state_dict loads; they are unchanged then.
        super()._load_from_state_dict(state_dict, prefix, *args)
        missing = args[2]
        missing[:] = [k for k in missing if not k.startswith(f"{prefix}initial_")]


def _refuse_torch_options(name: str, options: dict[str, Any]) -> None:
    """Options of torch.nn.LSTM are accepted at their defaults."""
    for option, value in options.items():
        if option not in _TORCH_OPTIONS:
            raise TypeError(f"hf.{name} takes no {option}=")
        default, instead = _TORCH_OPTIONS[option]
        if value != default:
            raise ValueError(f"hf.{name} takes no {option}={value!r}: {instead}")
