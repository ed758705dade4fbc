"""`Core`: the part of a network that remembers, as a pure function of (input, state, resets).

    y, state = core(x, state=None, resets=None)
    # x [T, B, I] -> y [T, B, O]   a sequence;   x [B, I] -> y [B, O]   one step

A core keeps nothing between calls and differentiates everything. `resets[t, b]` is True when `x[t, b]` is the first
observation of an episode: the state of row b is reset *before* that step. None means no reset. The rule is the same in
both forms, so a sequence equals its steps and any chunking of it. States are stored by `Memory`, not here.

A new cell subclasses `Core`, sets `input_size` and `output_size`, and writes (docs/own_memory.md):

- `row_shapes()`: the state of one environment, as a tree of `RowShape`. A leaf that fixes a dtype has that dtype in
  every module; all others follow the module.
- `step(x, state)`: one step, from a state that is already reset.
- or `sequence(x, state, resets)`: if there is something faster than a loop over steps; it does its own resets.
- `initial_rows()`: only if a fresh state is not zeros.
- `context()`: only if the state holds the last inputs and nothing else.
- `advance_(x, state, resets)` and `supports_advance = True`: only if the state is too large to copy at every step.

This file does the checking. Our own cells, which reset inside their kernels, write `_step` and `_sequence`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from holdfast import state as state_ops
from holdfast.checks import check_resets, is_debug, is_without_numbers, locate_nonfinite
from holdfast.cores import lazy_gradient, scan
from holdfast.kernels.autocast import autocast_dtype
from holdfast.state import RowShape, State

RESET_MODES = ("zero", "learned", "detach", "never")


def _may_share(y: Tensor, state: State) -> bool:
    """Whether y may hold the numbers of a state, which a caller could then change. What is compiled looks at the objects alone."""
    parts = state_ops.leaves(state)
    if torch.compiler.is_compiling() or is_without_numbers(y):
        return any(y is leaf for leaf in parts)
    return any(y.untyped_storage().data_ptr() == leaf.untyped_storage().data_ptr() for leaf in parts)


def check_sizes(**sizes: Any) -> None:
    """Raise ValueError unless all are positive integers."""
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")


def check_reset_mode(reset: str) -> str:
    if reset not in RESET_MODES:
        raise ValueError(f"unknown reset mode {reset!r}; one of {', '.join(map(repr, RESET_MODES))}")
    return reset


def check_precision(precision: str) -> str:
    if precision not in ("fast", "exact"):
        raise ValueError(f"unknown precision {precision!r}; 'fast' or 'exact'")
    return precision


def check_heads(hidden_size: int, num_heads: int) -> None:
    if hidden_size % num_heads:
        raise ValueError(f"hidden_size {hidden_size} must be a multiple of num_heads {num_heads}")


class Core(nn.Module):
    """Base class of everything that remembers. The module docstring states the contract."""

    input_size: int
    output_size: int
    supports_advance: bool = False
    """Whether `advance_` is implemented."""
    reset: str = "zero"
    """The reset mode. A cell that writes `step` gets all of them by setting it; "learned" needs `initial_rows` too."""
    compiled_steps: int = 0
    """Run a loop over `step` through torch.compile, so many steps at a time (8 is a good number); 0: without."""

    def __init__(self) -> None:
        super().__init__()
        self._place = torch.empty(0)  # moves with the module, but is not part of it

    # --- what a cell writes ----------------------------------------------------------------------------------------

    def row_shapes(self) -> State:
        """The state of one environment: a tree whose leaves are `RowShape`s. The same for the life of the core."""
        raise NotImplementedError

    def initial_rows(self) -> State | None:
        """What a fresh state starts from, a tree of tensors without the batch dimension; None means zeros."""
        return None

    def context(self) -> int | None:
        """Steps after which the state follows from the inputs alone, so that nobody needs to store it; None: never."""
        return None if state_ops.leaves(self.row_shapes()) else 0

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """x [B, I] and the state, reset where an episode begins -> y [B, O] and the new state."""
        raise NotImplementedError(f"write step(self, x, state) in {type(self).__name__}: one step, or sequence")

    def sequence(self, x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor, State]:
        """x [T, B, I], resets [T, B] or None -> y [T, B, O] and the final state. By default a loop over steps."""
        return scan.over_time(self, x, state, resets)

    def reset_rows(self, state: State, resets: Tensor | None) -> State:
        """The state with the flagged rows [B] as the reset mode says: fresh, or in "detach" mode without their gradient."""
        if resets is None or self.reset == "never":
            return state
        other = state_ops.detach(state) if self.reset == "detach" else self.initial_state(resets.shape[0])
        return state_ops.where(resets, other, state)  # selects: a NaN does not survive

    def _step(self, x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor, State]:
        """x [B, I], resets [B] -> y [B, O] that shares no storage with the new state, and that state."""
        kind = type(self)
        if kind.step is Core.step and kind.sequence is not Core.sequence:
            y, state = self.sequence(x.unsqueeze(0), state, None if resets is None else resets.unsqueeze(0))
            y = y.squeeze(0)
        else:
            y, state = self.step(x, self.reset_rows(state, resets))
        return (y.clone() if _may_share(y, state) else y), state

    def _sequence(self, x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor, State]:
        """x [T, B, I], resets [T, B] -> y [T, B, O] and the final state."""
        y, state = self.sequence(x, state, resets)
        return (y.clone() if _may_share(y, state) else y), state

    def _trace(self, x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor, State, State]:
        """`_sequence`, and the state after every step: leaves [T, B, ...], without gradients."""
        ys, states = [], []
        for t, x_t in enumerate(x.unbind(0)):
            y, state = self._step(x_t, state, None if resets is None else resets[t])
            ys.append(y)
            states.append(state_ops.detach(state))
        return torch.stack(ys), state, state_ops.tree_map(lambda *leaves: torch.stack(leaves), *states)

    def _states_of_steps(self, x: Tensor, state: State, resets: Tensor | None) -> State:
        """The state after every step, differentiable: slow, for a gradient that is rarely asked for."""
        states = []
        for t, x_t in enumerate(x.unbind(0)):
            _, state = self._step(x_t, state, None if resets is None else resets[t])
            states.append(state)
        return state_ops.tree_map(lambda *leaves: torch.stack(leaves), *states)

    def advance_(self, x: Tensor, state: State, resets: Tensor | None) -> Tensor:
        """One step that updates the tensors of `state` in place: x [B, I], resets [B] -> y [B, O]. No gradients.

        Optional: check `supports_advance` first. y and the updated state equal those of a pure step. Only a rollout
        engine that owns its state may call it, and it copies the state wherever a training chunk starts.
        """
        raise NotImplementedError(f"{type(self).__name__} has no in-place step; call the core instead")

    # --- what everybody uses ---------------------------------------------------------------------------------------

    def initial_state(self, batch_size: int) -> State:
        """A fresh state of `batch_size` rows on the module's device; usable in backward.

        Leaves have the module's dtype, or the one that their `RowShape` fixes.
        """
        if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return state_ops.clone(self.initial_state(batch_size))
        shapes, rows = self.row_shapes(), self.initial_rows()
        if rows is None:
            dtype, device = self.dtype_and_device()
            return state_ops.tree_map(
                lambda r: torch.zeros(batch_size, *r.shape, dtype=r.dtype or dtype, device=device), shapes
            )
        return state_ops.tree_map(
            lambda r, row: row.to(r.dtype or row.dtype).expand(batch_size, *r.shape), shapes, rows
        )

    def forward(self, x: Tensor, state: State = None, resets: Tensor | None = None) -> tuple[Tensor, State]:
        self._check_input(x)
        batch = x.shape[-2]
        if resets is not None:
            check_resets(resets, tuple(x.shape[:-1]), x.device)
        if state is None:
            state = self.initial_state(batch)
        else:
            self.check_state(state, batch)
        if x.dim() == 2:
            y, state = self._step(x, state, resets)
        elif x.shape[0] == 0:
            raise ValueError("the sequence is empty (T = 0); x is time-major, [T, B, input_size]")
        else:
            y, state = self._sequence(x, state, resets)
        if is_debug():
            locate_nonfinite(y, x)
        return y, state

    def trace(self, x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor, State, State]:
        """`forward` on a sequence [T, B, I], and the state after every step: leaves [T, B, ...].

        The gradient of these states is computed by rerunning the steps, if it is needed. In compiled code they have
        none.
        """
        self._check_input(x)
        if resets is not None:
            check_resets(resets, tuple(x.shape[:-1]), x.device)
        self.check_state(state, x.shape[-2])
        y, final, states = self._trace(x, state, resets)
        if not torch.compiler.is_compiling():
            states = lazy_gradient.attach(states, self, self._states_of_steps, x, state, resets)
        return y, final, states

    # For callers that have checked input, state and resets: a core made of cores, a policy in use.

    def step_unchecked(self, x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor, State]:
        """One step without checks."""
        return self._step(x, state, resets)

    def sequence_unchecked(self, x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor, State]:
        """A sequence without checks."""
        return self._sequence(x, state, resets)

    def trace_unchecked(self, x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor, State, State]:
        """`trace` without checks."""
        return self._trace(x, state, resets)

    def output_unchecked(self, x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor]:
        """(y,) of a step or a sequence without checks, if the state after it is not needed. A core whose new state costs
        something overrides this."""
        return ((self._step if x.dim() == 2 else self._sequence)(x, state, resets)[0],)

    def advance_or_copy_(self, x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor]:
        """(y,) of one step that leaves the new state in the tensors of `state`, with `advance_` or without."""
        if self.supports_advance:
            return (self.advance_(x, state, resets),)
        y, new = self._step(x, state, resets)
        state_ops.tree_map(lambda row, old, leaf: old.copy_(leaf), self.row_shapes(), state, new)
        return (y,)

    # --- states of this core ---------------------------------------------------------------------------------------

    def check_state(self, state: State, batch_size: int) -> None:
        """Raise a ValueError unless `state` was made by a core like this one, for this batch size."""
        what = state_ops.mismatch(state, self.row_shapes(), batch_size, *self.dtype_and_device())
        if what:
            raise ValueError(self._does_not_fit(what, batch_size))

    def as_state(self, state: Any, batch_size: int) -> State:
        """Arrays or tensors as a checked state of this core: on its device, each leaf in its dtype."""
        what = state_ops.structure_mismatch(state, self.row_shapes())
        if what:
            raise ValueError(self._does_not_fit(what, batch_size))
        state = state_ops.convert(state, self.row_shapes(), *self.dtype_and_device())
        self.check_state(state, batch_size)
        return state

    def _does_not_fit(self, what: str, batch_size: int) -> str:
        return (
            f"this state does not fit {type(self).__name__}({self.extra_repr()}) with a batch of {batch_size}: {what}. "
            "Pass a state that this core returned, core.initial_state(batch_size), or None"
        )

    def state_dtype(self) -> torch.dtype:
        """The dtype of every leaf that does not fix its own."""
        return self.dtype_and_device()[0]

    def device(self) -> torch.device:
        return self.dtype_and_device()[1]

    def dtype_and_device(self) -> tuple[torch.dtype, torch.device]:
        """The module's: of its first parameter or floating-point buffer, or where a module without them was made or moved to."""
        for p in self.parameters():
            return p.dtype, p.device
        for b in self.buffers():
            if b.is_floating_point():
                return b.dtype, b.device
        return self._place.dtype, self._place.device

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self._place = fn(self._place)
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def _check_input(self, x: Any) -> None:
        name = type(self).__name__
        if not isinstance(x, Tensor):
            raise TypeError(
                f"{name} got a {type(x).__name__}, expected a tensor [T, B, {self.input_size}] "
                f"or [B, {self.input_size}]"
            )
        if x.dim() not in (2, 3) or x.shape[-1] != self.input_size:
            raise ValueError(
                f"{name} got an input of shape {tuple(x.shape)}, expected [T, B, {self.input_size}] "
                f"(a sequence, time first) or [B, {self.input_size}] (one step)"
            )
        dtype, device = self.dtype_and_device()
        if device.type == "meta" and x.device != device:
            raise ValueError(
                f"{name} is on the meta device, which holds no data; allocate it with "
                "core.to_empty(device='cpu'), then load weights with core.load_state_dict(...)"
            )
        if x.device != device:
            raise ValueError(f"{name} is on {device}, its input on {x.device}; move one of them with .to(...)")
        if x.dtype != dtype and not (x.is_floating_point() and autocast_dtype(device) is not None):
            raise TypeError(
                f"{name} has dtype {dtype}, its input {x.dtype}; convert one of them, or use torch.autocast"
            )


def reset_mode_of(core: Core) -> str:
    """Of a core and all inside it, the mode that lets most through; "learned" counts as "zero"."""
    modes = {part.reset for part in core.modules() if isinstance(part, Core)}
    return next((mode for mode in ("never", "detach") if mode in modes), "zero")


__all__ = [
    "RESET_MODES", "Core", "RowShape", "check_heads", "check_precision", "check_reset_mode", "check_sizes", "reset_mode_of",
]  # fmt: skip
