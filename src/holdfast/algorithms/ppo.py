"""Proximal policy optimization (Schulman et al., 2017) with memory: one page for the loss, one for the update.

This is the specification. Minibatches are whole sequences, each from the state that the rollout had there, with resets
inside: what is trained is what was played. How a minibatch is executed (autograd, C, a CUDA graph) is an engine's
business, and every engine is tested against `clipped_objective`. Nothing here touches memory or environments.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from holdfast.config import TrainConfig
from holdfast.distributed.ranks import ALONE, Ranks
from holdfast.policies.actor_critic import ActorCritic
from holdfast.policies.base import RecurrentPolicy
from holdfast.policies.precision import autocast, autocast_dtype
from holdfast.policies.value_scale import ValueScale
from holdfast.rollout.segment import Segment
from holdfast.spans import span
from holdfast.state import State, tree_map

# --- the loss --------------------------------------------------------------------------------------------------------


class LossSettings(NamedTuple):
    """The coefficients of the loss; `TrainConfig` explains them."""

    clip_range: Any = 0.2  # a number, or a tensor without dimensions that a captured graph reads
    clip_value: float | None = None
    entropy_coef: Any = 0.01  # likewise
    value_coef: float = 0.5

    @classmethod
    def from_config(cls, config: TrainConfig) -> LossSettings:
        return cls(*(getattr(config, name) for name in cls._fields))


class PPOTerms(NamedTuple):
    """The loss and its parts, all scalars. Only the loss carries a gradient."""

    loss: Tensor
    policy_loss: Tensor
    value_loss: Tensor
    entropy: Tensor
    approx_kl: Tensor
    clip_fraction: Tensor


def clipped_objective(
    log_prob: Tensor, entropy: Tensor, value: Tensor, old: Segment, settings: LossSettings, all_valid: bool = False
) -> PPOTerms:
    """PPO's loss on what the policy says now, [T, B] each, against what the rollout stored in `old`.

    Values and returns are in units of the loss: those of the rewards, or normalized (`in_loss_units`).
    """
    clip, clip_value, entropy_coef, value_coef = settings
    old_log_prob, old_value, advantage, returns = old.log_prob, old.value, old.advantage, old.returns
    if not all_valid:  # dummy steps may hold anything: zeros in their place add nothing below
        log_prob, entropy, value, old_log_prob, old_value, advantage, returns = (
            torch.where(old.valid, x, 0.0)
            for x in (log_prob, entropy, value, old_log_prob, old_value, advantage, returns)
        )
    count = old.valid.numel() if all_valid else old.valid.sum().clamp(min=1)

    log_ratio = log_prob - old_log_prob
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1 - clip, 1 + clip)
    policy_loss = -torch.minimum(ratio * advantage, clipped_ratio * advantage).sum() / count

    squared_error = (value - returns) ** 2
    if clip_value is not None:
        near = old_value + (value - old_value).clamp(-clip_value, clip_value)
        squared_error = torch.maximum(squared_error, (near - returns) ** 2)
    value_loss = 0.5 * squared_error.sum() / count

    mean_entropy = entropy.sum() / count
    loss = policy_loss + value_coef * value_loss - entropy_coef * mean_entropy
    approx_kl = (ratio - 1 - log_ratio).sum() / count  # Schulman's k3: never negative, low variance
    clip_fraction = ((ratio - 1).abs() > clip).to(ratio.dtype).sum() / count
    return PPOTerms(loss, *(x.detach() for x in (policy_loss, value_loss, mean_entropy, approx_kl, clip_fraction)))


Objective = Callable[[Tensor, Tensor, Tensor, Segment, LossSettings, bool], PPOTerms]


def ppo_terms(
    policy: nn.Module,
    segment: Segment,
    *,
    settings: LossSettings | None = None,
    all_valid: bool = False,
    value_scale: ValueScale | None = None,
    objective: Objective = clipped_objective,
    **coefficients: Any,
) -> PPOTerms:
    """The clipped objective of a policy on a segment, with its parts.

    The segment's values and returns are in units of the loss (`in_loss_units`), and value_scale converts the policy's.
    settings: or its fields as `coefficients`, not both. all_valid: no step needs masking out. objective: another implementation of
    `clipped_objective`.
    """
    new = policy(segment.obs, segment.actions, segment.start_state, segment.resets, action_mask=segment.action_mask)
    if settings is not None and coefficients:
        raise TypeError(f"pass settings= or {', '.join(coefficients)}, not both")
    settings = settings or LossSettings(**coefficients)
    value = new.value.float()
    if value_scale is not None:
        value = value_scale.to_loss_units(value)
    return objective(new.log_prob.float(), new.entropy.float(), value, segment, settings, all_valid)


def in_loss_units(segment: Segment, value_scale: ValueScale | None) -> Segment:
    """A copy whose values and returns are normalized as the critic learns them; as it is without a `value_scale`."""
    if value_scale is None:
        return segment
    value, returns = value_scale.to_loss_units(segment.value), value_scale.to_loss_units(segment.returns)
    return replace(segment, value=value, returns=returns)


def normalize_advantage(segment: Segment, ranks: Ranks = ALONE) -> Segment:
    """A copy with advantages of mean 0 and deviation 1 over its real steps, those of all `ranks` together."""
    real = segment.valid.float()
    n = ranks.sum(real.sum()).clamp(min=1)
    centered = segment.advantage - ranks.sum((segment.advantage * real).sum()) / n
    deviation = (ranks.sum((centered**2 * real).sum()) / n).sqrt()
    return replace(segment, advantage=centered / (deviation + 1e-8))


# --- the update ------------------------------------------------------------------------------------------------------


class MinibatchMetrics(NamedTuple):
    """What one optimizer step reports. Engines give it as one tensor [7] in this order, so that sums stay on the device."""

    policy_loss: float
    value_loss: float
    entropy: float
    grad_norm: float
    approx_kl: float
    clip_fraction: float
    skipped: float  # 1 if loss or gradients were not finite and no step was taken; the others are 0 then


class MinibatchEngine(Protocol):
    """How minibatches of one rollout are executed."""

    def load(self, batch: Segment, settings: LossSettings) -> None:
        """Take these training sequences, or the same ones with other start states, and the settings of their loss."""

    def step(self, columns: Tensor | None, share: Any) -> Tensor:
        """One optimizer step on some columns of the batch (None: all); `MinibatchMetrics` as a tensor.

        share: this rank's part of the minibatch's real steps, times the number of ranks.
        """


class PPO:
    """The update: epochs of minibatches over one rollout.

    engine_for: gives the engine for a batch of sequences and the settings of its loss, loaded with them. With several
    `ranks` each has a part of the rollout and takes its share of every minibatch; averages are over the steps of all of
    them.
    """

    def __init__(
        self,
        policy: RecurrentPolicy,
        config: TrainConfig,
        optimizer: torch.optim.Optimizer,
        engine_for: Callable[[Segment, LossSettings, bool], MinibatchEngine],
        ranks: Ranks = ALONE,
    ) -> None:
        self.policy, self.config, self.optimizer, self.ranks = policy, config, optimizer, ranks
        self.engine_for = engine_for
        self.generator = torch.Generator().manual_seed(ranks.seed(config.seed))
        self._rates = [group["lr"] for group in optimizer.param_groups]  # on a GPU tensors, which captured steps read

    def update(self, segment: Segment, progress: float, all_valid: bool = False) -> dict[str, float]:
        """Train on one rollout and return its metrics. progress: the fraction of the run that is done."""
        with span("update"):
            return self._update(segment, progress, all_valid)

    def _update(self, segment: Segment, progress: float, all_valid: bool) -> dict[str, float]:
        config, device = self.config, segment.resets.device
        rate = self._set_learning_rate(progress)
        scale = self.policy.value_scale
        if scale is not None:
            with span("value statistics"):
                self._move_value_scale(segment, all_valid)
        if config.normalize_advantage:
            segment = normalize_advantage(segment, self.ranks)
        batch = in_loss_units(segment, scale).as_sequences(config.bptt)
        settings = self.loss_settings(progress)
        engine = self.engine_for(batch, settings, all_valid)
        sums, count = torch.zeros(len(MinibatchMetrics._fields), device=device), 0
        for epoch in range(config.epochs):
            if config.refresh_states and epoch > 0 and config.sequences_per_env > 1:
                batch.start_state = self.refreshed_starts(segment)
                engine.load(batch, settings)
            before, count_before = sums.clone(), count
            minibatches = self.minibatches(batch.num_envs, device)
            for columns, share in zip(minibatches, self._shares(batch.valid, minibatches)):
                sums += engine.step(columns, share)
                count += 1
            if config.target_kl is not None and self._moved_too_far(sums - before, count - count_before):
                break
        means, skipped = self._means(sums, count)
        return {
            **means,
            "train/explained_variance": _explained_variance(segment, self.ranks),
            "train/skipped_steps": skipped,
            "train/learning_rate": rate,
            "train/epochs": float(epoch + 1),
        }

    def _move_value_scale(self, segment: Segment, all_valid: bool) -> None:
        returns = segment.returns.flatten() if all_valid else segment.returns[segment.valid]
        assert isinstance(self.policy, ActorCritic)
        self.policy.update_value_scale(returns, self.ranks)

    def learning_rate(self, progress: float) -> float:
        """At a fraction of the run."""
        if self.config.lr_schedule == "linear":
            return self.config.learning_rate * (1 - progress)
        if self.config.lr_schedule == "cosine":
            return self.config.learning_rate * 0.5 * (1 + math.cos(progress * math.pi))
        return self.config.learning_rate

    def loss_settings(self, progress: float) -> LossSettings:
        """At a fraction of the run."""
        settings = LossSettings.from_config(self.config)
        if self.config.clip_schedule == "linear":
            settings = settings._replace(clip_range=settings.clip_range * (1 - progress))
        if self.config.entropy_schedule == "linear":
            settings = settings._replace(entropy_coef=settings.entropy_coef * (1 - progress))
        return settings

    def _set_learning_rate(self, progress: float) -> float:
        rate = self.learning_rate(progress)
        for group, own in zip(self.optimizer.param_groups, self._rates):
            group["lr"] = own.fill_(rate) if isinstance(own, Tensor) else rate
        return rate

    def minibatches(self, columns: int, device: torch.device) -> list[Tensor | None]:
        """The columns of each minibatch of an epoch, shuffled; [None] for one minibatch of all."""
        if self.config.minibatches == 1:
            return [None]
        order = torch.randperm(columns, generator=self.generator).to(device)
        return list(order.tensor_split(self.config.minibatches))

    def _shares(self, valid: Tensor, minibatches: list[Tensor | None]) -> list[Any]:
        """This rank's part of each minibatch's real steps, times the number of ranks: with these weights an average over
        ranks is an average over steps."""
        if not self.ranks.joined:
            return [1.0] * len(minibatches)
        mine = torch.stack([(valid if c is None else valid.index_select(1, c)).sum() for c in minibatches]).double()
        return list((self.ranks.size * mine / self.ranks.sum(mine).clamp(min=1)).float())

    def _moved_too_far(self, sums: Tensor, count: int) -> bool:
        """Whether the mean KL divergence of an epoch's minibatches is above 1.5 times the target."""
        epoch = MinibatchMetrics(*self.ranks.sum(sums).tolist())
        assert self.config.target_kl is not None
        taken = count - epoch.skipped / self.ranks.size
        return epoch.approx_kl > 1.5 * self.config.target_kl * max(1.0, taken)

    def _means(self, sums: Tensor, count: int) -> tuple[dict[str, float], float]:
        """The mean of each metric over the steps taken, and how many steps were skipped."""
        total = MinibatchMetrics(*self.ranks.sum(sums).tolist())
        skipped = total.skipped / self.ranks.size  # all ranks skip the same ones
        taken = count - skipped or float("nan")
        return {f"train/{name}": number / taken for name, number in zip(total._fields[:-1], total)}, skipped

    @torch.no_grad()
    def refreshed_starts(self, segment: Segment) -> State:
        """The start state of every chunk under the current weights, in the order of `Segment.as_sequences`."""
        length = self.config.bptt or segment.num_steps
        states, state = [], segment.start_state
        for begin in range(0, segment.num_steps, length):
            states.append(state)
            part = segment.steps(begin, begin + length)
            with autocast(segment.resets.device, autocast_dtype(self.config.precision)):
                state = self.policy.unroll(part.obs, state, part.resets, action_mask=part.action_mask).state
        return tree_map(lambda *s: torch.cat(s), *states)

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict(), "generator": self.generator.get_state()}

    def load_state_dict(self, d: dict[str, Any]) -> None:
        # The options are this run's own: on a GPU the rate is a tensor there that captured steps read.
        options = [
            {name: value for name, value in group.items() if name != "params"} for group in self.optimizer.param_groups
        ]
        self.optimizer.load_state_dict(d["optimizer"])
        for group, own in zip(self.optimizer.param_groups, options):
            group.update(own)
        self.generator.set_state(d["generator"])


def _explained_variance(segment: Segment, ranks: Ranks) -> float:
    """1 - Var(returns - values) / Var(returns): 1 is a perfect critic, 0 a useless one."""
    returns, value = segment.returns[segment.valid], segment.value[segment.valid]
    _, (variance, unexplained), _ = ranks.moments(torch.stack([returns, returns - value], 1))
    return float(1 - unexplained / variance) if float(variance) > 0 else float("nan")
