"""PPO without a trainer, for tests: `ppo, engines = make_ppo(policy, config)`, `update(ppo, segment)`, `terms_of(policy, segment)`."""

from __future__ import annotations

from typing import Any

import holdfast as hf
from holdfast.algorithms.auto_sizes import choose_for_actions
from holdfast.algorithms.base import Progress, RunContext
from holdfast.algorithms.ppo import PPO, ClippedLoss, LossSettings, PPOTerms
from holdfast.distributed.ranks import ALONE, Ranks
from holdfast.engines.choose import Engines


def make_ppo(policy: hf.RecurrentPolicy, config: hf.PPOConfig, ranks: Ranks = ALONE) -> tuple[PPO, Engines]:
    device = next(policy.parameters()).device
    engines = Engines(config, device, ranks)
    space = getattr(policy, "action_space", None)
    return PPO(policy, config, RunContext(ranks, device, ranks.seed(config.seed), engines, 1, space)), engines


def update(ppo: PPO, segment: hf.Segment, fraction: float = 0.0) -> dict[str, float]:
    """One update at a fraction of the run; its metrics."""
    return ppo.start_update(segment, Progress(0, 1000, round(1000 * fraction), 1000, fraction))()


def terms_of(
    policy: hf.RecurrentPolicy, segment: hf.Segment, settings: LossSettings | None = None, **options: Any
) -> PPOTerms:
    """The loss of a policy on a segment as it is. options: fields of the settings."""
    loss = ClippedLoss(settings or LossSettings(**options), policy.value_scale)
    output = policy.unroll(segment.obs, segment.start_state, segment.resets, action_mask=segment.action_mask)
    return PPOTerms(**loss(output, segment))


def settings_of(config: hf.PPOConfig) -> LossSettings:
    config, _ = choose_for_actions(config, None)
    return LossSettings(config.clip_range, config.clip_value, config.entropy_coef, config.value_coef)
