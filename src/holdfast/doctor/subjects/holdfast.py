"""Holdfast's own policies: `act` with a memory, `evaluate` from its snapshot."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.doctor.columns import spread
from holdfast.doctor.observations import map_tensors, space_of
from holdfast.doctor.subject import NotOffered, Replay, Segment, Step, Subject
from holdfast.doctor.subjects.predict import PredictLeg

CARRYING = ("never", "detach")


def carries(module: Any) -> bool:
    """Whether a core in here is told to keep its memory across episodes (reset="never" or "detach")."""
    return isinstance(module, nn.Module) and any(getattr(m, "reset", None) in CARRYING for m in module.modules())


class Holdfast(Subject):
    """An `hf.RecurrentPolicy`. `observation_space` defaults to the policy's own.

    `action_masks`: True draws random masks for the policy's action space in both legs; a function
    `(count, generator) -> masks` makes others.
    """

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
        super().__init__(space_of(policy, observation_space), name=name or type(policy).__name__)
        self.policy = policy
        self.num_envs = num_envs
        self.carries_across_episodes = carries(policy)
        self._draw_masks = action_masks
        self._memory: Any = None
        self._rows = 0

    def begin(self, num_envs: int) -> None:
        from holdfast.memory import Memory

        self._memory, self._rows = Memory(self.policy.core), num_envs

    def step(self, obs: Any, terminated: Any, truncated: Any, env_ids: Tensor) -> Step:
        resets = None if terminated is None else terminated | truncated
        with self._distribution() as seen:
            step = self.policy.act(obs, resets, env_ids, memory=self._memory, action_mask=self.action_mask)
        return Step(spread(seen[0], step.value), step.action, step.log_prob)

    def mark(self) -> Any:
        return self._memory.read(range(self._rows))

    def state(self) -> Any:
        return self.mark()

    def replay(self, segment: Segment) -> Replay:
        with self._distribution() as seen:
            result = self.training_call(segment)
        output = spread(seen[0], result.value.flatten())
        return Replay(output.reshape(*result.value.shape, -1), result.log_prob, result.state)

    def training_call(self, segment: Segment) -> Any:
        resets = segment.terminated | segment.truncated
        masks, start = segment.action_mask, segment.start
        return self.policy.evaluate(segment.obs, segment.actions, start, resets, action_mask=masks, return_state=True)

    def action_masks(self, count: int, generator: torch.Generator) -> Tensor | None:
        if callable(self._draw_masks):
            return self._draw_masks(count, generator)
        return _random_masks(self.policy.action_space, count, generator) if self._draw_masks else None

    def poison(self, row: int) -> None:
        state = map_tensors(lambda x: torch.full_like(x, float("nan")), self._memory.read([row]))
        self._memory.write(state, [row])

    def peek_value(self, obs: Any, env_ids: Tensor) -> Tensor:
        value: Tensor = self.policy.peek_value(obs, env_ids, memory=self._memory)
        return value

    def evaluation(self) -> Subject:
        if self._draw_masks:
            raise NotOffered("predict takes no action masks")
        return PredictLeg(self.name, self.policy.predict, self._distribution, lambda seen: spread(seen, None))

    def second_agent(self) -> Subject:
        return copy.copy(self)

    def reset_memory(self) -> None:
        self._memory.reset()

    def save(self) -> Any:
        return self._memory.state_dict()

    def load(self, checkpoint: Any) -> None:
        self._memory.load_state_dict(checkpoint)

    @contextlib.contextmanager
    def _distribution(self) -> Iterator[list[Any]]:
        """Collects the action distribution, which neither leg returns."""
        seen: list[Any] = []
        decode = self.policy.decode

        def keep(*args: Any, **kwargs: Any) -> Any:
            distribution, value = decode(*args, **kwargs)
            seen.append(distribution)
            return distribution, value

        self.policy.decode = keep
        try:
            yield seen
        finally:
            del self.policy.decode


def _random_masks(space: Any, count: int, generator: torch.Generator) -> Tensor:
    """`[count, choices]` with about half of the choices allowed, and at least one for each head."""
    sizes = [int(space.n)] if hasattr(space, "n") else [int(n) for n in space.nvec]
    parts = []
    for size in sizes:
        mask = torch.rand(count, size, generator=generator) < 0.5
        always = torch.randint(size, (count, 1), generator=generator)
        parts.append(mask.scatter(1, always, True))
    return torch.cat(parts, dim=1)
