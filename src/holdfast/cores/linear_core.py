"""What the linear recurrent cores share: options, reset modes, float32 states, dtypes under autocast, one form of the call.

A cell (`mingru.py`, `lru.py`, `ffm.py`) writes `_unroll`; the recurrence itself is `kernels/reference/linear.py` and its
fast forms. States are float32 in every module: bfloat16 holds neither 257 nor 0.999. A step is a sequence of length 1, so
both legs run the same code.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast import state as state_ops
from holdfast.cores.base import Core, RowShape, check_precision, check_reset_mode
from holdfast.kernels import dispatch
from holdfast.kernels.autocast import autocast_dtype
from holdfast.kernels.operands import Resets
from holdfast.state import State

STATE_DTYPE = torch.float32


class LinearCore(Core):
    """A core around a linear recurrence; every leaf of its state has one shape and is float32.

    reset: "zero" (each episode starts from zeros), "learned" (from trained numbers), "detach" (the values cross episodes,
    their gradient does not), "never" (flags are ignored).
    kernel: "auto", or a name from `holdfast.kernels.dispatch`; precision: "fast" or "exact", for products on a GPU.
    """

    leaf_names: tuple[str, ...]

    def __init__(self, row: tuple[int, ...], reset: str, kernel: str, precision: str) -> None:
        super().__init__()
        self.reset, self.precision = check_reset_mode(reset), check_precision(precision)
        self.kernel = dispatch.known_kernel(kernel)
        self._row_shapes = {leaf: RowShape(row, STATE_DTYPE) for leaf in self.leaf_names}
        if reset == "learned":
            for leaf in self.leaf_names:
                self.register_parameter(f"initial_{leaf}", nn.Parameter(torch.zeros(row)))

    def _unroll(self, x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor, State, State]:
        """x [T, B, I], resets [T, B] -> y [T, B, O], the final state, and the state after every step [T, B, ...]."""
        raise NotImplementedError

    # --- for the cells ---------------------------------------------------------------------------------------------

    def _recur(
        self, a: Tensor | None, b: Tensor, h0: Tensor, resets: Tensor | None, fill: Tensor | None, form: str
    ) -> tuple[Tensor, Tensor]:
        """The recurrence in the reset mode of this core. fill: the learned start."""
        b = b.to(STATE_DTYPE)
        if self.reset == "never":
            resets = None
        fill = None if fill is None else fill.to(STATE_DTYPE)
        rule = Resets(resets, fill, None, self.reset == "detach")
        return dispatch.choose_linear(self.kernel, b).sequence(a, b, h0, rule, form)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., I] in the compute dtype times a weight of the module, which is cast in every call: autocast's cache
        would keep casts made under no_grad, and the next pass would get no gradients."""
        dtype = x.dtype
        weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        if x.is_cuda and dtype == torch.float32 and self.precision == "fast" and not dispatch.needs_reference():
            from holdfast.kernels.gpu import products  # imported only where there is a GPU

            return products.linear(x, weight, bias)
        return F.linear(x, weight, bias)

    def _learned(self, leaf: str) -> Tensor | None:
        return getattr(self, f"initial_{leaf}") if self.reset == "learned" else None

    def _compute_dtype(self, x: Tensor) -> torch.dtype:
        """The dtype of products: the module's, or autocast's."""
        return autocast_dtype(x.device) or self.state_dtype()

    # --- the contract of Core --------------------------------------------------------------------------------------

    def row_shapes(self) -> State:
        return self._row_shapes

    def initial_rows(self) -> State | None:
        if self.reset != "learned":
            return None
        return {leaf: getattr(self, f"initial_{leaf}") for leaf in self.leaf_names}

    def _step(self, x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor, State]:
        y, final, _ = self._unroll(x.unsqueeze(0), state, None if resets is None else resets.unsqueeze(0))
        return y.squeeze(0), final

    def _sequence(self, x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor, State]:
        y, final, _ = self._unroll(x, state, resets)
        return y, final

    def _trace(self, x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor, State, State]:
        y, final, states = self._unroll(x, state, resets)
        return y, final, state_ops.detach(states)


def complex_state(names: Sequence[str], h: Tensor, row: tuple[int, ...]) -> State:
    """h [B, 2 n], real parts, then imaginary parts, as two leaves [B, *row] that share no storage."""
    return {
        name: part.clone(memory_format=torch.contiguous_format).unflatten(-1, row)
        for name, part in zip(names, h.chunk(2, dim=-1))
    }
