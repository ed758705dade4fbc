"""Holdfast's own policies: `act` with a memory, `evaluate` from its snapshot, `predict` for play.

Each is called as users call it. What `step` and `unroll` returned inside is recorded; nothing is composed here.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from holdfast.doctor.columns import spread
from holdfast.doctor.inference import space_of
from holdfast.doctor.subjects.base import NotOffered, PredictLeg, RecordedSegment, Replay, Subject, SubjectStep
from holdfast.memory import Memory
from holdfast.policies.action_parts import part_spaces
from holdfast.policies.base import PolicyOutput
from holdfast.state import map_tensors

CARRYING = ("never", "detach")


def carries(module: Any) -> bool:
    """Whether a core in here keeps its memory across episodes on purpose (reset="never" or "detach")."""
    return isinstance(module, nn.Module) and any(getattr(m, "reset", None) in CARRYING for m in module.modules())


class Holdfast(Subject):
    """An `hf.RecurrentPolicy`. `observation_space` defaults to the policy's own.

    `action_masks`: True uses random masks for the policy's action space in both legs; a function
    `(count, generator) -> masks` makes its own.
    """

    framework = "holdfast"
    takes_env_ids = True
    flags_optional = True
    makes_own_state = True

    def __init__(
        self,
        policy: Any,
        observation_space: Any = None,
        *,
        action_masks: bool | Callable[[int, torch.Generator], Tensor] = False,
        num_envs: int = 5,
        name: str | None = None,
    ) -> None:
        space = space_of(policy, observation_space, lambda obs: policy.step(obs, policy.initial_state(len(obs))))
        super().__init__(space, name=name or type(policy).__name__)
        self.policy = policy
        self.num_envs = num_envs
        self.carries_across_episodes = carries(policy)
        self._draw_masks = action_masks
        self._memory: Any = None
        self._rows = 0
        self._has_value = True

    def begin(self, num_envs: int) -> None:
        self._memory, self._rows = Memory(self.policy.core), num_envs

    def step(self, obs: Any, terminated: Any, truncated: Any, env_ids: Tensor) -> SubjectStep:
        resets = None if terminated is None else terminated | truncated
        with self._outputs_of("step") as outputs:
            step = self.policy.act(obs, resets, env_ids, memory=self._memory, action_mask=self.action_mask)
        self._has_value = step.value is not None
        return SubjectStep(spread(outputs[0].dist, step.value), step.action, step.log_prob)

    def mark(self) -> Any:
        return self._memory.read(range(self._rows))

    def state(self) -> Any:
        return self.mark()

    def replay(self, segment: RecordedSegment) -> Replay:
        with self._outputs_of("unroll") as outputs:
            result = self.training_call(segment)
        output = spread(outputs[0].dist, None if result.value is None else result.value.flatten())
        return Replay(output.reshape(*result.log_prob.shape, -1), result.log_prob, result.state)

    def training_call(self, segment: RecordedSegment) -> Any:
        resets = segment.terminated | segment.truncated
        masks, start = segment.action_mask, segment.start
        return self.policy.evaluate(segment.obs, segment.actions, start, resets, action_mask=masks, return_state=True)

    def action_masks(self, count: int, generator: torch.Generator) -> Tensor | None:
        if callable(self._draw_masks):
            return self._draw_masks(count, generator)
        return _random_masks(self.policy.action_space, count, generator) if self._draw_masks else None

    def poison(self, row: int) -> None:
        state = self._memory.read([row])
        nan = map_tensors(lambda x: torch.full_like(x, float("nan")) if x.is_floating_point() else x, state)
        self._memory.write(nan, [row])

    def peek_value(self, obs: Any, env_ids: Tensor) -> Tensor:
        if not self._has_value:
            raise NotOffered("the policy gives no values of states")
        value: Tensor = self.policy.peek_value(obs, env_ids, memory=self._memory)
        return value

    def evaluation(self) -> Subject:
        if self._draw_masks:
            raise NotOffered("predict takes no action masks")
        policy = self.policy.deployed()  # what predict runs
        watching = functools.partial(self._outputs_of, "step", policy)
        return PredictLeg(self.name, policy.predict, watching, lambda output: spread(output.dist, None))

    def second_agent(self) -> Subject:
        return copy.copy(self)

    def reset_memory(self) -> None:
        self._memory.reset()

    def save(self) -> Any:
        return self._memory.state_dict()

    def load(self, checkpoint: Any) -> None:
        self._memory.load_state_dict(checkpoint)

    @contextlib.contextmanager
    def _outputs_of(self, method: Literal["step", "unroll"], policy: Any = None) -> Iterator[list[PolicyOutput]]:
        """Collects what the policy's `step` or `unroll` returns. The calls around them keep the distribution to themselves."""
        outputs: list[PolicyOutput] = []
        policy = self.policy if policy is None else policy
        original = getattr(policy, method)

        def keep(*args: Any, **kwargs: Any) -> PolicyOutput:
            outputs.append(original(*args, **kwargs))
            return outputs[-1]

        setattr(policy, method, keep)
        try:
            yield outputs
        finally:
            delattr(policy, method)


def _random_masks(space: Any, count: int, generator: torch.Generator) -> Tensor:
    """`[count, choices]` with about half of the choices allowed, and at least one for each head; of a Dict or Tuple, of all parts."""
    takers = [part for part in part_spaces(space) if not hasattr(part, "low")]
    sizes = [int(n) for part in takers for n in ([part.n] if hasattr(part, "n") else part.nvec)]  # type: ignore[attr-defined]
    parts = []
    for size in sizes:
        mask = torch.rand(count, size, generator=generator) < 0.5
        always = torch.randint(size, (count, 1), generator=generator)
        parts.append(mask.scatter(1, always, True))
    return torch.cat(parts, dim=1)
