"""`get_action_and_value(x, lstm_state, done, action=None)`: the form of CleanRL's recurrent PPO."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.doctor.columns import columns
from holdfast.doctor.observations import device_of
from holdfast.doctor.subjects.base import CarriesState, NotOffered, RecordedSegment, Replay, SubjectStep
from holdfast.state import map_tensors


class CleanRL(CarriesState):
    """An agent that takes flat observations `[T*B, ...]`, a tuple of `[L, B, H]` states and float `done` flags.

    `layers` and `hidden_size` default to those of `agent.lstm`; `initial_state(num_envs)` replaces the zeros. The
    rollout leg runs under `no_grad`; the state before the first step of a segment is cloned and the training leg starts
    from it, as in CleanRL's own script. `done(terminated, truncated)` is the flag that the script passes to the agent;
    by default either one.
    """

    framework = "cleanrl"
    batch_dim = 1

    def __init__(
        self,
        agent: nn.Module,
        observation_space: Any,
        num_envs: int = 5,
        *,
        layers: int | None = None,
        hidden_size: int | None = None,
        initial_state: Callable[[int], Any] | None = None,
        done: Callable[[Tensor, Tensor], Tensor] = torch.logical_or,
        name: str | None = None,
    ) -> None:
        super().__init__(observation_space, name=name or type(agent).__name__)
        self.agent: Any = agent
        self.num_envs = num_envs
        self.done = done
        self.initial_state = initial_state or _zeros_like_the_lstm(agent, layers, hidden_size)

    def begin(self, num_envs: int) -> None:
        self._state = self.initial_state(num_envs)

    def step(self, obs: Any, terminated: Tensor, truncated: Tensor, env_ids: Tensor) -> SubjectStep:
        done = self.done(terminated, truncated).float()
        with torch.no_grad():
            action, log_prob, entropy, value, self._state = self.agent.get_action_and_value(obs, self._state, done)
        rows = len(env_ids)
        return SubjectStep(columns((entropy.reshape(rows, -1), value.reshape(rows, -1)), rows), action, log_prob)

    def replay(self, segment: RecordedSegment) -> Replay:
        steps, rows = segment.terminated.shape
        flat = map_tensors(lambda x: x.flatten(0, 1), segment.obs)
        done = self.done(segment.terminated, segment.truncated).float().flatten()
        _, log_prob, entropy, value, _ = self.agent.get_action_and_value(
            flat, segment.start, done, map_tensors(lambda x: x.flatten(0, 1), segment.actions)
        )
        count = steps * rows
        output = columns((entropy.reshape(count, -1), value.reshape(count, -1)), count)
        return Replay(output.reshape(steps, rows, -1), log_prob.reshape(steps, rows))

    def peek_value(self, obs: Any, env_ids: Tensor) -> Tensor:
        if not hasattr(self.agent, "get_value"):
            raise NotOffered("the agent has no get_value")
        state = map_tensors(lambda x: x[:, env_ids], self._state)
        done = torch.zeros(len(env_ids), device=device_of([self.agent]))
        with torch.no_grad():
            value: Tensor = self.agent.get_value(obs, state, done)
        return value.reshape(len(env_ids))


class _ZeroState:
    """Zeros in the shape of the agent's recurrent layer, with its dtype and device."""

    def __init__(self, layer: nn.Module, layers: int, hidden_size: int, tensors: int) -> None:
        self.layer, self.layers, self.hidden_size, self.tensors = layer, layers, hidden_size, tensors

    def __call__(self, num_envs: int) -> Any:
        weight = next(self.layer.parameters())
        return tuple(weight.new_zeros(self.layers, num_envs, self.hidden_size) for _ in range(self.tensors))


def _zeros_like_the_lstm(agent: nn.Module, layers: int | None, hidden_size: int | None) -> Callable[[int], Any]:
    layer: Any = getattr(agent, "lstm", None)
    if layer is None and (layers is None or hidden_size is None):
        raise TypeError(
            f"{type(agent).__name__} has no `lstm` attribute to read sizes from: pass layers= and hidden_size=, "
            "or initial_state=, a function of the number of environments"
        )
    return _ZeroState(agent, layers or layer.num_layers, hidden_size or layer.hidden_size, 2)
