"""How the conformance suite drives a recurrent policy of any interface.

A `Driver` holds one module and one memory. Flags come as two tensors, because forgetting one of them is a bug that the
suite looks for: `dones` / `truncateds` is True where the observation is the first of an episode, because the previous
one ended that way. To put another kind of policy through the suite, write a `Driver` for it and add it to
`policies.DRIVERS`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import holdfast as hf
from holdfast import state as state_ops


@dataclass
class Acted:
    """One rollout step. `signature` [B, k]: numbers that depend on observation and memory alone, nothing random."""

    action: Tensor
    log_prob: Tensor
    value: Tensor
    signature: Tensor


@dataclass
class Evaluated:
    """The training leg on a segment, each [T, B]."""

    log_prob: Tensor
    entropy: Tensor
    value: Tensor

    @property
    def signature(self) -> Tensor:
        return torch.stack([self.log_prob, self.entropy, self.value], -1)  # [T, B, 3]


class Driver(ABC):
    """A policy under test. `reset` is the reset mode of its core."""

    module: nn.Module
    memory: hf.Memory
    reset: str = "zero"
    obs_shape: tuple[int, ...] = (3,)

    @abstractmethod
    def act(
        self, obs: Tensor, dones: Tensor | None = None, truncateds: Tensor | None = None, env_ids: Any = None
    ) -> Acted:
        """One step of B environments: memory is read and written."""

    @abstractmethod
    def evaluate(
        self,
        obs: Tensor,
        actions: Tensor,
        state: Any,
        dones: Tensor | None = None,
        truncateds: Tensor | None = None,
    ) -> Evaluated:
        """A segment [T, B, ...] from its start state, with gradients."""

    @abstractmethod
    def agent(self) -> Driver:
        """The same module with a memory of its own: another agent."""

    @abstractmethod
    def reset_memory(self) -> None: ...

    @abstractmethod
    def reset_env_memory(self, env_id: int) -> None: ...

    @abstractmethod
    def get_memory(self) -> Any: ...

    @abstractmethod
    def set_memory(self, saved: Any) -> None: ...

    def start_state(self, batch: int, env_ids: Any = None) -> Any:
        """The state to store before a rollout of these environments, for training."""
        return self.memory.read(range(batch) if env_ids is None else env_ids)

    def initial_state(self, batch: int) -> Any:
        return self.memory.core.initial_state(batch)

    def observations(self, *lead: int, seed: int = 0) -> Tensor:
        """Random observations [*lead, *obs_shape] in the module's dtype."""
        dtype = next(self.module.parameters()).dtype
        return torch.randn(*lead, *self.obs_shape, generator=torch.Generator().manual_seed(seed)).to(dtype)

    def carried(self) -> list[Tensor]:
        """All tensors that are kept from call to call."""
        return [leaf for leaf in state_ops.leaves(self.memory.rows.state) if isinstance(leaf, Tensor)]


class PolicyDriver(Driver):
    """Drives any `hf.RecurrentPolicy`."""

    def __init__(self, policy: hf.RecurrentPolicy, reset: str = "zero", obs_shape: tuple[int, ...] = (3,)) -> None:
        self.module = self.policy = policy
        self.memory, self.reset, self.obs_shape = policy.memory, reset, obs_shape

    def act(
        self, obs: Tensor, dones: Tensor | None = None, truncateds: Tensor | None = None, env_ids: Any = None
    ) -> Acted:
        step = self.policy.act(obs, either(dones, truncateds), env_ids, memory=self.memory, deterministic=True)
        return Acted(step.action, step.log_prob, step.value, torch.stack([step.log_prob, step.value], -1))

    def evaluate(
        self,
        obs: Tensor,
        actions: Tensor,
        state: Any,
        dones: Tensor | None = None,
        truncateds: Tensor | None = None,
    ) -> Evaluated:
        ev = self.policy.evaluate(obs, actions, state, either(dones, truncateds))
        return Evaluated(ev.log_prob, ev.entropy, ev.value)

    def agent(self) -> Driver:
        other = type(self)(self.policy, self.reset, self.obs_shape)
        other.memory = hf.Memory(self.policy.core)
        return other

    def reset_memory(self) -> None:
        self.memory.reset() if self.memory is not self.policy.memory else self.policy.reset_memory()

    def reset_env_memory(self, env_id: int) -> None:
        self.policy.reset_env_memory(env_id)

    def get_memory(self) -> Any:
        return self.policy.get_memory()

    def set_memory(self, saved: Any) -> None:
        self.policy.set_memory(saved)


def either(dones: Tensor | None, truncateds: Tensor | None) -> Tensor | None:
    """`resets`: a missing flag counts as False, two missing ones as no reset at all."""
    if dones is None or truncateds is None:
        return truncateds if dones is None else dones
    return dones | truncateds
