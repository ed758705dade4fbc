"""What the passes in C read of a batch of sequences, laid out so that a few calls of torch select a minibatch of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor

from holdfast.cores.gated import GatedCore
from holdfast.engines.native_passes import cores_by_head
from holdfast.policies.actor_critic import ActorCritic
from holdfast.policies.base import merge_time, segment_shape
from holdfast.rollout.segment import Segment
from holdfast.state import tree_map

ENCODED_AT_ONCE = 2**26
"""Observations with more encoded numbers than this (256 MB) are encoded minibatch by minibatch."""


@dataclass
class NativeBatch:
    """T steps of B sequences."""

    encoded: Tensor  # [T, B, E]
    obs: Any  # [T, B, ...] if a selection has to be encoded; None if `encoded` holds all
    stored: Tensor  # [4, T, B]: log-probabilities, values, advantages, returns
    resets: Tensor  # [T, B]
    actions: Tensor  # [T, B, ...]; where the objective is C's too, [T, B] int64, from 0
    valid: Tensor | None  # [T, B]; None: every step counts
    action_mask: Any  # [T, B, ...] or None
    states: dict[str, Tensor]  # by core [leaves, layers, B, H]

    @classmethod
    def of(cls, policy: ActorCritic, segment: Segment) -> NativeBatch:
        policy.core.check_state(segment.start_state, segment.num_envs)
        stored = (segment.log_prob, segment.value, segment.advantage, segment.returns)
        encoded = encode(policy, tree_map(lambda o: o[:, :1], segment.obs))
        at_once = encoded.numel() * segment.num_envs <= ENCODED_AT_ONCE
        return cls(
            encoded=encode(policy, segment.obs) if at_once else encoded,
            obs=None if at_once else segment.obs,
            stored=torch.stack([part.float() for part in stored]),
            resets=segment.resets.contiguous(),
            actions=_actions(policy, segment),
            valid=None if segment.all_valid else segment.valid.contiguous(),
            action_mask=segment.action_mask,
            states=_states(policy, segment),
        )

    log_prob = property(lambda self: self.stored[0])
    value = property(lambda self: self.stored[1])
    advantage = property(lambda self: self.stored[2])
    returns = property(lambda self: self.stored[3])

    def everything(self, policy: ActorCritic) -> NativeBatch:
        """All sequences, as a selection of them is."""
        return self if self.obs is None else replace(self, encoded=encode(policy, self.obs), obs=None)

    def new_selection(self, size: int) -> NativeBatch:
        """Room for so many of the sequences."""

        def room(x: Tensor, dim: int) -> Tensor:
            return x.new_empty([size if d == dim else n for d, n in enumerate(x.shape)])

        return NativeBatch(
            encoded=room(self.encoded, 1),
            obs=None,
            stored=room(self.stored, 2),
            resets=room(self.resets, 1),
            actions=room(self.actions, 1),
            valid=None if self.valid is None else room(self.valid, 1),
            action_mask=self.action_mask,
            states={name: room(state, 2) for name, state in self.states.items()},
        )

    def select_into(self, policy: ActorCritic, columns: Tensor, out: NativeBatch) -> None:
        """Write some sequences into a selection of as many."""
        if self.obs is None:
            torch.index_select(self.encoded, 1, columns, out=out.encoded)
        else:
            out.encoded.copy_(encode(policy, tree_map(lambda o: o.index_select(1, columns), self.obs)))
        torch.index_select(self.stored, 2, columns, out=out.stored)
        torch.index_select(self.resets, 1, columns, out=out.resets)
        torch.index_select(self.actions, 1, columns, out=out.actions)
        if self.valid is not None and out.valid is not None:
            torch.index_select(self.valid, 1, columns, out=out.valid)
        if self.action_mask is not None:
            out.action_mask = tree_map(lambda m: m.index_select(1, columns), self.action_mask)
        for name, state in self.states.items():
            torch.index_select(state, 2, columns, out=out.states[name])


def encode(policy: ActorCritic, obs: Any) -> Tensor:
    """[T, B, E], contiguous. Nothing is trained here, and statistics do not move during an update."""
    T, B = segment_shape(obs)
    return policy.encoder(merge_time(obs, T, B, "observations")).to(torch.float32).unflatten(0, (T, B)).contiguous()


def _states(policy: ActorCritic, segment: Segment) -> dict[str, Tensor]:
    found = {}
    for name, core in cores_by_head(policy.core).items():
        if isinstance(core, GatedCore):
            state = segment.start_state if name == "" else segment.start_state[name]
            found[name] = torch.stack([state[leaf].float().transpose(0, 1) for leaf in core.leaf_names])
    return found


def objective_in_c(policy: ActorCritic, action_mask: Any) -> bool:
    """Whether the objective has a function in C: choices without masks."""
    return isinstance(policy.action_space, spaces.Discrete) and action_mask is None


def _actions(policy: ActorCritic, segment: Segment) -> Tensor:
    if not objective_in_c(policy, segment.action_mask):
        return segment.actions.contiguous()
    return (segment.actions.long() - int(policy.action_space.start)).contiguous()  # type: ignore[attr-defined]
