"""`forward_eval(obs, state)` and `forward(obs, state)` with a `state` dict: PufferLib's form."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from holdfast.doctor.columns import columns
from holdfast.doctor.inference import space_of
from holdfast.doctor.subjects.base import CarriesState, RecordedSegment, Replay, SubjectStep
from holdfast.state import map_tensors


class Puffer(CarriesState):
    """A policy whose state dict holds `lstm_h` and `lstm_c` (`[B, H]`) and `done`.

    Rollout: `forward_eval(obs [B, ...], state) -> (logits, value)` under `no_grad`, which updates the state dict in
    place. Training: `forward(obs [B, T, ...], state) -> (logits, value)`, with `done` `[B, T]`. `start`: what the
    trainer passes to training as the first state: `"stored"`, or `"nothing"` as PufferLib's own trainer does.
    `fresh_rollouts`: the trainer zeroes the states when a rollout starts, as PufferLib's does since 3.0.
    """

    framework = "puffer"

    def __init__(
        self,
        policy: nn.Module,
        observation_space: Any = None,
        *,
        hidden_size: int | None = None,
        start: Literal["stored", "nothing"] = "stored",
        fresh_rollouts: bool = False,
        num_envs: int = 5,
        name: str | None = None,
    ) -> None:
        super().__init__(space_of(policy, observation_space), name=name or type(policy).__name__)
        self.policy: Any = policy
        size = hidden_size or getattr(policy, "hidden_size", None)
        if size is None:
            raise TypeError(f"{type(policy).__name__} has no `hidden_size`: pass hidden_size=")
        self.hidden_size = int(size)
        self.start, self.num_envs, self.fresh_rollouts = start, num_envs, fresh_rollouts

    def begin(self, num_envs: int) -> None:
        parameter = next(iter(self.policy.parameters()))
        self._state = {key: parameter.new_zeros(num_envs, self.hidden_size) for key in ("lstm_h", "lstm_c")}

    def begin_rollout(self) -> None:
        if self.fresh_rollouts:
            self.begin(len(self._state["lstm_h"]))

    def step(self, obs: Any, terminated: Tensor, truncated: Tensor, env_ids: Tensor) -> SubjectStep:
        self._state["done"] = terminated | truncated
        with torch.no_grad():
            result = self.policy.forward_eval(obs, self._state)
        return SubjectStep(columns(result, len(env_ids)))

    def replay(self, segment: RecordedSegment) -> Replay:
        steps, rows = segment.terminated.shape
        stored = segment.start if self.start == "stored" else {"lstm_h": None, "lstm_c": None}
        state = {**stored, "done": (segment.terminated | segment.truncated).T}
        result = self.policy(map_tensors(lambda x: x.transpose(0, 1), segment.obs), state)
        output = columns(result, rows * steps)
        return Replay(output.reshape(rows, steps, -1).transpose(0, 1))
