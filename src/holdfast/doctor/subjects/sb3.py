"""sb3-contrib's `RecurrentPPO`: its policy in the rollout leg, its own rollout buffer in the training leg."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from holdfast.doctor.subjects.base import CarriesState, PredictLeg, RecordedSegment, Replay, Subject, SubjectStep
from holdfast.doctor.subjects.holdfast import carries
from holdfast.state import map_tensors


class SB3(CarriesState):
    """A `RecurrentPPO` model. Only its policy and buffer class are used, never its environment."""

    framework = "sb3"
    batch_dim = 1

    def __init__(self, model: Any, *, num_envs: int = 5, name: str | None = None) -> None:
        if not hasattr(model, "policy") or not hasattr(model.policy, "lstm_actor"):
            raise TypeError(
                f"subjects.SB3 expects a sb3_contrib.RecurrentPPO model, got {type(model).__name__}"
                + (" (its policy has no LSTM)" if hasattr(model, "policy") else "")
            )
        super().__init__(model.observation_space, name=name or type(model).__name__)
        self.policy: Any = model.policy
        self.buffer_class = type(model.rollout_buffer)
        # Holdfast's buffer lays episodes side by side if resets isolate them; sb3-contrib's has no such argument.
        self.isolated_resets = getattr(model.rollout_buffer, "isolated", None)
        self._template = model._last_lstm_states
        self.carries_across_episodes = carries(model.policy)
        self.observation_space, self.action_space = model.observation_space, model.action_space
        self.num_envs = num_envs
        self._episode_starts: Tensor | None = None

    def begin(self, num_envs: int) -> None:
        # [layers, environments, size]
        self._state = map_tensors(lambda x: x.new_zeros(x.shape[0], num_envs, x.shape[2]), self._template)
        # SB3's `_last_episode_starts` is all True at the start of a run.
        self._episode_starts = torch.ones(num_envs, device=self.policy.device)

    def step(self, obs: Any, terminated: Tensor, truncated: Tensor, env_ids: Tensor) -> SubjectStep:
        starts = (terminated | truncated).float()
        if self._episode_starts is not None:
            starts, self._episode_starts = self._episode_starts, None
        self.policy.set_training_mode(False)
        with torch.no_grad(), self._action_parameters() as captured:
            actions, values, log_prob, self._state = self.policy(obs, self._state, starts)
        return SubjectStep(torch.cat([captured[0], values.reshape(-1, 1)], dim=1), actions, log_prob)

    def replay(self, segment: RecordedSegment) -> Replay:
        return self._through_the_buffer(segment, whole=True)

    def minibatches(self, segment: RecordedSegment) -> Replay:
        return self._through_the_buffer(segment, whole=False)

    def _through_the_buffer(self, segment: RecordedSegment, whole: bool) -> Replay:
        steps, rows = segment.terminated.shape
        self.policy.set_training_mode(True)
        flat = map_tensors(lambda x: x.flatten(0, 1), segment.obs)
        outputs: list[Tensor] = []
        scores: list[Tensor] = []
        places: list[Tensor] = []
        for sample in self._samples(segment, whole):
            real = sample.mask > 1e-8
            index = sample.returns.long()  # `_samples` stored each step's place there
            obs = map_tensors(lambda x, index=index: x[index], flat)
            actions = sample.actions
            if not hasattr(self.action_space, "low") and not hasattr(self.action_space, "nvec"):
                actions = actions.long().flatten()
            with self._action_parameters() as captured:
                values, log_prob, _ = self.policy.evaluate_actions(
                    obs, actions, sample.lstm_states, sample.episode_starts
                )
            outputs.append(torch.cat([captured[0], values.reshape(-1, 1)], dim=1)[real])
            scores.append(log_prob[real])
            places.append(index[real])
        order = torch.argsort(torch.cat(places))
        output, log_prob = torch.cat(outputs)[order], torch.cat(scores)[order]
        return Replay(output.reshape(steps, rows, -1), log_prob.reshape(steps, rows))

    def peek_value(self, obs: Any, env_ids: Tensor) -> Tensor:
        state = tuple(x[:, env_ids].contiguous() for x in self._state.vf)
        zeros = torch.zeros(len(env_ids), device=self.policy.device)
        self.policy.set_training_mode(False)
        with torch.no_grad():
            value: Tensor = self.policy.predict_values(obs, state, zeros)
        return value.reshape(len(env_ids))

    def evaluation(self) -> Subject:
        return PredictLeg(self.name, self.policy.predict, self._action_parameters, lambda seen: seen)

    def _samples(self, segment: RecordedSegment, whole: bool) -> Iterator[Any]:
        """The segment through SB3's buffer: in minibatches that start anywhere, or whole and in order."""
        steps, rows = segment.terminated.shape
        layers, _, size = self._template.pi[0].shape
        shape = (steps, layers, rows, size)
        isolated = {} if self.isolated_resets is None else {"isolated": self.isolated_resets}
        spaces = (self.observation_space, self.action_space)
        buffer = self.buffer_class(steps, *spaces, shape, device=self.policy.device, n_envs=rows, **isolated)
        for t in range(steps):
            buffer.add(
                map_tensors(lambda x, t=t: x[t].detach().cpu().numpy(), segment.obs),
                segment.actions[t].reshape(rows, -1).cpu().numpy(),
                np.zeros(rows, dtype=np.float32),
                segment.resets[t].float().cpu().numpy(),
                torch.zeros(rows),
                torch.zeros(rows),
                lstm_states=map_tensors(torch.detach, segment.marks[t]),
            )
        buffer.returns = np.arange(steps * rows, dtype=np.float32).reshape(steps, rows)
        if whole:
            np.random.seed(_seed_of_split_zero(steps * rows))
        yield from buffer.get(None if whole else 2 * steps + 1)

    @contextlib.contextmanager
    def _action_parameters(self) -> Iterator[list[Tensor]]:
        """Collects the output of the action head (logits or means), which the policy does not return."""
        captured: list[Tensor] = []

        def keep(module: nn.Module, args: Any, result: Tensor) -> None:
            captured.append(result.reshape(result.shape[0], -1))

        handle = self.policy.action_net.register_forward_hook(keep)
        try:
            yield captured
        finally:
            handle.remove()


@functools.lru_cache
def _seed_of_split_zero(count: int) -> int:
    """A numpy seed with which the buffer's random split is at 0, so that no sequence is cut."""
    return next(seed for seed in range(100_000) if np.random.RandomState(seed).randint(count) == 0)
