"""The gradients of a whole segment by the passes in C."""

from __future__ import annotations

import torch

from holdfast.algorithms.ppo import LossSettings, PPOTerms
from holdfast.engines.autograd import FlatGradients
from holdfast.engines.native import NativeMinibatch
from holdfast.engines.native_parts import NativeBatch
from holdfast.policies.actor_critic import ActorCritic
from holdfast.rollout.segment import Segment


class NativeGradient:
    """`NativeGradient(policy, settings)(segment)` leaves gradients in the policy's parameters."""

    def __init__(self, policy: ActorCritic, settings: LossSettings) -> None:
        self.policy, self.settings = policy, settings

    @torch.no_grad()
    def __call__(self, segment: Segment) -> PPOTerms:
        batch = NativeBatch.of(self.policy, segment).everything(self.policy)
        gradients = FlatGradients(list(self.policy.parameters()))
        return NativeMinibatch(self.policy, self.settings, batch, gradients).run()
