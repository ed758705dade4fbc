"""A bare recurrent module: `(x, state) -> (y, state)`, `(x, state, resets) -> (y, state)`, `nn.LSTM`, `nn.GRU`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from holdfast.doctor.subjects.base import NotOffered, RecordedSegment, Replay, Subject, SubjectStep
from holdfast.doctor.subjects.holdfast import carries
from holdfast.doctor.trees import map_tensors, tensors_in


class Module(Subject):
    """A pure module, stepped with `[1, B, I]` in the rollout leg and run over `[T, B, I]` in the training leg.

    `resets`: who handles episode boundaries. `"module"`: it takes a third argument, bool `[T, B]`. `"caller"`: the
    caller zeroes state rows, and cuts a training segment wherever any environment starts an episode. `"nobody"`: one
    call over the whole segment, which is what most scripts around `nn.LSTM` do. The default is `"module"` if it has a
    third parameter and `"caller"` otherwise. `state_batch_dim`: the batch dimension of a state tensor (1 for
    `torch.nn`, 0 otherwise). `batch_first`: inputs and outputs are `[B, T, ...]`.
    """

    framework = "module"
    makes_own_state = True

    def __init__(
        self,
        fn: Any,
        input_size: Any = None,
        *,
        resets: Literal["module", "caller", "nobody"] | None = None,
        initial_state: Callable[[int], Any] | None = None,
        state_batch_dim: int | None = None,
        batch_first: bool | None = None,
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
        self.initial_state = initial_state
        self.batch_dim = state_batch_dim if state_batch_dim is not None else int(is_torch)
        self.batch_first = bool(getattr(fn, "batch_first", False)) if batch_first is None else batch_first
        self._state: Any = None

    def observations(self, count: int, generator: torch.Generator) -> Any:
        weight = next(iter(self.fn.parameters()), None) if isinstance(self.fn, nn.Module) else None
        drawn = super().observations(count, generator)
        return drawn if weight is None else map_tensors(lambda x: x.to(weight.dtype), drawn)

    def begin(self, num_envs: int) -> None:
        self._state = None if self.initial_state is None else self.initial_state(num_envs)

    def step(self, obs: Any, terminated: Tensor, truncated: Tensor, env_ids: Tensor) -> SubjectStep:
        resets = (terminated | truncated)[None]
        with torch.no_grad():
            y, state = self._run(obs[None], self._state, resets)
        self._state = map_tensors(torch.detach, state)
        return SubjectStep(y[0])

    def mark(self) -> Any:
        return map_tensors(torch.clone, self._state)

    def state(self) -> Any:
        return self._state

    def poison(self, row: int) -> None:
        if not tensors_in(self._state):
            raise NotOffered("it has no state before its first step")
        for tensor in tensors_in(self._state):
            tensor.select(self.batch_dim, row).fill_(float("nan"))

    def notes(self) -> list[tuple[str, str]]:
        if self.resets != "caller":
            return []
        return [("resets-are-the-callers", f"{self.name} takes no resets; the doctor cut segments at episode starts")]

    def replay(self, segment: RecordedSegment) -> Replay:
        y, state = self._run(segment.obs, segment.start, segment.terminated | segment.truncated)
        return Replay(y, state=state)

    def _run(self, x: Tensor, state: Any, resets: Tensor) -> tuple[Tensor, Any]:
        """`[T, B, I]` through the module, with boundaries handled as `self.resets` says."""
        if self.resets == "module":
            return self._call(x, state, resets.T if self.batch_first else resets)
        if self.resets == "nobody" and len(x) > 1:
            return self._call(x, state)
        outputs, first = [], 0
        cuts = [t for t in range(1, len(x)) if bool(resets[t].any())]
        for last in [*cuts, len(x)]:
            state = self._clear(state, resets[first])
            y, state = self._call(x[first:last], state)
            outputs.append(y)
            first = last
        return torch.cat(outputs), state

    def _call(self, x: Tensor, state: Any, *resets: Tensor) -> tuple[Tensor, Any]:
        y, state = self.fn(x.transpose(0, 1) if self.batch_first else x, state, *resets)
        return (y.transpose(0, 1) if self.batch_first else y), state

    def _clear(self, state: Any, resets: Tensor) -> Any:
        def clear(x: Tensor) -> Tensor:
            mask = resets.reshape([-1 if d == self.batch_dim else 1 for d in range(x.dim())])
            return torch.where(mask, torch.zeros_like(x), x)

        return map_tensors(clear, state)


def _parameters(fn: Any) -> int:
    target = fn.forward if isinstance(fn, nn.Module) else fn
    return len(inspect.signature(target).parameters)
