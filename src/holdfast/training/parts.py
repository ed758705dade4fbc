"""The parts of a run, built from its config: ranks, environments, policy, collector, PPO. Nothing here trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.algorithms.ppo import PPO
from holdfast.config import TrainConfig
from holdfast.distributed import ranks as distributed
from holdfast.distributed.ranks import Ranks
from holdfast.engines import choose
from holdfast.engines.cuda_graph import gpu_turn
from holdfast.policies.actor_critic import ActorCritic
from holdfast.policies.base import RecurrentPolicy
from holdfast.rollout.collector import Collector
from holdfast.rollout.env_failures import FailureLog, training_env
from holdfast.rollout.reward_scale import RewardScale
from holdfast.rollout.vector_env import input_space
from holdfast.runs import rng_state, saved_policy


@dataclass
class Parts:
    """What a run consists of."""

    ranks: Ranks
    device: torch.device
    env_share: range  # which of all environments are in this process
    env_failures: FailureLog
    env: Any
    env_from_config: bool
    policy: RecurrentPolicy
    policy_from_config: bool
    collector: Collector
    ppo: PPO
    reward_scale: RewardScale | None
    rollout_choice: choose.Choice
    update_engines: choose.UpdateEngines


def build(config: TrainConfig, env: Any, policy: RecurrentPolicy | None, notify: Callable[[str], None]) -> Parts:
    """All parts. `env` and `policy` are the user's own, or None to make the config's."""
    ranks, device = distributed.join(config.device)
    distributed.require_equal_settings(ranks, config.shared_by_ranks())
    with gpu_turn(device):
        return _build(config, env, policy, notify, ranks, device)


def _build(
    config: TrainConfig,
    own_env: Any,
    own_policy: RecurrentPolicy | None,
    notify: Callable[[str], None],
    ranks: Ranks,
    device: torch.device,
) -> Parts:
    share = ranks.share(config.num_envs)
    config.require_envs_for(ranks.size)
    failures = FailureLog(config, ranks.rank, notify)
    if device.type == "cpu":
        torch.set_num_threads(config.threads or _threads_for(config, len(share)))
    rng_state.seed(config.seed)  # every rank makes the same policy
    env = training_env(config, len(share), device, failures) if own_env is None else own_env
    _require_copies(env, share, config, ranks)
    policy = make_policy(config, env) if own_policy is None else own_policy
    policy.to(device)
    collector, rollout_choice = choose.make_collector(env, policy, config, device, ranks.seed(config.seed))
    if not ranks.leads:
        rng_state.seed(ranks.seed(config.seed))  # and acts with random numbers of its own
    ppo, engines = choose.make_ppo(
        policy,
        config,
        ranks,
        some_unused=own_policy is not None or config.reset == "learned",
        capturable=rollout_choice.engine == choose.GRAPH,
    )
    return Parts(
        ranks=ranks,
        device=device,
        env_share=share,
        env_failures=failures,
        env=env,
        env_from_config=own_env is None,
        policy=policy,
        policy_from_config=own_policy is None,
        collector=collector,
        ppo=ppo,
        reward_scale=RewardScale(len(share), config.gamma, device) if config.normalize_reward else None,
        rollout_choice=rollout_choice,
        update_engines=engines,
    )


def make_policy(config: TrainConfig, env: Any) -> ActorCritic:
    """The policy that a config describes, for the spaces of an environment."""
    seen = input_space(env.single_observation_space, env.single_action_space, config.inputs)
    return saved_policy.policy_from(config, seen, env.single_action_space)


def _require_copies(env: Any, share: range, config: TrainConfig, ranks: Ranks) -> None:
    if env.num_envs != len(share):
        of_this = f", {len(share)} of them for rank {ranks.rank}" if ranks.size > 1 else ""
        raise ValueError(
            f"the environment has {env.num_envs} copies, the config says num_envs={config.num_envs}{of_this}"
        )


def _threads_for(config: TrainConfig, num_envs: int) -> int:
    """One thread for small networks and minibatches, where handing work around costs more than it saves."""
    steps = num_envs * config.num_steps // config.minibatches
    work = steps * config.hidden_size**2  # multiplications of a recurrent product per minibatch, up to a constant
    return 1 if work < 2**28 else torch.get_num_threads()
