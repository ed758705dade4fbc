"""How a policy learns. `base.py` says what a trainer needs of an algorithm; each algorithm is a page of its own."""

from __future__ import annotations

from typing import Any

from holdfast.algorithms.base import Algorithm
from holdfast.config import ALGORITHMS, RunConfig
from holdfast.named_objects import import_named, name_of
from holdfast.policies import user_policies
from holdfast.policies.base import RecurrentPolicy

NAMES = {
    "ppo": "holdfast.algorithms.ppo:PPO",
    "pqn": "holdfast.algorithms.pqn:PQN",
    "sac": "holdfast.algorithms.sac:SAC",
    "r2d2": "holdfast.algorithms.r2d2:R2D2",
}
"""The algorithms of ours, by the name that `--algorithm` takes."""


POLICIES = {
    "ActorCritic": ("holdfast.policies.actor_critic", "ppo"),
    "SoftActorCritic": ("holdfast.policies.soft_actor_critic", "sac"),
    "QNetwork": ("holdfast.policies.q_network", "pqn"),
}
"""The policies of ours that are described by their arguments, by class: the module, and the algorithm whose settings these are."""


def policy_kind(name: str) -> tuple[Any, type[RunConfig]] | None:
    """A policy class of ours by its name, and the config class that knows its arguments; None for other names."""
    if name not in POLICIES:
        return None
    module, algorithm = POLICIES[name]
    return import_named(f"{module}:{name}", kind="policy"), ALGORITHMS[algorithm]


def algorithm_class(name: str) -> type[Algorithm]:
    """The algorithm of a name: ours, or `module:Name`, whose module is imported."""
    found = import_named(NAMES.get(name, name), kind="algorithm")
    if not isinstance(found, type) or not issubclass(found, Algorithm):
        raise TypeError(f"algorithm {name!r} is no class based on hf.Algorithm")
    return found


def recorded_name(algorithm: type[Algorithm]) -> str:
    """What a run's config says about an algorithm that was passed to the trainer."""
    ours = {path: name for name, path in NAMES.items()}
    path = name_of(algorithm)
    return ours.get(path, path)


def make_policy(config: RunConfig, observation_space: Any, action_space: Any) -> RecurrentPolicy:
    """The policy that a config describes, or the class of the user's that it names."""
    if config.policy is not None:
        return user_policies.build(config.policy, observation_space, action_space, config)
    return algorithm_class(config.algorithm).make_policy(config, observation_space, action_space)
