"""A bare recurrent module: `(x, state) -> (y, state)`, `(x, state, resets) -> (y, state)`, `nn.LSTM`, `nn.GRU`, a cell."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from holdfast.doctor.columns import columns, describe
from holdfast.doctor.subjects.base import CarriesState, RecordedSegment, Replay, SubjectStep
from holdfast.doctor.subjects.holdfast import carries
from holdfast.state import map_tensors


class Items:
    """Picks some of the items that a policy returns next to its state: an `output=`."""

    def __init__(self, places: list[int], count: int) -> None:
        self.places, self.count = places, count

    def __call__(self, result: Any) -> Any:
        return [result[i] for i in self.places]

    def __repr__(self) -> str:
        return f"{len(self.places)} of {self.count} items (number {', '.join(str(i + 1) for i in self.places)})"


class Module(CarriesState):
    """A pure module, stepped with `[1, B, I]` in the rollout leg and run over `[T, B, I]` in the training leg.

    It returns its next state last, or first if `returns` says so, and next to it anything else; `output` picks from the
    rest what to compare, by default all numbers. `resets`: who handles episode boundaries. `"module"`: it takes a third
    argument, bool `[T, B]`. `"caller"`: the caller zeroes state rows, and cuts a training segment wherever any environment
    starts an episode. `"nobody"`: one call over the whole segment, which is what most scripts around `nn.LSTM` do. The
    default is `"module"` if it has a third parameter and `"caller"` otherwise. `flags`: what the third argument is made of
    resets, such as `lambda resets: 1 - resets.float()`. `state_batch_dim`: the batch dimension of a state tensor (1 for
    `torch.nn`, 0 otherwise). `batch_first`: inputs and outputs are `[B, T, ...]`. `flattened`: they are `[T*B, ...]`, flags
    `[T*B, 1]`, and the module finds B in its state. `one_step`: it takes `[B, ...]`, one step at a time, in both legs.
    """

    framework = "module"
    makes_own_state = True

    def __init__(
        self,
        fn: Any,
        input_size: Any = None,
        *,
        resets: Literal["module", "caller", "nobody"] | None = None,
        flags: Callable[[Tensor], Tensor] | None = None,
        initial_state: Callable[[int], Any] | None = None,
        state_batch_dim: int | None = None,
        batch_first: bool | None = None,
        flattened: bool = False,
        one_step: bool = False,
        returns: Literal["state first", "state last"] = "state last",
        output: Callable[[Any], Any] | None = None,
        num_envs: int = 5,
        carries_across_episodes: bool | None = None,
        name: str | None = None,
    ) -> None:
        space = input_size if input_size is not None else getattr(fn, "input_size", None)
        if space is None:
            raise TypeError(f"{type(fn).__name__} does not say its input_size: pass input_size=")
        super().__init__(space, name=name or getattr(fn, "__name__", type(fn).__name__))
        is_torch = isinstance(fn, nn.RNNBase)
        self.fn = fn
        self.num_envs = num_envs
        self.carries_across_episodes = carries(fn) if carries_across_episodes is None else carries_across_episodes
        self.resets = resets or ("module" if not is_torch and _parameters(fn) > 2 else "caller")
        self.flags, self.output, self.one_step, self.returns = flags, output, one_step, returns
        self.flattened = flattened
        self.initial_state = initial_state
        self.batch_dim = state_batch_dim if state_batch_dim is not None else int(is_torch)
        self.batch_first = bool(getattr(fn, "batch_first", False)) if batch_first is None else batch_first

    def observations(self, count: int, generator: torch.Generator) -> Any:
        weight = next(iter(self.fn.parameters()), None) if isinstance(self.fn, nn.Module) else None
        drawn = super().observations(count, generator)
        return map_tensors(lambda x: x if weight is None or not x.is_floating_point() else x.to(weight.dtype), drawn)

    def begin(self, num_envs: int) -> None:
        self._state = None if self.initial_state is None else self.initial_state(num_envs)

    def step(self, obs: Any, terminated: Tensor, truncated: Tensor, env_ids: Tensor) -> SubjectStep:
        resets = (terminated | truncated)[None]
        with torch.no_grad():
            y, state = self.unroll(map_tensors(lambda x: x[None], obs), self._state, resets)
        self._state = map_tensors(torch.detach, state)
        return SubjectStep(y[0])

    def notes(self) -> list[tuple[str, str]]:
        name, notes = type(self.fn).__name__, []
        if self.resets == "caller":
            said = f"{name} takes no resets; the doctor cut segments at episode starts"
            notes.append(("resets-are-the-callers", said))
        if isinstance(self.output, Items):
            notes.append(("outputs-left-out", f"compared: {self.output} of what {name} returns next to its state"))
        return notes

    def replay(self, segment: RecordedSegment) -> Replay:
        y, state = self.unroll(segment.obs, segment.start, segment.terminated | segment.truncated)
        return Replay(y, state=state)

    def unroll(self, x: Any, state: Any, resets: Tensor) -> tuple[Tensor, Any]:
        """`[T, B, ...]` through the module, with boundaries handled as `self.resets` says: outputs `[T, B, K]`, next state."""
        steps = len(resets)
        cuts = [t for t in range(1, steps) if self.one_step or (self.resets == "caller" and bool(resets[t].any()))]
        outputs, first = [], 0
        for last in [*cuts, steps]:
            if self.resets == "caller" or (self.resets == "nobody" and steps == 1):
                state = self._clear(state, resets[first])
            part = map_tensors(lambda leaf, first=first, last=last: leaf[first:last], x)
            y, state = self._call(part, state, resets[first:last])
            outputs.append(y)
            first = last
        return torch.cat(outputs), state

    def _call(self, x: Any, state: Any, resets: Tensor) -> tuple[Tensor, Any]:
        """One call of the module: `[T, B, ...]` in, `[T, B, K]` and the next state out."""
        steps, rows = resets.shape
        told = resets if self.flags is None else self.flags(resets)
        if self.flattened:
            x, told = map_tensors(lambda leaf: leaf.flatten(0, 1), x), told.flatten()[:, None]
        arguments = [x, told] if self.resets == "module" else [x]
        if self.one_step:
            arguments = [map_tensors(lambda leaf: leaf[0], argument) for argument in arguments]
        elif self.batch_first:
            arguments = [map_tensors(lambda leaf: leaf.transpose(0, 1), argument) for argument in arguments]
        result = self.fn(arguments[0], state, *arguments[1:])
        if not isinstance(result, (tuple, list)) or len(result) < 2:
            raise TypeError(f"expected outputs and the next state, got {describe(result)}")
        rest, after = (result[1:], result[0]) if self.returns == "state first" else (result[:-1], result[-1])
        y = rest if len(rest) > 1 else rest[0]
        numbers = columns(y if self.output is None else self.output(y), steps * rows)
        if self.batch_first:
            return numbers.reshape(rows, steps, -1).transpose(0, 1), after
        return numbers.reshape(steps, rows, -1), after

    def _clear(self, state: Any, resets: Tensor) -> Any:
        if not bool(resets.any()):
            return state

        def clear(x: Tensor) -> Tensor:
            mask = resets.reshape([-1 if d == self.batch_dim else 1 for d in range(x.dim())])
            return torch.where(mask, torch.zeros_like(x), x)

        return map_tensors(clear, state)


def _parameters(fn: Any) -> int:
    target = fn.forward if isinstance(fn, nn.Module) else fn
    return len(inspect.signature(target).parameters)
