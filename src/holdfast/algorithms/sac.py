"""Soft actor-critic (Haarnoja et al., 2018) with memory: the best return and the most random actions that reach it.

    target[t]    = r[t] + gamma * (min Q'(t+1, a') - alpha * log pi(a'))            # 0 after a terminal step; a' ~ pi(t+1)
    critics      : (Q(t, a[t]) - target[t]) ** 2
    actor        : alpha * log pi(a) - min Q(t, a)                                  # a ~ pi(t)
    temperature  : alpha grows where pi is less random than the target entropy, and falls elsewhere

Q' is a slow copy of the critics. Everything is computed on whole sequences [T, S] with resets inside: one pass of the actor's memory,
one of the critics', one of the target's. Row t + 1 is the successor of row t; the buffer sees to it that a truncated episode has its
final observation there. Discrete actions need no samples: expectations are exact (Christodoulou, 2019).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from holdfast import plain_checks as check
from holdfast.algorithms.base import RunContext
from holdfast.algorithms.off_policy import OffPolicy, mean_over, move_target, target_copy
from holdfast.algorithms.optimizers import Groups, groups_of
from holdfast.config import SACConfig
from holdfast.distributed.metrics import Metric
from holdfast.policies.base import RecurrentPolicy, autocast, autocast_dtype
from holdfast.policies.heads import Categorical, SquashedGaussian
from holdfast.policies.soft_actor_critic import SoftActorCritic, SoftCritic
from holdfast.rollout.segment import Segment

DISCRETE_ENTROPY = 0.89
"""The target entropy of discrete actions, as a part of the largest possible."""


class Losses(NamedTuple):
    """Scalars; `targets` [T - 1, S] for tests."""

    critic: Tensor
    actor: Tensor
    temperature: Tensor
    entropy: Tensor
    q: Tensor
    targets: Tensor
    auxiliary: Any = None  # `auxiliary_terms`


class SAC(OffPolicy):
    """The losses, and what is trained by them."""

    name = "sac"
    Config = SACConfig
    terms = ("critic_loss", "actor_loss", "temperature", "entropy", "q_mean")
    metrics = (
        Metric("train/critic_loss", "critic loss", short="critic loss"),
        Metric("train/actor_loss", "actor loss"),
        Metric("train/q_mean", "mean q", short="q"),
        Metric("train/entropy", "entropy", short="entropy"),
        Metric("train/temperature", "temperature", short="temperature", digits=4),
        *OffPolicy.metrics,
    )

    def __init__(self, policy: RecurrentPolicy, config: Any, run: RunContext) -> None:
        if not hasattr(policy, "q"):
            raise TypeError(
                f"SAC needs the values of actions: write q(self, features, actions) in {type(policy).__name__}, [critics, N]"
            )
        log_alpha = torch.tensor(math.log(config.initial_temperature), device=run.device)
        self.log_alpha = nn.Parameter(log_alpha, requires_grad=config.learn_temperature)
        super().__init__(policy, config, run)

    @classmethod
    def make_policy(cls, config: SACConfig, observation_space: Any, action_space: Any) -> SoftActorCritic:
        return SoftActorCritic.of_config(config, observation_space, action_space)

    @classmethod
    def advice(cls, config: SACConfig) -> str:
        if config.update_ratio < 1:
            return "Try more gradient steps: --update-ratio 1."
        return super().advice(config)

    # --- what is trained ----------------------------------------------------------------------------------------------

    def critics(self) -> Any:
        """The part of the policy that targets are computed with."""
        return self.policy.critic_only() if isinstance(self.policy, SoftActorCritic) else self.policy

    def make_target(self) -> nn.Module:
        return target_copy(self.critics())

    def groups(self) -> list[Groups]:
        """The critics', the actor's, the temperature's. All that a policy of your own has counts as the critics'."""
        config, policy = self.config, self.policy
        rates = [config.critic_learning_rate, config.actor_learning_rate, config.temperature_learning_rate]
        critic, actor, temperature = (config.learning_rate if rate is None else rate for rate in rates)
        of_actor = policy.actor_parameters() if isinstance(policy, SoftActorCritic) else []
        of_actor_ids = {id(p) for p in of_actor}
        of_critics = [p for p in policy.parameters() if id(p) not in of_actor_ids]
        groups = [groups_of(part, policy.core, r, config) for part, r in ((of_critics, critic), (of_actor, actor))]
        if config.learn_temperature:
            groups.append([{"params": [self.log_alpha], "lr": temperature}])
        return [group for group in groups if group]

    # --- a gradient step ----------------------------------------------------------------------------------------------

    def learn(self, batch: Segment) -> dict[str, Tensor]:
        with autocast(batch.resets.device, autocast_dtype(self.config.precision)):
            losses = self.losses(batch)
        added = losses.auxiliary
        found = self.step(losses.critic + losses.actor + losses.temperature + added.pop("loss"))
        move_target(self.target, self.critics(), self.config.tau)
        return {
            "critic_loss": losses.critic.detach(),
            "actor_loss": losses.actor.detach(),
            "temperature": self.log_alpha.detach().exp(),
            "entropy": losses.entropy.detach(),
            "q_mean": losses.q.detach(),
            **added,
            **found,
        }

    def losses(self, batch: Segment) -> Losses:
        """What a batch [burn_in + T, S] says; the loss of each part has gradients for that part alone."""
        policy: Any = self.policy
        rows, start = self.after_burn_in(batch, policy, batch.start_state)
        features, state = policy.features(rows.obs, start, rows.resets)  # [T * S, ...]
        own_critic = getattr(policy, "has_own_critic", False)
        mask = () if rows.action_mask is None else (rows.action_mask.flatten(0, 1),)
        dist, _ = policy.decode(features if own_critic else features.detach(), *mask)
        if isinstance(dist, Categorical):
            losses = self.discrete_losses(batch, rows, features, dist)
        else:
            losses = self.box_losses(batch, rows, features, dist)
        return losses._replace(auxiliary=self.auxiliary_terms(features, dist, state, rows))

    def box_losses(self, batch: Segment, rows: Segment, features: Tensor, dist: Any) -> Losses:
        S, policy, target = rows.num_envs, *self.networks()
        alpha = self.log_alpha.detach().exp()
        action, log_prob = sampled(dist)
        with torch.no_grad():
            after = self.smallest(target.q(self.target_features(batch)[S:], action[S:]))
            targets = self.targets(rows, after - alpha * log_prob[S:])
        now = rows.steps(0, rows.num_steps - 1)
        q_now = policy.q(features[:-S], now.actions.flatten(0, 1))
        critic_loss, q = self.critic_loss(q_now, targets, now)

        # The actor climbs Q along its slope by the action. Weights of the critics need no gradients for that.
        mine, log_prob = action[:-S], log_prob[:-S].view_as(targets)
        free = mine.detach().requires_grad_()
        value = self.smallest(policy.q(features[:-S].detach(), free))
        (slope,) = torch.autograd.grad(value.sum(), free)
        climbed = (slope * mine).view(*targets.shape, -1).sum(-1)
        level = (value.detach().view_as(targets) - climbed).detach()  # so that the number logged is the loss
        actor_loss = mean_over(now.valid, alpha * log_prob - climbed - level)

        wanted = -float(mine[0].numel()) if self.config.target_entropy is None else self.config.target_entropy
        entropy = -mean_over(now.valid, log_prob.detach())
        return Losses(critic_loss, actor_loss, self.log_alpha.exp() * (entropy - wanted), entropy, q, targets)

    def discrete_losses(self, batch: Segment, rows: Segment, features: Tensor, dist: Categorical) -> Losses:
        S, policy, target = rows.num_envs, *self.networks()
        alpha = self.log_alpha.detach().exp()
        p = dist.log_probs.exp()
        log_p = dist.log_probs if dist.mask is None else dist.log_probs.masked_fill(~dist.mask, 0.0)  # p is 0 there
        with torch.no_grad():
            after = self.smallest(target.q(self.target_features(batch)[S:]))
            targets = self.targets(rows, (p[S:] * (after - alpha * log_p[S:])).sum(-1))
        now = rows.steps(0, rows.num_steps - 1)
        q_all = policy.q(features[:-S])  # [critics, N, n]
        index = (now.actions.flatten(0, 1) - dist.start).long().view(1, -1, 1).expand(len(q_all), -1, 1)
        critic_loss, q = self.critic_loss(q_all.gather(-1, index).squeeze(-1), targets, now)

        value = self.smallest(q_all.detach())
        actor_loss = mean_over(now.valid, (p[:-S] * (alpha * log_p[:-S] - value)).sum(-1).view_as(targets))

        entropies = -(p * log_p).sum(-1)[:-S].detach().view_as(targets)
        allowed = torch.full_like(p[:, 0], p.shape[1]) if dist.mask is None else dist.mask.sum(-1)
        allowed = allowed[:-S].view_as(targets)
        wanted = (
            DISCRETE_ENTROPY * allowed.float().log()
            if self.config.target_entropy is None
            else self.config.target_entropy
        )
        apart = mean_over(now.valid & (allowed > 1), entropies - wanted)  # a single choice cannot be random
        return Losses(
            critic_loss, actor_loss, self.log_alpha.exp() * apart, mean_over(now.valid, entropies), q, targets
        )

    # --- parts of it --------------------------------------------------------------------------------------------------

    def networks(self) -> tuple[Any, Any]:
        """The policy and the target network; both have `features` and `q`."""
        return self.policy, self.target

    @torch.no_grad()
    def target_features(self, batch: Segment) -> Tensor:
        """What the target network remembers, by its own weights, [T * S, ...]."""
        target: Any = self.target
        start = batch.start_state["critic"] if isinstance(target, SoftCritic) else batch.start_state
        rows, start = self.after_burn_in(batch, target, start)
        return target.features(rows.obs, start, rows.resets)[0]

    def targets(self, rows: Segment, after: Tensor) -> Tensor:
        """[T - 1, S], from the soft values [(T - 1) * S] of the rows after the first."""
        now = rows.steps(0, rows.num_steps - 1)
        return now.rewards * self.reward_factor + self.config.gamma * torch.where(
            now.terminated, 0.0, after.view_as(now.rewards)
        )

    def critic_loss(self, q: Tensor, targets: Tensor, now: Segment) -> tuple[Tensor, Tensor]:
        """Of all critics [critics, N], and their mean."""
        q = q.view(-1, *targets.shape)
        errors = torch.where(now.valid, q - targets, 0.0)
        return 0.5 * (errors**2).sum() / now.valid.sum().clamp(min=1), mean_over(now.valid, q.detach().mean(0))

    def smallest(self, q: Tensor) -> Tensor:
        """Over the critics, or over some of them drawn now."""
        few = self.config.target_critics
        if len(q) > few:
            q = q.index_select(0, torch.rand(len(q), device=q.device).topk(few).indices)
        return q.amin(0)

    # --- saving -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "log_alpha": self.log_alpha.item()}

    def load_state_dict(self, d: dict[str, Any]) -> None:
        super().load_state_dict(d)
        self.log_alpha.data.fill_(d["log_alpha"])

    def check(self, d: dict[str, Any]) -> None:
        super().check(d)
        check.number(d.get("log_alpha"), "sac log_alpha", -100, 100)


def sampled(dist: Any) -> tuple[Tensor, Tensor]:
    """Actions with gradients and their log-probabilities, those of a `SquashedGaussian` in units of its bounds."""
    if isinstance(dist, SquashedGaussian):
        action, log_prob = dist.rsample()
        return action, log_prob + dist.half_range.log().expand_as(dist.mean[0]).sum().to(log_prob.dtype)
    if not getattr(dist, "has_rsample", False):
        raise TypeError(
            f"SAC needs gradients through actions: let decode return a distribution with rsample, or hf.heads.Categorical for discrete "
            f"actions, not a {type(dist).__name__}"
        )
    action = dist.rsample()
    return action, dist.log_prob(action)
