"""What every engine for minibatches shares: select, gradients, clipping, optimizer step, metrics. Gradients differ."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from holdfast.algorithms.ppo import LossSettings, PPOTerms
from holdfast.config import TrainConfig
from holdfast.distributed.ranks import ALONE, Ranks
from holdfast.policies.base import RecurrentPolicy
from holdfast.rollout.segment import Segment
from holdfast.spans import span


def make_adam(policy: RecurrentPolicy, config: TrainConfig) -> torch.optim.Adam:
    """The optimizer of a run: fused; on a GPU its rate is a tensor, so that a captured step reads the current one."""
    parameters = list(policy.parameters())
    on_gpu = parameters[0].is_cuda
    rate = torch.tensor(config.learning_rate, device=parameters[0].device) if on_gpu else config.learning_rate
    return torch.optim.Adam(parameters, lr=rate, eps=config.adam_eps, fused=True, capturable=on_gpu)


class Minibatches:
    """One optimizer step at a time. Subclasses write `gradients`; `load` comes before the first `step`."""

    batch: Segment
    settings: LossSettings
    ddp_policy: nn.Module | None = None  # called for gradients in place of the policy

    def __init__(
        self,
        policy: RecurrentPolicy,
        config: TrainConfig,
        optimizer: torch.optim.Adam,
        ranks: Ranks = ALONE,
        all_valid: bool = False,
    ) -> None:
        self.policy, self.config, self.optimizer, self.ranks = policy, config, optimizer, ranks
        self.all_valid = all_valid
        self.parameters = list(policy.parameters())

    def load(self, batch: Segment, settings: LossSettings) -> None:
        """Take these training sequences and the settings of their loss."""
        self.batch, self.settings = batch, settings

    def step(self, columns: Tensor | None, share: Any = 1.0) -> Tensor:
        """One optimizer step on some columns of the batch (None: all): `MinibatchMetrics` as a tensor [7]."""
        with span("minibatch"):
            with span("selecting its sequences"):
                part = self.select(columns)
            terms = self.gradients(part, share)
            return self.finish_step(terms, share)

    def select(self, columns: Tensor | None) -> Any:
        """Some columns of the batch (None: all), as `gradients` takes them."""
        return self.batch if columns is None else self.batch.select(columns)

    def gradients(self, part: Any, share: Any) -> PPOTerms:
        """Leave the gradients of `share` times the loss in the parameters. If the loss is not finite, the gradients are not finite."""
        raise NotImplementedError

    def finish_step(self, terms: PPOTerms, share: Any) -> Tensor:
        """Step the optimizer and report; the reports of all ranks add up to the minibatch's."""
        with span("clipping and optimizer step"):
            norm = self.optimizer_step()
        with torch.no_grad(), span("its metrics"):
            part, whole = share / self.ranks.size, norm / self.ranks.size
            numbers = [terms.policy_loss, terms.value_loss, terms.entropy, whole, terms.approx_kl, terms.clip_fraction]
            numbers = [n if n is whole or not self.ranks.joined else n * part for n in numbers]
            skipped = ~norm.isfinite()
            return torch.cat([torch.where(skipped, 0.0, torch.stack(numbers)), skipped.float().view(1)])

    @torch.no_grad()
    def optimizer_step(self) -> Tensor:
        """Step with gradients scaled down to `max_grad_norm`; return their norm before that.

        The fused Adam divides by `grad_scale` as it goes and takes no step where `found_inf` is set: no extra pass over
        the parameters and no look at a number on the device.
        """
        norms = torch._foreach_norm([p.grad for p in self.parameters if p.grad is not None])
        norm = torch.linalg.vector_norm(torch.stack(norms))
        self.optimizer.grad_scale = (norm / self.config.max_grad_norm).clamp(min=1.0)  # type: ignore[attr-defined]
        self.optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]
        self.optimizer.step()
        return norm
