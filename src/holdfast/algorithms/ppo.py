"""Proximal policy optimization (Schulman et al., 2017) with memory: the loss as a formula, and what PPO adds to an update.

The loop over epochs and minibatches is `OnPolicy`'s. Autograd and captured graphs run the loss on this page; the C and the fused
CUDA updates are accelerators for it, and are tested against it. Nothing here touches memory or environments.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from holdfast.algorithms import auto_sizes
from holdfast.algorithms.base import Progress, RunContext
from holdfast.algorithms.loss import Loss
from holdfast.algorithms.on_policy import OnPolicy
from holdfast.config import PPOConfig
from holdfast.distributed.metrics import Metric
from holdfast.distributed.ranks import ALONE, Ranks
from holdfast.policies.actor_critic import ActorCritic, ValueScale
from holdfast.policies.base import PolicyOutput, RecurrentPolicy, merge_time
from holdfast.policies.heads import entropy_of
from holdfast.rollout.advantages import segment_advantages
from holdfast.rollout.exploration import CorrelatedNoise, Noise
from holdfast.rollout.segment import Segment
from holdfast.spans import span

# --- the loss --------------------------------------------------------------------------------------------------------


class LossSettings(NamedTuple):
    """The coefficients of the loss; `PPOConfig` explains them."""

    clip_range: Any = 0.2  # a number, or a tensor without dimensions that a captured graph reads
    clip_value: float | None = None
    entropy_coef: Any = 0.01  # likewise
    value_coef: float = 0.5


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
    count = log_prob.numel() if all_valid else old.valid.sum().clamp(min=1)

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


class ClippedLoss(Loss):
    """`clipped_objective` of a policy's output. value_scale: of a critic that learns normalized values."""

    terms = PPOTerms._fields[1:]

    def __init__(
        self,
        settings: LossSettings = LossSettings(),  # noqa: B008  (immutable)
        value_scale: ValueScale | None = None,
        normalizes_advantage: bool = True,
        ranks: Ranks = ALONE,
    ) -> None:
        self.settings, self.value_scale, self.ranks = settings, value_scale, ranks
        self.normalizes_advantage = normalizes_advantage

    def targets(self, segment: Segment) -> Segment:
        """Advantages as they are weighted, values and returns in units of the loss."""
        segment = segment.changed(advantage=segment.advantage, returns=segment.returns)
        if self.normalizes_advantage:
            segment = normalize_advantage(segment, self.ranks)
        return in_loss_units(segment, self.value_scale)

    def __call__(self, output: PolicyOutput, batch: Segment) -> dict[str, Tensor]:
        T, B = batch.resets.shape
        log_prob = output.dist.log_prob(merge_time(batch.actions, T, B, "actions")).view(T, B)
        entropy = entropy_of(output.dist).view(T, B)
        value = output.value.float()
        if self.value_scale is not None:
            value = self.value_scale.to_loss_units(value)
        return clipped_objective(
            log_prob.float(), entropy.float(), value, batch, self.settings, batch.all_valid
        )._asdict()

    def constants(self) -> tuple[Any, ...]:
        return tuple(None if isinstance(number, Tensor) else number for number in self.settings)


def ppo_loss(
    policy: RecurrentPolicy,
    segment: Segment,
    *,
    clip_range: float = 0.2,
    clip_value: float | None = None,
    entropy_coef: float = 0.01,
    value_coef: float = 0.5,
    normalize_advantage: bool = True,
) -> Tensor:
    """The PPO loss of a whole segment; advantages are normalized over its steps, or taken as they are.

    loss = hf.ppo_loss(policy, segment); loss.backward()
    """
    if not isinstance(policy, nn.Module) or not isinstance(segment, Segment):
        raise TypeError(
            f"ppo_loss takes a policy and a segment, got a {type(policy).__name__} and a {type(segment).__name__}; "
            "write hf.ppo_loss(policy, segment)"
        )
    inside = getattr(policy, "module", policy)  # DDP keeps the policy there
    if not isinstance(inside, RecurrentPolicy):
        raise TypeError(f"ppo_loss takes an hf.RecurrentPolicy, alone or inside DDP, got a {type(policy).__name__}")
    settings = LossSettings(clip_range, clip_value, entropy_coef, value_coef)
    loss = ClippedLoss(settings, inside.value_scale, normalize_advantage)
    batch = loss.targets(segment)
    output = policy(batch.obs, None, batch.start_state, batch.resets, action_mask=batch.action_mask)
    return loss(output, batch)["loss"]


def in_loss_units(segment: Segment, value_scale: ValueScale | None) -> Segment:
    """A copy whose values and returns are normalized as the critic learns them; as it is without a `value_scale`."""
    if value_scale is None:
        return segment
    value, returns = value_scale.to_loss_units(segment.value), value_scale.to_loss_units(segment.returns)
    return segment.changed(value=value, returns=returns)


def normalize_advantage(segment: Segment, ranks: Ranks = ALONE) -> Segment:
    """A copy with advantages of mean 0 and deviation 1 over its real steps, those of all `ranks` together.

    In float64, where squares of large and small numbers are numbers. Deviations below 1e-8 of the mean are rounding.
    """
    real, advantage = segment.valid.double(), segment.advantage.double()
    n = ranks.sum(real.sum()).clamp(min=1)
    mean = ranks.sum((advantage * real).sum()) / n
    centered = advantage - mean
    deviation = (ranks.sum((centered**2 * real).sum()) / n).sqrt()
    size = (deviation + 1e-8 * mean.abs()).clamp(min=_TINY)
    return segment.changed(advantage=(centered / size).to(segment.advantage.dtype))


_TINY = 1e-150


# --- the update ------------------------------------------------------------------------------------------------------


class PPO(OnPolicy):
    """Advantages by GAE, a critic that may learn normalized values, schedules of the coefficients, an early stop by KL."""

    name = "ppo"
    Config = PPOConfig
    records = frozenset(("log_prob", "value"))
    evaluates_deterministically = False  # as in 0.2
    metrics = (
        Metric("train/policy_loss", "policy loss"),
        Metric("train/value_loss", "value loss"),
        Metric("train/entropy", "entropy", short="entropy"),
        Metric("train/approx_kl", "approx kl", short="kl", digits=4),
        Metric("train/clip_fraction", "clipped", form="percent"),
        Metric("train/explained_variance", "explained"),
        *OnPolicy.metrics,
    )

    def __init__(self, policy: RecurrentPolicy, config: PPOConfig, run: RunContext) -> None:
        super().__init__(policy, auto_sizes.choose_for_actions(config, run.action_space)[0], run)
        self._coefficients: dict[str, Tensor] = {}

    @classmethod
    def make_policy(cls, config: PPOConfig, observation_space: Any, action_space: Any) -> ActorCritic:
        return ActorCritic.of_config(config, observation_space, action_space)

    @classmethod
    def advice(cls, config: PPOConfig) -> str:
        if not config.normalize_obs or not (config.normalize_value or config.normalize_reward):
            return "Try --normalize-obs --normalize-value."
        if config.sequence_length < 128:
            return "Try longer sequences: --num-steps 128."
        if config.learning_rate > 7e-4:
            return "Try a lower --learning-rate, such as 7e-4."
        if config.minibatches < min(32, config.num_envs * config.sequences_per_env):
            return "Try smaller minibatches, which give more steps of the optimizer: --minibatches 32."
        if config.num_envs > 16:
            return f"Try smaller rollouts and more passes: --num-envs {config.num_envs // 2} --epochs 10."
        return super().advice(config)

    def make_noise(self, num_envs: int) -> Noise | None:
        correlation = self.config.noise_correlation
        noise = CorrelatedNoise.for_actions(self.run.action_space, num_envs, correlation, self.run.device)
        if noise is not None:
            self.explores_with = "correlated noise"
        return noise

    def evaluates_with(self) -> str:
        return "white noise" if self.explores_with == "correlated noise" else super().evaluates_with()

    def scales_rewards(self) -> bool:
        """A critic that cannot learn normalized values gets smaller rewards instead."""
        without = self.policy.value_scale is None
        return bool(self.config.normalize_reward or (self.config.normalize_value and without))

    def prepare(self, segment: Segment) -> None:
        scale = 1.0 if self.reward_scale is None else self.reward_scale.value
        options = {"gamma": self.config.gamma, "gae_lambda": self.config.gae_lambda, "reward_scale": scale}
        segment.targets = partial(segment_advantages, **options)

    def observe(self, segment: Segment) -> Tensor:
        """The variance of returns, and that of returns - values."""
        returns, value = _real(segment, segment.returns), _real(segment, segment.value)
        return self.run.ranks.moments(torch.stack([returns, returns - value], 1))[1]

    def describe(self, observed: list[float]) -> dict[str, float]:
        """1 - Var(returns - values) / Var(returns): 1 is a perfect critic, 0 a useless one."""
        variance, unexplained = observed
        return {"train/explained_variance": 1 - unexplained / variance if variance > 0 else float("nan")}

    def make_loss(self, segment: Segment, progress: Progress) -> ClippedLoss:
        scale = self.policy.value_scale
        if scale is not None:
            assert isinstance(self.policy, ActorCritic)
            with span("value statistics"):
                self.policy.update_value_scale(_real(segment, segment.returns), self.run.ranks)
        settings = self.loss_settings(progress.fraction)
        return ClippedLoss(settings, scale, self.config.normalize_advantage, self.run.ranks)

    def loss_settings(self, fraction: float) -> LossSettings:
        """At a fraction of the run."""
        config, left = self.config, 1 - fraction
        clip = config.clip_range * (left if config.clip_schedule == "linear" else 1.0)
        entropy = config.entropy_coef * (left if config.entropy_schedule == "linear" else 1.0)
        clip, entropy = self._coefficient("clip", clip), self._coefficient("entropy", entropy)
        return LossSettings(clip, config.clip_value, entropy, config.value_coef)

    def _coefficient(self, name: str, number: float) -> Any:
        """A number that may change from update to update: on a GPU a tensor that stays where it is."""
        if self.run.device.type != "cuda":
            return number
        if name not in self._coefficients:
            self._coefficients[name] = torch.zeros((), device=self.run.device)
        return self._coefficients[name].fill_(number)

    @property
    def looks_at_epochs(self) -> bool:  # type: ignore[override]
        return self.config.target_kl is not None

    def has_gone_far(self, means: Mapping[str, float]) -> bool:
        """Whether the mean KL divergence of an epoch's minibatches is above 1.5 times the target."""
        return means["approx_kl"] > 1.5 * self.config.target_kl


def _real(segment: Segment, numbers: Tensor) -> Tensor:
    """The numbers [T, B] of real steps, [N]. Looks at no flag if all steps are known to be real."""
    return numbers.flatten() if segment.all_valid else numbers[segment.valid]
