"""One step of actor and critic in a rollout: sample an action, its log-probability, the value; the states move on.

Step by step everywhere; on a GPU as a CUDA graph, which saves the launches of about a hundred small operations per step.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from rsl_rl.modules import GaussianDistribution
from torch import Tensor, nn

from holdfast import state as state_ops
from holdfast.engines.cuda_graph import capturing, side_stream
from holdfast.integrations.rsl_rl.minibatches import ActorAndCritic


class ActingStep(NamedTuple):
    """What a rollout stores of a step."""

    action: Tensor  # [B, A]
    log_prob: Tensor  # [B]
    value: Tensor  # [B, 1]
    params: tuple[Tensor, ...]  # of the action distribution, [B, A] each


class Acting(Protocol):
    def begin(self) -> None:
        """Before the first step of a rollout: weights may have been replaced since the last one."""

    def act(self, obs: Any) -> ActingStep:
        """One step of all environments."""


def addresses(module: nn.Module) -> list[int]:
    """Where a module's tensors are; a captured graph reads these addresses."""
    return [t.data_ptr() for t in (*module.parameters(), *module.buffers())]


def make_acting(models: ActorAndCritic, device: Any) -> Acting:
    """The fastest form for these models."""
    if torch.device(device).type == "cuda" and isinstance(models.actor.distribution, GaussianDistribution):
        return GraphActing(models)
    return EagerActing(models)


class EagerActing:
    """One operation after another."""

    def __init__(self, models: ActorAndCritic) -> None:
        self.models = models

    def begin(self) -> None:
        pass

    @torch.no_grad()
    def act(self, obs: Any) -> ActingStep:
        actor, critic = self.models.actor, self.models.critic
        distribution = actor.distribution
        distribution.update(actor.mlp(actor.get_latent(obs)))
        action = _sample(distribution)
        log_prob = distribution.log_prob(action)
        value = critic.mlp(critic.get_latent(obs))
        return ActingStep(action, log_prob, value, tuple(distribution.params))


def _sample(distribution: Any) -> Tensor:
    """For a Gaussian without `torch.normal`, which reads the smallest deviation back from the device."""
    if isinstance(distribution, GaussianDistribution):
        mean, std = distribution.params
        return mean + std * torch.randn_like(mean)
    return distribution.sample()


class GraphActing:
    """The step of `EagerActing` as a CUDA graph over fixed tensors for observations, states and pending resets.

    Captured at the first step, and again when the number of environments, the shape of observations or the address of a
    weight is another one.
    """

    def __init__(self, models: ActorAndCritic) -> None:
        self.models, self._eager = models, EagerActing(models)
        self._groups = list(dict.fromkeys([*models.actor.obs_groups, *models.critic.obs_groups]))
        self._recurrences = [model.rnn for model in (models.actor, models.critic) if model.is_recurrent]
        self._shapes: Any = None  # of the observations of the captured step; None: capture before the next one
        self._addresses: list[int] = []

    def begin(self) -> None:
        if self._addresses != addresses(self.models):
            self._shapes = None

    def act(self, obs: Any) -> ActingStep:
        parts = {group: obs[group] for group in self._groups}
        shapes = {group: part.shape for group, part in parts.items()}
        for recurrence in self._recurrences:
            recurrence.start(len(obs))
        if shapes != self._shapes or not all(recurrence.fixed_tensors for recurrence in self._recurrences):
            self._capture(parts)
            self._shapes, self._addresses = shapes, addresses(self.models)
        for group, part in parts.items():
            self._obs[group].copy_(part)
        for recurrence, flags in zip(self._recurrences, self._flags):
            if recurrence.pending is None:
                flags.zero_()
            else:
                flags.copy_(recurrence.pending)
            recurrence.pending = None
        self._graph.replay()
        action, log_prob, value, params = self._result
        return ActingStep(action.clone(), log_prob, value, params)  # an environment may keep what it was given

    def _capture(self, parts: dict[str, Tensor]) -> None:
        recurrences = self._recurrences
        with torch.inference_mode(False), torch.no_grad():
            self._obs = {group: part.clone() for group, part in parts.items()}
            batch = len(self._obs[self._groups[0]])
            device = self._obs[self._groups[0]].device
            self._flags = [torch.zeros(batch, dtype=torch.bool, device=device) for _ in recurrences]
            kept = [(state_ops.clone(r.state), r.pending) for r in recurrences]
            for recurrence, (state, _) in zip(recurrences, kept):
                recurrence.state, recurrence.fixed_tensors = state_ops.clone(state), True
            with side_stream():
                for _ in range(2):
                    self._step()
            self._graph = torch.cuda.CUDAGraph()
            with capturing(self._graph):
                self._result = self._step()
            for recurrence, (state, pending) in zip(recurrences, kept):
                state_ops.tree_map(lambda fixed, true: fixed.copy_(true), recurrence.state, state)
                recurrence.pending = pending

    def _step(self) -> ActingStep:
        for recurrence, flags in zip(self._recurrences, self._flags):
            recurrence.pending = flags
        return self._eager.act(self._obs)
