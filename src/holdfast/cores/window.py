"""`hf.WindowAttention`: softmax attention over the last `window` steps of the episode.

    core = hf.WindowAttention(64, 128, window=64)
    y, state = core(x, state, resets)      # state {"keys", "values": [B, heads, 63, 32], "age": [B]}

Exact within its window and blind beyond it. The state is a ring of the last `window - 1` keys and values, and how many
steps of the present episode they hold. Positions are distances: each head adds a learned bias per distance to its
scores. Norms and an MLP around it are `hf.Block`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.checks import values_are_readable
from holdfast.cores.base import Core, RowShape, check_heads, check_precision, check_reset_mode, check_sizes
from holdfast.kernels import dispatch
from holdfast.kernels.autocast import without_autocast
from holdfast.kernels.operands import Ring
from holdfast.kernels.portable.window import attend_once, is_not_finite, stored_age
from holdfast.state import State, rows_mask

WINDOW = 64
"""Steps, unless somebody says how many."""
_BIAS_SCALE = 4.0
"""Adam moves each number by about the learning rate per update; a score must move by several units to matter."""

_REFUSED = {
    "learned": "a window starts empty, so there are no numbers to learn; use reset='zero'",
    "detach": "one query would see steps with and without gradients; use 'zero', or 'never' to see across episodes",
}


class WindowAttention(Core):
    """Attention over the last `window` steps, including the current one.

    reset: "zero" (a query sees only steps of its own episode) or "never" (flags are ignored).
    kernel: "auto", "reference" or "portable". precision: for all cores alike; scores and sums are always float32 or wider.
    """

    supports_advance = True

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        window: int = WINDOW,
        num_heads: int = 4,
        reset: str = "zero",
        kernel: str = "auto",
        precision: str = "fast",
    ) -> None:
        super().__init__()
        check_sizes(input_size=input_size, hidden_size=hidden_size, num_heads=num_heads)
        if isinstance(window, bool) or not isinstance(window, int) or window < 2:
            raise ValueError(
                f"window must be an integer of at least 2, got {window!r}; a window of 1 remembers nothing"
            )
        check_heads(hidden_size, num_heads)
        if check_reset_mode(reset) in _REFUSED:
            raise ValueError(f"WindowAttention has no reset mode {reset!r}: {_REFUSED[reset]}")
        self.input_size, self.hidden_size, self.output_size = input_size, hidden_size, hidden_size
        self.window, self.num_heads, self.reset = window, num_heads, reset
        self.kernel, self.precision = dispatch.known_kernel(kernel, dispatch.PURE_TORCH), check_precision(precision)
        ring = RowShape((num_heads, window - 1, hidden_size // num_heads))
        self._row_shapes = {"keys": ring, "values": ring, "age": RowShape((), torch.int32)}
        self.qkv = nn.Linear(input_size, 3 * hidden_size)
        self.out = nn.Linear(hidden_size, hidden_size)
        self.distance_bias = nn.Parameter(torch.zeros(num_heads, window))

    def extra_repr(self) -> str:
        return (
            f"{self.input_size}, {self.hidden_size}, window={self.window}, num_heads={self.num_heads}, "
            f"reset={self.reset!r}"
        )

    def dtype_and_device(self) -> tuple[torch.dtype, torch.device]:
        return self.qkv.weight.dtype, self.qkv.weight.device

    def row_shapes(self) -> State:
        return self._row_shapes

    def context(self) -> int:
        return self.window - 1

    def _step(self, x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor, State]:
        ring = self._after_resets(state, resets)
        q, k, v = self._project(x, spread_nan=True)
        slot = self._slot_to_write(ring)
        new = Ring(
            ring.keys.scatter(2, slot, k.unsqueeze(2).to(ring.keys.dtype)),
            ring.values.scatter(2, slot, v.unsqueeze(2).to(ring.values.dtype)),
            stored_age(ring.age + 1, ring.slots),
        )
        return self._attend_once(x, q, k, v, ring), new.as_state()

    def _after_resets(self, state: State, resets: Tensor | None) -> Ring:
        ring = Ring(**state)
        if resets is None or self.reset == "never":
            return ring
        return Ring(*[leaf.masked_fill(rows_mask(resets, leaf), 0) for leaf in ring])

    @torch.no_grad()
    def advance_(self, x: Tensor, state: State, resets: Tensor | None) -> Tensor:
        ring = Ring(**state)
        if resets is not None and self.reset == "zero":
            _clear_(ring, resets)
        q, k, v = self._project(x, spread_nan=True)
        y = self._attend_once(x, q, k, v, ring)
        slot = self._slot_to_write(ring)
        ring.keys.scatter_(2, slot, k.unsqueeze(2).to(ring.keys.dtype))
        ring.values.scatter_(2, slot, v.unsqueeze(2).to(ring.values.dtype))
        ring.age.copy_(stored_age(ring.age + 1, ring.slots))
        return y

    def _sequence(self, x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor, State]:
        y, new = self._attend(dispatch.by_name("window", self.kernel).sequence, x, state, resets)
        stored = Ring(new.keys.to(self.state_dtype()), new.values.to(self.state_dtype()), new.age)
        return self.out(y.flatten(2).to(x.dtype)), stored.as_state()

    def output_unchecked(self, x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor]:
        if x.dim() == 2:
            q, k, v = self._project(x, spread_nan=True)
            return (self._attend_once(x, q, k, v, self._after_resets(state, resets)),)
        y = self._attend(dispatch.by_name("window", self.kernel).output, x, state, resets)
        return (self.out(y.flatten(2).to(x.dtype)),)

    def _attend(self, kernel: Callable[..., Any], x: Tensor, state: State, resets: Tensor | None) -> Any:
        """What a kernel gives for a sequence, in its dtype."""
        q, k, v = self._project(x)
        ring = Ring(state["keys"].to(q.dtype), state["values"].to(q.dtype), state["age"])
        with without_autocast(x.device):
            return kernel(q, k, v, ring, None if self.reset == "never" else resets, self._distance_bias(q.dtype))

    def _project(self, x: Tensor, spread_nan: bool = False) -> tuple[Tensor, ...]:
        """q, k, v [..., heads, d] of each step, in float32 or wider.

        spread_nan: a step with a number that is not finite is NaN as a whole, as the kernels of sequences have it.
        """
        qkv = self.qkv(x)
        qkv = qkv.to(torch.promote_types(qkv.dtype, torch.float32))
        if spread_nan:
            qkv = qkv.masked_fill(is_not_finite(qkv.sum(-1, keepdim=True)), torch.nan)
        return qkv.unflatten(-1, (3, self.num_heads, -1)).unbind(-3)

    def _attend_once(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Tensor:
        wide = Ring(ring.keys.to(q.dtype), ring.values.to(q.dtype), ring.age)
        with without_autocast(x.device):
            y = attend_once(q, k, v, wide, self._distance_bias(q.dtype))
        return self.out(y.flatten(1).to(x.dtype))

    def _distance_bias(self, dtype: torch.dtype) -> Tensor:
        return self.distance_bias.to(dtype) * _BIAS_SCALE

    def _slot_to_write(self, ring: Ring) -> Tensor:
        """The index of `scatter` for one step: [B, h, 1, d]."""
        B, heads, _, size = ring.keys.shape
        return (ring.age.long() % ring.slots).view(B, 1, 1, 1).expand(B, heads, 1, size)


def _clear_(ring: Ring, resets: Tensor) -> None:
    """Empty the rings of the rows that are reset, in place."""
    if values_are_readable(resets):
        rows = resets.nonzero().squeeze(1)  # a pass over a whole ring costs as much as the step
        if len(rows):
            for leaf in ring:
                leaf.index_fill_(0, rows, 0)
        return
    for leaf in ring:
        leaf.masked_fill_(rows_mask(resets, leaf), 0)
