"""The parts of a run, built from its config: ranks, environments, policy, collector, PPO. Nothing here trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from holdfast.algorithms.ppo import PPO
from holdfast.config import TrainConfig
from holdfast.distributed import ranks as distributed
from holdfast.distributed.ranks import Ranks
from holdfast.engines import choose
from holdfast.engines.cuda_graph import gpu_turn
from holdfast.envs.base import TorchVectorEnv
from holdfast.envs.jax.protocol import is_jax_env
from holdfast.envs.own import can_be_made_again, is_vector_env, recorded_name, steps_all_at_once
from holdfast.named_objects import stands_for_object
from holdfast.policies import own as own_policy
from holdfast.policies.actor_critic import ActorCritic
from holdfast.policies.base import RecurrentPolicy
from holdfast.rollout.collector import Collector
from holdfast.rollout.env_failures import FailureLog, training_env
from holdfast.rollout.reward_scale import RewardScale
from holdfast.rollout.vector_env import input_space
from holdfast.runs import rng_state, saved_policy
from holdfast.training import chosen


@dataclass
class Parts:
    """What a run consists of."""

    config: TrainConfig  # with everything filled in that follows from the task
    chosen: str  # one line about what was filled in, or ""
    ranks: Ranks
    device: torch.device
    env_share: range  # which of all environments are in this process
    env_failures: FailureLog
    env: Any
    make_env: Callable[[int], Any] | None  # more of the same; None if the user passed an environment itself
    policy: RecurrentPolicy
    policy_from_config: bool
    collector: Collector
    ppo: PPO
    reward_scale: RewardScale | None
    rollout_choice: choose.Choice
    update_engines: choose.UpdateEngines


def with_own(config: TrainConfig, env: Any, policy: Any) -> TrainConfig:
    """The config of a run whose environment or policy was passed to the trainer: it says what the run really uses."""
    if env is not None:
        config = replace(config, env=recorded_name(env))
        if not can_be_made_again(env):  # it is already made
            config = replace(config, env_kwargs={}, mask_velocity=False)
    if policy is not None:
        config = replace(config, policy=own_policy.recorded_name(policy))
    return config


def build(config: TrainConfig, env: Any, policy: Any, notify: Callable[[str], None]) -> Parts:
    """All parts. `env` and `policy` are the user's own, or None to make the config's."""
    ranks, device = distributed.join(config.device)
    distributed.require_equal_settings(ranks, config.shared_by_ranks())
    with gpu_turn(device):
        return _build(config, env, policy, notify, ranks, device)


def _build(
    config: TrainConfig,
    env_given: Any,
    policy_given: Any,
    notify: Callable[[str], None],
    ranks: Ranks,
    device: torch.device,
) -> Parts:
    config, text = chosen.choose_sizes(config, _task(config, env_given, ranks, device))
    share = ranks.share(config.num_envs)
    config.require_envs_for(ranks.size)
    failures = FailureLog(config, ranks.rank, notify)
    if device.type == "cpu":
        torch.set_num_threads(config.threads or threads_for(config, len(share)))
    rng_state.seed(config.seed)  # every rank makes the same policy

    def make_env(num_envs: int) -> Any:
        return training_env(config, num_envs, device, failures, env_given)

    env = make_env(len(share))
    _require_copies(env, share, config, ranks)
    config = chosen.choose_inputs(config, env, own_policy=policy_given is not None)
    policy = make_policy(config, env, policy_given)
    policy.to(device)
    collector, rollout_choice = choose.make_collector(env, policy, config, device, ranks.seed(config.seed))
    if not ranks.leads:
        rng_state.seed(ranks.seed(config.seed))  # and acts with random numbers of its own
    ppo, engines = choose.make_ppo(
        policy,
        config,
        ranks,
        some_unused=not isinstance(policy, ActorCritic) or policy_given is not None or config.reset == "learned",
        capturable=rollout_choice.engine == choose.GRAPH,
    )
    return Parts(
        config=config,
        chosen=text,
        ranks=ranks,
        device=device,
        env_share=share,
        env_failures=failures,
        env=env,
        make_env=make_env if env_given is None or can_be_made_again(env_given) else None,
        policy=policy,
        policy_from_config=policy_given is None or not stands_for_object(str(config.policy)),
        collector=collector,
        ppo=ppo,
        reward_scale=RewardScale(len(share), config.gamma, device) if _scales_rewards(config, policy) else None,
        rollout_choice=rollout_choice,
        update_engines=engines,
    )


def _task(config: TrainConfig, env: Any, ranks: Ranks, device: torch.device) -> chosen.Task:
    """What the sizes of rollouts depend on."""
    made = env is not None and is_vector_env(env)
    fast_env = isinstance(env, TorchVectorEnv) if made else steps_all_at_once(config.env) or is_jax_env(env)
    return chosen.Task(device.type == "cuda", fast_env, env.num_envs * ranks.size if made else None, ranks.size)


def _scales_rewards(config: TrainConfig, policy: RecurrentPolicy) -> bool:
    """A critic that cannot learn normalized values gets smaller rewards instead."""
    return config.normalize_reward or (config.normalize_value and policy.value_scale is None)


def make_policy(config: TrainConfig, env: Any, given: Any = None) -> RecurrentPolicy:
    """The policy that a config describes, or that the user passed, for the spaces of an environment."""
    if isinstance(given, RecurrentPolicy):
        return given
    seen = input_space(env.single_observation_space, env.single_action_space, config.inputs)
    if given is not None:
        return own_policy.build(given, seen, env.single_action_space, config)
    return saved_policy.policy_from(config, seen, env.single_action_space)


def _require_copies(env: Any, share: range, config: TrainConfig, ranks: Ranks) -> None:
    if env.num_envs != len(share):
        of_this = f", {len(share)} of them for rank {ranks.rank}" if ranks.size > 1 else ""
        raise ValueError(
            f"the environment has {env.num_envs} copies, the config says num_envs={config.num_envs}{of_this}; "
            "set one to the other"
        )


def threads_for(config: TrainConfig, num_envs: int) -> int:
    """One thread for small networks and minibatches, where handing work around costs more than it saves."""
    steps = num_envs * config.num_steps // config.minibatches
    work = steps * config.hidden_size**2  # multiplications of a recurrent product per minibatch, up to a constant
    return 1 if work < 2**28 else torch.get_num_threads()
