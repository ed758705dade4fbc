"""`JaxEnv`: the four functions that an environment written in JAX must offer. Also its spaces and trees, seen from gymnasium.

class Corridor:
    def reset(self, key):
        return jnp.zeros(1), jnp.zeros((), jnp.int32)                       # observation, state
    def step(self, key, state, action):
        state = state + action
        return state[None] / 10.0, state, -0.1, state == 10, False          # ..., reward, terminated, truncated
    def observation_space(self):
        return gymnasium.spaces.Box(0.0, 1.0, (1,))
    def action_space(self):
        return gymnasium.spaces.Discrete(2)

holdfast.envs.from_jax(Corridor(), num_envs=1024)
"""

from __future__ import annotations

import inspect
import os
from typing import Any, Protocol

import gymnasium as gym
import numpy as np

Space = gym.Space[Any]
PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"


def keep_jax_from_preallocating() -> None:
    """JAX takes three quarters of the GPU's memory when it starts, unless this is set before. A setting of the user's stays."""
    os.environ.setdefault(PREALLOCATE, "false")


class JaxEnv(Protocol):
    """One environment: pure functions that JAX can trace. They are vectorized and compiled for you.

    A state is any pytree of arrays, the same from `reset` and `step`. `step` does not reset: the vector environment does.
    An optional fifth function `action_mask(state)` says which actions are allowed, as docs/environments.md describes.
    """

    def reset(self, key: Any) -> tuple[Any, Any]:
        """The first observation and the state of a new episode."""

    def step(self, key: Any, state: Any, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        """Observation, state, reward, terminated, truncated."""

    def observation_space(self) -> Space:
        """A gymnasium space. Observations that are trees have a Dict."""

    def action_space(self) -> Space:
        """Discrete, MultiDiscrete or Box."""


def is_jax_env(thing: Any) -> bool:
    """Whether this is an environment written in JAX: an object or class with the four functions, gymnax's or Brax's.

    gymnasium's and PettingZoo's `reset` need no argument; a JAX environment's takes a random key, and its `step` a key, a state
    and an action.
    """
    if isinstance(thing, (gym.Env, gym.vector.VectorEnv)) or not all(
        hasattr(thing, name) for name in ("reset", "step")
    ):
        return False
    try:
        reset, step = _by_position(thing.reset), _by_position(thing.step)
    except (TypeError, ValueError):
        return False
    if not reset:
        return False
    return reset[0].name in ("key", "rng", "rng_key") or (
        reset[0].default is inspect.Parameter.empty and len(step) >= 3
    )


def _by_position(function: Any) -> list[inspect.Parameter]:
    parameters = inspect.signature(function).parameters.values()
    return [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.name != "self"]


def ask_space(env: Any, name: str) -> Space:
    """`env.observation_space` or `env.action_space`, a function or a space, as a gymnasium space."""
    space = getattr(env, name, None)
    if space is None:
        raise TypeError(
            f"{type(env).__name__} has no {name}; an environment written in JAX has reset, step, observation_space and action_space"
        )
    return gym_space(space() if callable(space) and not isinstance(space, gym.Space) else space)


def gym_space(space: Any) -> Space:
    """gymnax's spaces, which many packages copy, as gymnasium's; those of gymnasium stay."""
    if isinstance(space, gym.Space):
        return space
    if hasattr(space, "n"):
        return gym.spaces.Discrete(int(space.n))
    if hasattr(space, "low"):
        shape, dtype = tuple(space.shape), np.dtype(space.dtype)
        low, high = (np.broadcast_to(np.asarray(bound, dtype), shape) for bound in (space.low, space.high))
        return gym.spaces.Box(low, high, shape, dtype.type)
    parts = getattr(space, "spaces", None)
    if isinstance(parts, dict):
        return gym.spaces.Dict({name: gym_space(part) for name, part in parts.items()})
    if isinstance(parts, (tuple, list)):
        return gym.spaces.Tuple([gym_space(part) for part in parts])
    raise TypeError(f"{space} is not a space; expected one of gymnasium's or gymnax's")


def flat_space(space: Space) -> Space:
    """Dict and Tuple spaces as one Dict without levels, named as `named_leaves` names observations."""
    from holdfast.policies.encoders import leaf_spaces

    parts = dict(leaf_spaces(space))
    return parts[""] if list(parts) == [""] else gym.spaces.Dict(parts)


def named_leaves(tree: Any) -> dict[str, Any]:
    """The arrays of a pytree by their path: {"player.health": ...}; "" for an array that is no tree."""
    from jax.tree_util import tree_flatten_with_path

    leaves, _ = tree_flatten_with_path(tree)
    return {".".join(_key(entry) for entry in path): leaf for path, leaf in leaves}


def _key(entry: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)
