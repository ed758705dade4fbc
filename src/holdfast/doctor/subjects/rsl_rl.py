"""rsl_rl 5: `PPO` with recurrent models (`RNNModel`) that keep their own state. Needs `pip install 'holdfast[rsl_rl]'`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from holdfast.doctor.subjects.base import RecordedSegment, Replay, Subject, SubjectStep, copy_without
from holdfast.state import map_tensors, tensors_in


class RslRl(Subject):
    """An `rsl_rl.algorithms.PPO`, driven through its own calls.

    Rollout: `act` under `inference_mode`, and the models' `reset(dones)` before the first observation of an episode, as
    `process_env_step` does it. Training: a `RolloutStorage` is filled with what `act` stores, and its
    `recurrent_mini_batch_generator` feeds the models. Bootstrap values are those of `compute_returns`. What is observed
    is read from `alg.storage`: one vector for each group of observations.
    """

    framework = "rsl_rl"

    def __init__(self, alg: Any, *, num_envs: int = 5, name: str | None = None) -> None:
        groups = {key: tuple(value.shape[2:]) for key, value in alg.storage.observations.items()}
        super().__init__(_Groups(groups), name=name or type(alg.actor).__name__)
        self.alg, self.num_envs = alg, num_envs
        self.actor, self.critic = alg.actor, alg.critic

    def begin(self, num_envs: int) -> None:
        self.reset_memory()

    def step(self, obs: Any, terminated: Tensor, truncated: Tensor, env_ids: Tensor) -> SubjectStep:
        alg, dones = self.alg, (terminated | truncated).long()  # rsl_rl's wrappers pass whole numbers
        with torch.inference_mode():
            self._reset(dones)
            action = alg.act(_tensordict(obs, len(env_ids)))
            values = (*alg.transition.distribution_params, alg.transition.values)
            output = torch.cat([x.reshape(len(env_ids), -1) for x in values], dim=-1)
            log_prob = alg.transition.actions_log_prob.reshape(-1)
            alg.transition.clear()
        return SubjectStep(output.clone(), action.clone(), log_prob.clone())

    def mark(self) -> Any:
        return self._states()

    def state(self) -> Any:
        return self._states()

    def replay(self, segment: RecordedSegment) -> Replay:
        return self._train(segment, 1)

    def minibatches(self, segment: RecordedSegment) -> Replay:
        return self._train(segment, segment.terminated.shape[1])

    def peek_value(self, obs: Any, env_ids: Tensor) -> Tensor:
        """From an empty storage: `compute_returns` of rewards and values of 0 gives gamma times the value."""
        rows = len(tensors_in(self._states())[0].movedim(-2, 0))
        everyone = map_tensors(lambda x: x.new_zeros(rows, *x.shape[1:]).index_copy(0, env_ids, x), obs)
        kept, self.alg.storage = self.alg.storage, self._storage(everyone, rows, 1)
        try:
            with torch.inference_mode():
                self.alg.compute_returns(_tensordict(everyone, rows))
            returns = self.alg.storage.returns.clone()
        finally:
            self.alg.storage = kept
        return (returns[0, :, 0] / self.alg.gamma)[env_ids]

    def reset_memory(self) -> None:
        self.actor.reset()
        self.critic.reset()

    def poison(self, row: int) -> None:
        with torch.inference_mode():
            for tensor in tensors_in([self.actor.get_hidden_state(), self.critic.get_hidden_state()]):
                tensor[..., row, :] = float("nan")

    def isolated(self) -> RslRl:
        copied = copy_without(self, dropped=[self.alg.optimizer, self.alg.transition], shared=[self.alg.storage])
        copied.alg.transition = type(self.alg.transition)()
        return copied

    def _train(self, segment: RecordedSegment, num_mini_batches: int) -> Replay:
        """As `PPO.update` does it, without a loss."""
        steps = len(segment.terminated)
        storage = self._filled(segment)
        outputs, log_probs = [], []
        for batch in storage.recurrent_mini_batch_generator(num_mini_batches, 1):
            hidden_a, hidden_c = batch.hidden_states
            self.actor(batch.observations, masks=batch.masks, hidden_state=hidden_a, stochastic_output=True)
            log_prob = self.actor.get_output_log_prob(batch.actions)
            value = self.critic(batch.observations, masks=batch.masks, hidden_state=hidden_c)
            count = batch.actions.shape[1]
            values = (*self.actor.output_distribution_params, value)
            outputs.append(torch.cat([x.reshape(steps, count, -1) for x in values], dim=-1))
            log_probs.append(log_prob.reshape(steps, count))
        return Replay(torch.cat(outputs, dim=1), torch.cat(log_probs, dim=1))

    def _filled(self, segment: RecordedSegment) -> Any:
        """The segment in a `RolloutStorage`: each step with the done after it and the states before it."""
        from rsl_rl.storage import RolloutStorage
        from tensordict import TensorDict

        steps, rows = segment.terminated.shape
        dones = segment.terminated | segment.truncated
        storage = self._storage(map_tensors(lambda x: x[0], segment.obs), rows, steps, segment.actions.shape[2:])
        live = self.actor.get_hidden_state(), self.critic.get_hidden_state()
        for t in range(steps):
            transition = RolloutStorage.Transition()
            transition.observations = _tensordict(map_tensors(lambda x, t=t: x[t].detach(), segment.obs), rows)
            transition.actions = segment.actions[t]
            transition.dones = dones[t + 1] if t + 1 < steps else torch.zeros_like(dones[t])
            transition.rewards = torch.zeros(rows)
            transition.values = torch.zeros(rows, 1)
            transition.actions_log_prob = torch.zeros(rows)
            transition.distribution_params = (torch.zeros(rows, 1),)
            transition.hidden_states = self._after_reset(segment.marks[t], dones[t])
            storage.add_transition(transition)
        storage.observations = TensorDict(segment.obs, [steps, rows])  # the same numbers, with their graph
        self.actor.reset(hidden_state=live[0])
        self.critic.reset(hidden_state=live[1])
        return storage

    def _after_reset(self, states: Any, dones: Tensor) -> tuple[Any, Any]:
        """The states that a step starts from: `process_env_step` had reset them when the step before was stored."""
        for model, state in zip((self.actor, self.critic), states):
            model.reset(hidden_state=map_tensors(torch.clone, state))
        self._reset(dones.long())
        return self.actor.get_hidden_state(), self.critic.get_hidden_state()

    def _reset(self, dones: Tensor) -> None:
        self.actor.reset(dones)
        self.critic.reset(dones)

    def _states(self) -> list[Any]:
        return [map_tensors(torch.clone, model.get_hidden_state()) for model in (self.actor, self.critic)]

    def _storage(self, obs: Any, rows: int, steps: int, actions_shape: Any = (1,)) -> Any:
        from rsl_rl.storage import RolloutStorage

        return RolloutStorage("rl", rows, steps, _tensordict(obs, rows), tuple(actions_shape), self.alg.device)


class _Groups:
    """Draws observations: one array for each group."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.shapes = shapes

    def __call__(self, count: int, generator: torch.Generator) -> dict[str, Tensor]:
        return {key: torch.randn(count, *shape, generator=generator) for key, shape in self.shapes.items()}

    def __repr__(self) -> str:
        return str(self.shapes)


def _tensordict(obs: Any, rows: int) -> Any:
    from tensordict import TensorDict

    return TensorDict(obs, [rows])
