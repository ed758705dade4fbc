"""The play loop of Stable-Baselines3: `predict(obs, state, episode_start)`; the caller keeps the state."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from holdfast.doctor.subjects.base import Subject, SubjectStep
from holdfast.doctor.trees import map_tensors


class PredictLeg(Subject):
    """An evaluation leg. `watching()` collects what the policy computes on the way; `output` turns it into columns."""

    def __init__(
        self,
        name: str,
        predict: Callable[..., Any],
        watching: Callable[[], AbstractContextManager[list[Any]]],
        output: Callable[[Any], Tensor],
    ) -> None:
        super().__init__(name=name)
        self.predict, self.watching, self.output = predict, watching, output
        self._state: Any = None

    def begin(self, num_envs: int) -> None:
        self._state = None

    def step(self, obs: Any, terminated: Tensor, truncated: Tensor, env_ids: Tensor) -> SubjectStep:
        first = (terminated | truncated).cpu().numpy() | (self._state is None)
        arrays = map_tensors(lambda x: x.cpu().numpy(), obs)
        with self.watching() as seen:
            _, self._state = self.predict(arrays, self._state, first, deterministic=True)
        return SubjectStep(self.output(seen[0]))
