"""One step of actor and critic in a rollout: sample an action, its log-probability, the value; the states move on.

Step by step everywhere; on a GPU as two CUDA graphs, one before and one after the environment's step, which save the launches of
about a hundred small operations. They also write what rsl_rl's storage keeps, where it keeps it. A third one is what follows a
rollout.
"""

from __future__ import annotations

from collections.abc import Callable
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
    stores: bool
    """Whether steps go into the storage by `store`; otherwise the algorithm puts them there."""

    def begin(self, storage: Any) -> None:
        """Before the first step of a rollout: weights or tensors of the storage may have been replaced since the last one."""

    def act(self, obs: Any) -> ActingStep:
        """One step of all environments."""

    def store(self, rewards: Tensor, dones: Tensor, time_outs: Tensor | None, value: Tensor) -> None:
        """Put the step into the storage; the next one begins an episode where it is done. value [B]: that a timeout has lost."""

    def conclude(self, obs: Any, function: Callable[[Any], None]) -> None:
        """`function(obs)`, always the same one, after the last step of a rollout."""


def addresses(module: nn.Module) -> list[int]:
    """Where a module's tensors are; a captured graph reads these addresses."""
    return [t.data_ptr() for t in (*module.parameters(), *module.buffers())]


def make_acting(models: ActorAndCritic, device: Any, gamma: float) -> Acting:
    """The fastest form for these models."""
    if torch.device(device).type == "cuda" and isinstance(models.actor.distribution, GaussianDistribution):
        return GraphActing(models, gamma)
    return EagerActing(models)


class EagerActing:
    """One operation after another."""

    stores = False

    def __init__(self, models: ActorAndCritic) -> None:
        self.models = models

    def begin(self, storage: Any) -> None:
        pass

    @torch.no_grad()
    def act(self, obs: Any) -> ActingStep:
        actor, critic = self.models.actor, self.models.critic
        for_actor, for_critic = actor.get_latent(obs), critic.get_latent(obs)
        value, join = self.in_parallel(lambda: critic.mlp(for_critic))
        distribution = actor.distribution
        distribution.update(actor.mlp(for_actor))
        action = _sample(distribution)
        log_prob = distribution.log_prob(action)
        join()
        return ActingStep(action, log_prob, value, tuple(distribution.params))

    def in_parallel(self, function: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """What a function returns, and what to call before that is read."""
        return function(), lambda: None

    def store(self, rewards: Tensor, dones: Tensor, time_outs: Tensor | None, value: Tensor) -> None:
        raise NotImplementedError("the algorithm stores these steps")

    def conclude(self, obs: Any, function: Callable[[Any], None]) -> None:
        function(obs)


class ParallelActing(EagerActing):
    """The critic's MLP runs on a stream of its own, next to the actor's: neither fills a GPU. Not the recurrences, which do."""

    _stream: Any = None

    def in_parallel(self, function: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        self._stream = self._stream or torch.cuda.Stream()
        here = torch.cuda.current_stream()
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            result = function()
        return result, lambda: here.wait_stream(self._stream)


def _sample(distribution: Any) -> Tensor:
    """For a Gaussian without `torch.normal`, which reads the smallest deviation back from the device."""
    if isinstance(distribution, GaussianDistribution):
        mean, std = distribution.params
        return mean + std * torch.randn_like(mean)
    return distribution.sample()


class GraphActing:
    """The step of `EagerActing`, and what follows the environment's, as CUDA graphs over fixed tensors.

    Captured at the first step, and again when the number of environments, the shape of observations or the address of a
    weight or of a tensor of the storage is another one.
    """

    stores = True

    def __init__(self, models: ActorAndCritic, gamma: float) -> None:
        self.models, self.gamma, self._eager = models, gamma, EagerActing(models)
        self._captured: EagerActing = ParallelActing(models)
        self._recurrences = [model.rnn for model in (models.actor, models.critic) if model.is_recurrent]
        self._shapes: Any = None  # of the observations of the captured step; None: capture before the next one
        self._addresses: list[int] = []
        self._storage: Any = None
        self._replay_conclusion: Callable[[], None] | None = None

    def begin(self, storage: Any) -> None:
        self._storage = storage
        if self._addresses != self._read_addresses():
            self._shapes = None

    def act(self, obs: Any) -> ActingStep:
        # Somebody acts between a rollout and its update.
        if self._storage.step >= self._storage.num_transitions_per_env:
            return self._eager.act(obs)
        parts = {group: obs[group] for group in self._storage.observations.keys()}  # noqa: SIM118 it iterates over rows
        shapes = {group: part.shape for group, part in parts.items()}
        for recurrence in self._recurrences:
            recurrence.start(len(obs))
        if shapes != self._shapes or not all(recurrence.fixed_tensors for recurrence in self._recurrences):
            self._capture(parts)
            self._shapes, self._addresses = shapes, self._read_addresses()
        for group, part in parts.items():
            self._obs[group].copy_(part)
        for recurrence, flags in zip(self._recurrences, self._flags):
            if recurrence.pending is None:
                flags.zero_()
            elif recurrence.pending is not flags:
                flags.copy_(recurrence.pending)
            recurrence.pending = None
        self._row.fill_(self._storage.step)
        self._replay_step()
        action, log_prob, value, params = self._result
        return ActingStep(action.clone(), log_prob, value, params)  # an environment may keep what it was given

    def store(self, rewards: Tensor, dones: Tensor, time_outs: Tensor | None, value: Tensor) -> None:
        if self._storage.step >= self._storage.num_transitions_per_env:
            raise OverflowError("the storage is full; call update() or storage.clear() before the next step")
        self._rewards.copy_(rewards.reshape(-1))
        self._dones.copy_(dones.reshape(-1))
        self._time_outs.zero_() if time_outs is None else self._time_outs.copy_(time_outs.reshape(-1))
        if value.data_ptr() != self._result.value.data_ptr():
            self._result.value.copy_(value.view_as(self._result.value))  # it is in the storage already
        self._replay_store()
        for recurrence, flags in zip(self._recurrences, self._flags):
            recurrence.pending = flags
        self._storage.step += 1

    def conclude(self, obs: Any, function: Callable[[Any], None]) -> None:
        if self._shapes is None or any(r.pending is not flags for r, flags in zip(self._recurrences, self._flags)):
            function(obs)
            return
        for group, fixed in self._obs.items():
            fixed.copy_(obs[group])
        if self._replay_conclusion is None:
            with torch.inference_mode(False), torch.no_grad():
                self._replay_conclusion, _ = self._recorded(lambda: function(self._obs))
        self._replay_conclusion()

    # --- what is captured --------------------------------------------------------------------------------------------

    def _capture(self, parts: dict[str, Tensor]) -> None:
        recurrences, storage = self._recurrences, self._storage
        self._shapes = None  # if this fails, the graphs before it are of no use: their tensors are replaced
        with torch.inference_mode(False), torch.no_grad():
            self._obs = {group: part.clone() for group, part in parts.items()}
            batch, device = storage.num_envs, storage.rewards.device
            self._row = torch.full((1,), storage.step, device=device)
            self._flags = [torch.zeros(batch, dtype=torch.bool, device=device) for _ in recurrences]
            self._rewards = torch.zeros(batch, device=device)
            self._dones, self._time_outs = (torch.zeros(batch, dtype=torch.uint8, device=device) for _ in range(2))
            kept = [(state_ops.clone(r.state), r.pending) for r in recurrences]
            for recurrence, (state, _) in zip(recurrences, kept):
                recurrence.state, recurrence.fixed_tensors = state_ops.clone(state), True
            self._result: ActingStep
            self._replay_step, self._result = self._recorded(self._step)
            self._replay_store, _ = self._recorded(self._store)
            self._replay_conclusion = None
            for recurrence, (state, pending) in zip(recurrences, kept):
                state_ops.tree_map(lambda fixed, true: fixed.copy_(true), recurrence.state, state)
                recurrence.pending = pending

    def _recorded(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """A function that repeats `function` on the device, and the tensors that it leaves its results in."""
        with side_stream():
            for _ in range(2):
                function()
        graph = torch.cuda.CUDAGraph()
        with capturing(graph):
            result = function()
        return graph.replay, result

    def _step(self) -> ActingStep:
        for recurrence, flags in zip(self._recurrences, self._flags):
            recurrence.pending = flags
        step, storage = self._captured.act(self._obs), self._storage
        if storage.distribution_params is None or any(part.is_inference() for part in storage.distribution_params):
            steps = storage.num_transitions_per_env
            storage.distribution_params = tuple(part.new_zeros(steps, *part.shape) for part in step.params)
        self._put(storage.actions, step.action)
        self._put(storage.values, step.value)
        self._put(storage.actions_log_prob, step.log_prob)
        for stored, part in zip(storage.distribution_params, step.params):
            self._put(stored, part)
        for group, part in self._obs.items():
            self._put(storage.observations[group], part)
        return step

    def _store(self) -> None:
        lost = self.gamma * self._result.value.reshape(-1) * self._time_outs
        self._put(self._storage.rewards, self._rewards + lost)
        self._put(self._storage.dones, self._dones)
        for flags in self._flags:
            flags.copy_(self._dones == 1)

    def _put(self, stored: Tensor, part: Tensor) -> None:
        """part [B, ...] becomes this step's row of stored [T, B, ...]."""
        stored.index_copy_(0, self._row, part.reshape(1, *stored.shape[1:]).to(stored.dtype))

    def _read_addresses(self) -> list[int]:
        st = self._storage
        stored = [*(st.observations[group] for group in st.observations.keys())]  # noqa: SIM118 it iterates over rows
        stored += [st.actions, st.values, st.actions_log_prob, st.rewards, st.dones, st.returns, st.advantages]
        stored += st.distribution_params or ()
        return [*addresses(self.models), *(part.data_ptr() for part in stored)]
