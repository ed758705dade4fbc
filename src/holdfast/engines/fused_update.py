"""A minibatch on a GPU in about twenty launches: loss with its gradient in one, clipping and Adam in two, no gathered copies.

An accelerator for `ClippedLoss`, for policies without an obstacle in `fused_policy.py`. Autograd runs through the core alone.
`algorithms/ppo.py` says what is computed; `GraphMinibatches` captures it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from holdfast import state as state_ops
from holdfast.algorithms.loss import Loss
from holdfast.algorithms.ppo import ClippedLoss
from holdfast.engines.autograd import Minibatches
from holdfast.engines.fused_policy import FusedPolicy
from holdfast.policies.actor_critic import ActorCritic
from holdfast.rollout.segment import Segment


class FusedMinibatches(Minibatches):
    """As `Minibatches`, for one rank. `columns_backward` and `finish_step` are called in turn."""

    # In the kernel's order.
    names = ("policy_loss", "value_loss", "entropy", "grad_norm", "approx_kl", "clip_fraction", "skipped")

    def __init__(self, *args: Any) -> None:
        from holdfast.kernels.triton.adam import ClippedAdam  # imports Triton

        super().__init__(*args)
        assert isinstance(self.policy, ActorCritic) and not self.ranks.joined
        self._fused = FusedPolicy(self.policy)
        self._adam = ClippedAdam(self.optimizer, self.config.max_grad_norm)
        self._weights: dict[int, Tensor] = {}  # of one step, by the number of steps in a minibatch

    def load(self, batch: Segment, loss: Loss) -> None:
        super().load(batch, loss)
        assert isinstance(loss, ClippedLoss)
        settings = self._settings = loss.settings
        self._clip_range, self._entropy_coef = (
            torch.as_tensor(number, dtype=torch.float32, device=batch.resets.device)
            for number in (settings.clip_range, settings.entropy_coef)
        )

    def find_gradients(self) -> None:
        self._adam.find()

    def columns_backward(self, columns: Tensor, rank_weight: Any = 1.0) -> Any:
        """Leave the gradients of these columns in the parameters. Returns what `finish_step` needs."""
        from holdfast.kernels.triton.outputs import Coefficients, Stored, loss_and_gradients

        batch, policy, settings = self.batch, self.policy, self._settings
        start, resets = state_ops.select(batch.start_state, columns), batch.resets.index_select(1, columns)
        (y,) = policy.core.output_unchecked(self._fused.features(batch.obs, columns), start, resets)
        weight = self._weight_of_a_step(columns)
        stored = Stored(
            batch.actions, batch.log_prob, batch.value, batch.advantage, batch.returns,
            None if batch.all_valid else batch.valid,
        )  # fmt: skip
        coefficients = Coefficients(
            weight, self._clip_range, settings.clip_value, self._entropy_coef, settings.value_coef
        )
        given = loss_and_gradients(y.detach().flatten(0, 1), self._fused.layers, stored, columns, coefficients)
        self.optimizer.zero_grad(set_to_none=True)
        if y.requires_grad:  # not without a core and an encoder
            torch.autograd.backward([y], [given.features.view_as(y)])
        assert isinstance(policy, ActorCritic)
        policy.actor.weight.grad, policy.actor.bias.grad = given.actor_w, given.actor_b
        policy.critic.weight.grad, policy.critic.bias.grad = given.critic_w, given.critic_b
        if self._fused.layers.log_std is not None:
            policy.log_std.grad = given.log_std
        return given.metrics, weight

    def finish_step(self, terms: Any, rank_weight: Any = 1.0) -> Tensor:
        metrics, weight = terms
        return self._adam.step(metrics, weight, self._entropy_coef, self._settings.value_coef)

    def _weight_of_a_step(self, columns: Tensor) -> Tensor:
        valid = self.batch.valid
        if not self.batch.all_valid:
            return 1.0 / valid.index_select(1, columns).sum().clamp(min=1).float()
        steps = len(valid) * columns.numel()
        if steps not in self._weights:
            self._weights[steps] = torch.full((), 1.0 / steps, device=valid.device)
        return self._weights[steps]
