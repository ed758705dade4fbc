"""Policies from configs and from checkpoints: `hf.load`. It does not resume runs; the trainer does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holdfast.config import TrainConfig
from holdfast.distributed.ranks import pick_device
from holdfast.policies import own
from holdfast.policies.actor_critic import ActorCritic
from holdfast.policies.base import RecurrentPolicy
from holdfast.runs import checkpoint, space_data

NEEDED = {"config", "policy", "own_policy", "ppo", "collector", "rng", "update", "steps"}
"""What every checkpoint of a trainer has."""


def load(path_or_run: str | Path, policy: Any = None, device: str = "cpu") -> RecurrentPolicy:
    """The policy of a checkpoint or of a run's newest one, ready for use: weights and normalizer, fresh memory.

    A policy of your own is passed as an instance, which gets the weights, or as a class, a function or its name
    ("my_module:MyPolicy"), unless the run's config names it.
    """
    file, saved = read(path_or_run)
    if not isinstance(policy, RecurrentPolicy):
        if policy is None and not saved["own_policy"]:
            raise ValueError(
                f"{file} holds the weights of a policy of your own: pass it, hf.load(path, policy=MyPolicy()), or name it "
                "with --policy module:Name"
            )
        observation_space, action_space = spaces(saved)
        if observation_space is None:
            raise ValueError(
                f"{file} does not say what its policy observes: pass an instance, hf.load(path, policy=MyPolicy())"
            )
        config = TrainConfig.from_dict(saved["config"])
        if policy is None:
            policy = policy_from(config, observation_space, action_space)
        else:
            policy = own.build(policy, observation_space, action_space, config)
    policy.load_state_dict(saved["policy"])
    return policy.to(pick_device(str(device)))


def spaces(saved: dict[str, Any]) -> tuple[Any, Any]:
    """What the policy of a checkpoint sees and does: two gymnasium spaces, or None where it does not say."""
    found = (saved[name] for name in ("observation_space", "action_space"))
    observation_space, action_space = (None if data is None else space_data.from_data(data) for data in found)
    return observation_space, action_space


def read(path_or_run: str | Path) -> tuple[Path, dict[str, Any]]:
    """A trainer's checkpoint, or a run's newest one, and where it was."""
    file, saved = checkpoint.load_from(path_or_run)
    missing = sorted(NEEDED - saved.keys())
    if missing:
        raise checkpoint.CheckpointError(
            f"{file}: this checkpoint was not written by a trainer: it has no {', '.join(missing)}"
        )
    return file, saved


def policy_from(config: TrainConfig, observation_space: Any, action_space: Any) -> RecurrentPolicy:
    """The policy a config describes."""
    if config.policy is not None:
        return own.build(config.policy, observation_space, action_space, config)
    return ActorCritic(
        observation_space,
        action_space,
        None if config.core == "none" else config.core,
        config.hidden_size,
        config.critic_core,
        num_layers=config.num_layers,
        reset=config.reset,
        encoder_sizes=config.encoder_sizes,
        head_sizes=config.head_sizes,
        activation=config.activation,
        normalize_obs=config.normalize_obs,
        normalize_value=config.normalize_value,
        memory_span=config.memory_span,
        scale_actions=config.scale_actions,
        squash_actions=config.squash_actions,
        initial_std=config.initial_std,
    )
