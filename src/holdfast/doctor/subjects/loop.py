"""A training loop written by hand, as two functions: one step of the rollout, and training on a stored segment."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.doctor.columns import columns, describe
from holdfast.doctor.subjects.base import CarriesState, RecordedSegment, Replay, SubjectStep
from holdfast.state import map_tensors


class Loop(CarriesState):
    """What your script does with `net`, whose state your script carries.

        def step(net, obs, h, first):                        # the rollout: one step
            y, h = net(obs, h * ~first[:, None])
            return y, h.detach()

        def train(net, obs, h, first):                       # training: [T, B, ...] from the stored state
            ys = []
            for x, new in zip(obs, first):
                y, h = net(x, h * ~new[:, None])
                ys.append(y)
            return torch.stack(ys)

        doctor.examine(Loop(net, (4,), start=lambda net, n: torch.zeros(n, 32), step=step, train=train))

    `first` `[B]` or `[T, B]` is True at the first observation of an episode. Write what your script writes: its own reset, its
    own detach. `step` runs under `no_grad` unless `no_grad=False`. Outputs are anything with numbers: logits, (logits, value).
    If training computes log-probabilities, `step` returns a `SubjectStep` with the action, and `train` takes the actions as a fifth
    argument, without a default, and returns a `Replay`.
    `new_rollout(net, state) -> state`: what your script does to the state when a rollout starts, such as clearing it.
    `whole_episodes`: training replays whole episodes only. `bptt`: over how many steps gradients flow on purpose.
    `state_batch_dim`: the dimension of environments in tensors of the state; 1 for those of `torch.nn`.
    """

    def __init__(
        self,
        net: nn.Module,
        observation_space: Any,
        *,
        start: Callable[[Any, int], Any],
        step: Callable[[Any, Any, Any, Tensor], tuple[Any, Any]],
        train: Callable[..., Any],
        new_rollout: Callable[[Any, Any], Any] | None = None,
        whole_episodes: bool = False,
        bptt: int | None = None,
        no_grad: bool = True,
        state_batch_dim: int = 0,
        num_envs: int = 5,
        name: str | None = None,
    ) -> None:
        super().__init__(observation_space, name=name or type(net).__name__)
        self.net = net
        self._start, self._step, self._train, self._new_rollout = start, step, train, new_rollout
        self.whole_episodes, self.bptt, self.no_grad, self.num_envs = whole_episodes, bptt, no_grad, num_envs
        self.batch_dim = state_batch_dim

    def begin(self, num_envs: int) -> None:
        self._state = self._start(self.net, num_envs)

    def begin_rollout(self) -> None:
        if self._new_rollout is not None:
            self._state = self._new_rollout(self.net, self._state)

    def step(self, obs: Any, terminated: Tensor, truncated: Tensor, env_ids: Tensor) -> SubjectStep:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.no_grad):
            returned = self._step(self.net, obs, self._state, terminated | truncated)
        if not isinstance(returned, (tuple, list)) or len(returned) != 2:
            raise TypeError(f"step returned {describe(returned)}, expected outputs and the next state")
        result, self._state = returned
        return result if isinstance(result, SubjectStep) else SubjectStep(columns(result, len(terminated)))

    def replay(self, segment: RecordedSegment) -> Replay:
        steps, rows = segment.resets.shape
        needed = [p for p in inspect.signature(self._train).parameters.values() if p.default is p.empty]
        positional = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in needed)
        actions = [segment.actions] if positional > 4 else []
        result = self._train(self.net, segment.obs, segment.start, segment.resets, *actions)
        if isinstance(result, Replay):
            return result
        flat = map_tensors(lambda x: x.flatten(0, 1) if x.shape[:2] == (steps, rows) else x, result)
        return Replay(columns(flat, steps * rows).reshape(steps, rows, -1))
