"""R2D2 (Kapturowski et al., 2019): Q-learning with memory from prioritized sequences that begin with the state that was played.

    target[t] = h( r[t] + gamma r[t+1] + ... + gamma^n h^-1( Q'(t+n, argmax Q(t+n)) ) )

n-step double Q-learning: the online network chooses the action, the target network values it. h compresses large values, so that
rewards of any size can be learned. An n-step sum ends earlier where an episode ends (a truncated one at its final observation), at
the last row of a sequence, and before an action that the online network would not choose (Watkins's cut, which the paper does
without): what random actions cost later says nothing about this one. Each environment explores with an epsilon of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from holdfast.algorithms.base import RunContext
from holdfast.algorithms.off_policy import OffPolicy, mean_over, move_target, target_copy
from holdfast.config import R2D2Config
from holdfast.distributed.metrics import Metric
from holdfast.policies.base import RecurrentPolicy, autocast, autocast_dtype, merge_time
from holdfast.policies.q_network import QNetwork
from holdfast.rollout.exploration import EpsilonNoise
from holdfast.rollout.segment import Segment

RESCALE_EPSILON = 1e-3
"""Keeps the slope of `rescaled` away from 0, so that it can be inverted."""
LARGEST_ERROR = 0.9
"""Part of a sequence's largest error in its priority; the rest is its mean error."""


def rescaled(x: Tensor) -> Tensor:
    """h(x) = sign(x) (sqrt(|x| + 1) - 1) + eps x.

    >>> rescaled(torch.tensor([0.0, 3.0, -8.0]))
    tensor([ 0.0000,  1.0030, -2.0080])
    """
    return x.sign() * ((x.abs() + 1).sqrt() - 1) + RESCALE_EPSILON * x


def unscaled(x: Tensor) -> Tensor:
    """The inverse of `rescaled`, in double precision: its terms nearly cancel."""
    y, eps = x.double(), RESCALE_EPSILON
    root = ((1 + 4 * eps * (y.abs() + 1 + eps)).sqrt() - 1) / (2 * eps)
    return (y.sign() * (root**2 - 1)).to(x.dtype)


def n_step_returns(rows: Segment, value: Tensor, greedy: Tensor, n: int, gamma: float) -> Tensor:
    """Discounted sums of up to n rewards and the value after them, [T - 1, S]. value [T, S]: of each row, if the best action is played;
    greedy [T, S]: whether it was.

    A row that was not played, such as the final observation of a truncated episode, is worth its value, and sums end there.
    """
    now, sums = rows.steps(0, rows.num_steps - 1), value
    for _ in range(n):
        after = torch.where(now.terminated, 0.0, torch.where(greedy[1:], sums[1:], value[1:]))
        played = now.rewards + gamma * after
        sums = torch.cat([torch.where(now.valid, played, value[:-1]), value[-1:]])
    return sums[:-1]


class R2D2(OffPolicy):
    """The loss, priorities, and exploration."""

    name = "r2d2"
    explores_with = "epsilon-greedy actions"
    Config = R2D2Config
    terms = ("q_loss", "q_mean", "error")
    metrics = (
        Metric("train/q_loss", "q loss", short="q loss", digits=4),
        Metric("train/q_mean", "mean q", short="q"),
        Metric("train/error", "mean error"),
        *OffPolicy.metrics,
    )

    def __init__(self, policy: RecurrentPolicy, config: Any, run: RunContext) -> None:
        super().__init__(policy, config, run)
        self.target_age = torch.zeros((), dtype=torch.int64, device=run.device)  # in gradient steps

    @classmethod
    def make_policy(cls, config: R2D2Config, observation_space: Any, action_space: Any) -> QNetwork:
        return QNetwork.of_config(config, observation_space, action_space)

    def make_target(self) -> RecurrentPolicy:
        return target_copy(self.policy)

    def make_noise(self, num_envs: int) -> EpsilonNoise:
        noise = EpsilonNoise(num_envs, int(self.run.action_space.n), self.run.device)
        noise.epsilon.copy_(torch.tensor(self.epsilons()))
        return noise

    def epsilons(self) -> list[float]:
        """Of the environments of this process; environments of all ranks are numbered through."""
        config, last = self.config, max(1, self.config.num_envs - 1)
        share = self.run.ranks.share(config.num_envs)
        return [config.epsilon ** (1 + i / last * config.epsilon_spread) for i in share]

    # --- a gradient step ----------------------------------------------------------------------------------------------

    def learn(self, batch: Segment) -> dict[str, Tensor]:
        with autocast(batch.resets.device, autocast_dtype(self.config.precision)):
            errors, valid, q, added = self.errors(batch)
        loss = 0.5 * mean_over(valid, errors**2)
        found = self.step(loss + added.pop("loss"))
        size = errors.detach().abs()
        if self.config.prioritized:
            self.buffer.update_priorities(batch.index, priorities(size, valid))
        self.target_age.add_(1).remainder_(self.config.target_every)
        move_target(self.target, self.policy, (self.target_age == 0).float())  # copies it, or does nothing
        return {
            "q_loss": loss.detach(),
            "q_mean": mean_over(valid, q),
            "error": mean_over(valid, size),
            **added,
            **found,
        }

    def errors(self, batch: Segment) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """Q of the actions that were played minus its target, which rows count, and Q, each [T - 1, S]; `auxiliary_terms`."""
        rows, start = self.after_burn_in(batch, self.policy, batch.start_state)
        T, S = rows.resets.shape
        features, output = self.policy.unroll_with_features(rows.obs, start, rows.resets, action_mask=rows.action_mask)
        dist = output.dist
        if not hasattr(dist, "of"):
            raise TypeError(
                f"R2D2 needs values of actions: let decode return hf.heads.Greedy(q), not a {type(dist).__name__}"
            )
        now = rows.steps(0, T - 1)
        with torch.no_grad():
            targets = self.targets(batch, dist.mode)
        q = dist.of(merge_time(rows.actions, T, S, "actions")).view(T, S)[:-1].float()
        return (
            torch.where(now.valid, q - targets, 0.0),
            now.valid,
            q.detach(),
            self.auxiliary_terms(features, dist, output.state, rows),
        )

    def targets(self, batch: Segment, best: Tensor) -> Tensor:
        """[T - 1, S]. best [T * S]: the actions that the online network prefers."""
        target: Any = self.target
        rows, start = self.after_burn_in(batch, target, batch.start_state)
        dist = target.unroll(rows.obs, start, rows.resets, action_mask=rows.action_mask).dist
        value = dist.of(best).view(rows.resets.shape).float()
        greedy = best.view(rows.resets.shape) == rows.actions
        rows = rows.changed(rewards=rows.rewards * self.reward_factor)
        if not self.config.rescale:
            return n_step_returns(rows, value, greedy, self.config.n_step, self.config.gamma)
        return rescaled(n_step_returns(rows, unscaled(value), greedy, self.config.n_step, self.config.gamma))

    def load_state_dict(self, d: dict[str, Any]) -> None:
        super().load_state_dict(d)
        self.target_age.fill_(self.gradient_steps % self.config.target_every)


def priorities(errors: Tensor, valid: Tensor) -> Tensor:
    """Of each sequence, [S], from the sizes of its errors [T, S], which are 0 where no step was played."""
    mean = errors.sum(0) / valid.sum(0).clamp(min=1)
    return LARGEST_ERROR * errors.amax(0) + (1 - LARGEST_ERROR) * mean
