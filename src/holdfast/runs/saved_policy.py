"""Policies from configs and from checkpoints: `hf.load`. It does not resume runs; the trainer does."""

from __future__ import annotations

import functools
from collections.abc import Collection
from pathlib import Path
from typing import Any

from holdfast import algorithms, plain_checks
from holdfast.config import RunConfig, imports
from holdfast.distributed.ranks import pick_device
from holdfast.named_objects import is_import_name
from holdfast.policies import user_policies
from holdfast.policies.base import RecurrentPolicy
from holdfast.runs import checkpoint, pretrained, space_data

NEEDED = {"config", "policy", "own_policy", "collector", "rng", "update", "steps"}
"""What every checkpoint of a trainer has."""


def load(
    path_or_run: str | Path, policy: Any = None, device: str = "cpu", *, allow_imports: bool = False
) -> RecurrentPolicy:
    """The policy of a checkpoint or of a run's newest one, ready for use: weights and normalizer, fresh memory.

    Also of a folder that `hf.save_pretrained` wrote, and of "hub:user/name" or "hub:user/name@revision".
    Pass your own policy as an instance, which gets the weights, or as a class, a function or its name
    ("my_module:MyPolicy"), unless the run's config names it. allow_imports: import modules that the file names, which
    runs their code.
    """
    where = pick_device(str(device))
    shared = pretrained.find(path_or_run)
    if shared is not None:
        return pretrained.load(shared, policy, allow_imports=allow_imports).to(where)
    file, saved = read(path_or_run)
    loaded = _policy_of(file, saved, policy, allow_imports).to(where)
    loaded.trained_in = checkpoint.run_of(file)
    return loaded


def _policy_of(file: Path, saved: dict[str, Any], policy: Any, allow_imports: bool) -> RecurrentPolicy:
    if not isinstance(policy, RecurrentPolicy):
        if policy is None and not saved["own_policy"]:
            raise ValueError(
                f"{file} holds the weights of your own policy: pass it, hf.load(path, policy=MyPolicy()), or name it "
                "with --policy module:Name"
            )
        with checkpoint.refusals(file):
            observation_space, action_space = spaces(saved)
        if observation_space is None or action_space is None:
            kind = checkpoint.CheckpointError if policy is None else ValueError
            raise kind(
                f"{file} does not say what its policy observes: pass an instance, hf.load(path, policy=MyPolicy())"
            )
        config = settings(file, saved, allow_imports)
        if policy is None:
            imports.require_allowed(config, file, allow_imports, env=False, training=False)
            require_weights_of(config, file, saved)
            with checkpoint.refusals(file):
                policy = algorithms.make_policy(config, observation_space, action_space)
                policy.load_state_dict(saved["policy"])
                return policy
        policy = user_policies.build(policy, observation_space, action_space, config)
    _load_weights(policy, file, saved)
    return policy


def _load_weights(policy: RecurrentPolicy, file: Path, saved: dict[str, Any]) -> None:
    """Into a policy that the user chose, which may be another one than the run's."""
    try:
        policy.load_state_dict(saved["policy"])
    except RuntimeError as error:
        trained = ""
        if saved["own_policy"]:
            policy_name, core = (saved["config"].get(name) for name in ("policy", "core"))
            trained = f"; the run was trained with {policy_name or f'core {core}'}"
        text = " ".join(str(error).split())
        found = (text.partition(": ")[2] or text).partition(". ")[0]  # the first of what may be many
        raise ValueError(
            f"{file}: its weights do not fit the policy {type(policy).__name__}{trained} ({found[:200]})"
        ) from error


def spaces(saved: dict[str, Any]) -> tuple[Any, Any]:
    """What the policy of a checkpoint sees and does: two gymnasium spaces, or None where it does not say."""
    found = (saved.get(name) for name in ("observation_space", "action_space"))
    observation_space, action_space = (None if data is None else space_data.from_data(data) for data in found)
    return observation_space, action_space


def was_masked(saved: dict[str, Any]) -> bool:
    """Whether the environment of a checkpoint's run allowed only some of its actions."""
    collector = saved["collector"]
    feed = collector.get("feed") if isinstance(collector, dict) else None
    return isinstance(feed, dict) and feed.get("action_mask") is not None


def read(path_or_run: str | Path) -> tuple[Path, dict[str, Any]]:
    """A trainer's checkpoint, or a run's newest one, and where it was."""
    pretrained.require_run(path_or_run)
    file, saved = checkpoint.load_from(path_or_run)
    missing = sorted(NEEDED - saved.keys())
    if missing:
        raise checkpoint.CheckpointError(
            f"{file}: this checkpoint was not written by a trainer: it has no {', '.join(missing)}"
        )
    with checkpoint.refusals(file):
        plain_checks.mapping(saved["config"], "config")
        plain_checks.flag(saved["own_policy"], "own_policy")
    return file, saved


def settings(
    file: Path, saved: dict[str, Any], allow_imports: bool | Collection[str] = False, **overrides: Any
) -> RunConfig:
    """The config in a checkpoint, with some settings replaced. allow_imports: of an algorithm's module that the file names."""
    try:
        with checkpoint.refusals(file, "its config cannot be used"):
            RunConfig.from_dict(saved["config"], allow_imports)
    except checkpoint.CheckpointError as error:
        if isinstance(error.__cause__, imports.ImportNotAllowedError):
            raise imports.ImportNotAllowedError(f"{file}: {error.__cause__}") from error
        raise
    return RunConfig.from_dict({**saved["config"], **overrides}, allow_imports)


def require_weights_of(config: RunConfig, file: Path, saved: dict[str, Any]) -> None:
    """Refuse a file whose weights are not those of its config, before a policy of that size takes up memory.

    Policies, cores and encoders of the user's own are left alone: their code may do anything when it is called.
    """
    if config.policy is not None or any(map(is_import_name, (str(config.core), config.encoder, config.algorithm))):
        return
    with checkpoint.refusals(file):
        make = functools.partial(algorithms.make_policy, config, *spaces(saved))
        pretrained.require_sizes(saved["policy"], config.num_layers, make)
