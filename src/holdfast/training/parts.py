"""The parts of a run, built from its config: ranks, environments, policy, algorithm, collector. Nothing here trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from gymnasium.vector import AutoresetMode

from holdfast import algorithms
from holdfast.algorithms import auto_sizes
from holdfast.algorithms.base import Algorithm, RunContext, Task
from holdfast.config import RunConfig
from holdfast.distributed import ranks as distributed
from holdfast.distributed.ranks import Ranks
from holdfast.engines.choose import Engines
from holdfast.engines.cuda_graph import exclusive_gpu
from holdfast.envs.base import TorchVectorEnv
from holdfast.envs.jax.protocol import is_jax_env
from holdfast.envs.user_envs import can_be_made_again, is_vector_env, recorded_name, steps_all_at_once
from holdfast.named_objects import stands_for_object
from holdfast.policies import user_policies
from holdfast.policies.base import RecurrentPolicy
from holdfast.policies.encoders import encoder_lines
from holdfast.rollout.collector import Collector
from holdfast.rollout.vector_env import autoreset_mode, input_space
from holdfast.runs import rng_state
from holdfast.training.training_env import FailureLog, training_env


@dataclass
class Parts:
    """What a run consists of."""

    config: RunConfig  # with everything filled in that follows from the task
    chosen: str  # one line about sizes that were filled in, or ""
    for_actions: str  # one about what follows from the actions, or ""
    encoder: list[str]  # lines about how images are read and what is left out
    ranks: Ranks
    device: torch.device
    env_share: range  # which of all environments are in this process
    env_failures: FailureLog
    env: Any
    make_env: Callable[[int], Any] | None  # more of the same; None if the user passed an environment itself
    policy: RecurrentPolicy
    policy_from_config: bool
    algorithm: Algorithm
    collector: Collector
    engines: Engines


def with_own(config: RunConfig, env: Any, policy: Any) -> RunConfig:
    """The config of a run whose environment or policy was passed to the trainer: it says what the run really uses."""
    if env is not None:
        config = replace(config, env=recorded_name(env))
        if not can_be_made_again(env):  # it is already made
            config = config.without_env_options()
    if policy is not None:
        config = replace(config, policy=user_policies.recorded_name(policy))
    return config


def build(config: RunConfig, algorithm: type[Algorithm], env: Any, policy: Any, notify: Callable[[str], None]) -> Parts:
    """All parts. `env` and `policy` are the user's own, or None to make the config's."""
    ranks, device = distributed.join(config.device)
    distributed.require_equal_settings(ranks, config.shared_by_ranks())
    with exclusive_gpu(device):
        return _build(config, algorithm, env, policy, notify, ranks, device)


def task_of(config: RunConfig, device: torch.device, env: Any = None, ranks: int = 1) -> Task:
    """What the sizes of a run depend on. env: what the user passed, or None for the config's."""
    made = env is not None and is_vector_env(env)
    fast_env = isinstance(env, TorchVectorEnv) if made else steps_all_at_once(config.env) or is_jax_env(env)
    return Task(device.type == "cuda", fast_env, env.num_envs * ranks if made else None, ranks)


def with_sizes(config: RunConfig) -> RunConfig:
    """The config of one run with all sizes filled in, as the trainer fills them."""
    task = task_of(config, distributed.pick_device(config.device))
    return algorithms.algorithm_class(config.algorithm).choose_sizes(config, task)[0]


def _build(
    config: RunConfig,
    kind: type[Algorithm],
    env_given: Any,
    policy_given: Any,
    notify: Callable[[str], None],
    ranks: Ranks,
    device: torch.device,
) -> Parts:
    config, text = kind.choose_sizes(config, task_of(config, device, env_given, ranks.size))
    share = ranks.share(config.num_envs)
    config.require_envs_for(ranks.size)
    failures = FailureLog(config, ranks.rank, notify)
    if device.type == "cpu":
        torch.set_num_threads(config.threads or kind.choose_threads(config, len(share)))
    rng_state.seed(config.seed)  # every rank makes the same policy

    def make_env(num_envs: int) -> Any:
        return training_env(config, num_envs, device, failures, env_given)

    env = make_env(len(share))
    _require_copies(env, share, config, ranks)
    config, for_actions = auto_sizes.choose_for_actions(config, env.single_action_space)
    config = auto_sizes.choose_inputs(config, env, own_policy=policy_given is not None, usual=kind.inputs)
    failures.config = config  # whose folder is chosen when the run starts
    policy = _make_policy(config, env, policy_given)
    policy.to(device)
    engines = Engines(config, device, ranks)
    seed = ranks.seed(config.seed)
    algorithm = kind(
        policy,
        config,
        RunContext(
            ranks=ranks,
            device=device,
            seed=seed,
            engines=engines,
            num_envs=len(share),
            action_space=env.single_action_space,
            observation_space=_seen(env, config),
            plays_final_obs=autoreset_mode(env) == AutoresetMode.NEXT_STEP,
        ),
    )
    collector = engines.collector(env, policy, algorithm, seed)
    if not ranks.leads:
        rng_state.seed(seed)  # and acts with random numbers of its own
    return Parts(
        config=config,
        chosen=text,
        for_actions=for_actions,
        encoder=encoder_lines(policy, env.single_observation_space),
        ranks=ranks,
        device=device,
        env_share=share,
        env_failures=failures,
        env=env,
        make_env=make_env if env_given is None or can_be_made_again(env_given) else None,
        policy=policy,
        policy_from_config=policy_given is None or not stands_for_object(str(config.policy)),
        algorithm=algorithm,
        collector=collector,
        engines=engines,
    )


def _make_policy(config: RunConfig, env: Any, given: Any = None) -> RecurrentPolicy:
    """The policy that a config describes, or that the user passed, for the spaces of an environment."""
    if isinstance(given, RecurrentPolicy):
        return given
    seen = _seen(env, config)
    if given is not None:
        return user_policies.build(given, seen, env.single_action_space, config)
    return algorithms.make_policy(config, seen, env.single_action_space)


def _seen(env: Any, config: RunConfig) -> Any:
    """The space of what the policy sees."""
    return input_space(env.single_observation_space, env.single_action_space, config.inputs)


def _require_copies(env: Any, share: range, config: RunConfig, ranks: Ranks) -> None:
    if env.num_envs != len(share):
        of_this = f", {len(share)} of them for rank {ranks.rank}" if ranks.size > 1 else ""
        raise ValueError(
            f"the environment has {env.num_envs} copies, the config says num_envs={config.num_envs}{of_this}; "
            "set one to the other"
        )
