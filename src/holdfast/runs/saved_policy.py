"""Policies from configs and from checkpoints: `hf.load`. It does not resume runs; the trainer does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holdfast.config import TrainConfig
from holdfast.distributed.ranks import pick_device
from holdfast.policies.actor_critic import ActorCritic
from holdfast.policies.base import RecurrentPolicy
from holdfast.runs import checkpoint, space_data

NEEDED = {"config", "policy", "own_policy", "ppo", "collector", "rng", "update", "steps"}
"""What every checkpoint of a trainer has."""


def load(path_or_run: str | Path, policy: RecurrentPolicy | None = None, device: str = "cpu") -> RecurrentPolicy:
    """The policy of a checkpoint or of a run's newest one, ready for use: weights and normalizer, fresh memory.

    A policy class of your own is passed as an instance, and gets the weights.
    """
    file, saved = read(path_or_run)
    if policy is None:
        if saved["observation_space"] is None or not saved["own_policy"]:
            raise ValueError(
                f"{file} holds the weights of a policy of your own: pass an instance, hf.load(path, policy=MyPolicy())"
            )
        config = TrainConfig.from_dict(saved["config"])
        spaces = (space_data.from_data(saved[name]) for name in ("observation_space", "action_space"))
        policy = policy_from(config, *spaces)
    policy.load_state_dict(saved["policy"])
    return policy.to(pick_device(str(device)))


def read(path_or_run: str | Path) -> tuple[Path, dict[str, Any]]:
    """A trainer's checkpoint, or a run's newest one, and where it was."""
    file, saved = checkpoint.load_from(path_or_run)
    missing = sorted(NEEDED - saved.keys())
    if missing:
        raise checkpoint.CheckpointError(
            f"{file}: this checkpoint was not written by a trainer: it has no {', '.join(missing)}"
        )
    return file, saved


def policy_from(config: TrainConfig, observation_space: Any, action_space: Any) -> ActorCritic:
    """The policy a config describes."""
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
        memory_span=config.memory_span,
    )
