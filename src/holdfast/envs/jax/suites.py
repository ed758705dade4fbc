"""Environments of JAX packages by name: `gymnax:CartPole-v1`, `craftax:Craftax-Symbolic-v1`, `popgym-arcade:...`, `brax:ant`.

Each becomes a `JaxEnv`. Their own autoreset is not used: it makes a new world for every row at every step. An episode that ends
only because its time is over is truncated, any other end is a termination. POPGym Arcade says which it is.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Any

import gymnasium as gym
import numpy as np

from holdfast.envs.jax.protocol import Space, gym_space
from holdfast.envs.jax.tensors import import_jax

NEVER = 2**30  # steps, more than any episode has
LIMITS = ("max_steps_in_episode", "max_timesteps")  # what gymnax and what Craftax call the time limit
WORLDS_PLAYED, STEPS_PLAYED = 8, 16  # to see what the observations are

CRAFTAX = ("Craftax-Symbolic-v1", "Craftax-Pixels-v1", "Craftax-Classic-Symbolic-v1", "Craftax-Classic-Pixels-v1")

BRAX = ("ant", "fast", "halfcheetah", "hopper", "humanoid", "humanoidstandup", "inverted_double_pendulum", "inverted_pendulum",
        "pusher", "reacher", "swimmer", "walker2d")  # fmt: skip


# --- by name ----------------------------------------------------------------------------------------------------------


def find(env_id: str) -> Callable[..., Any]:
    """What makes the vector environment of `suite:Name`; a ValueError that names the most similar ids if there is none."""
    suite, _, name = env_id.partition(":")
    import_jax(suite)
    module = _import(env_id, suite)
    known = _names(suite, module)
    wanted = {one.lower(): one for one in known} | {one.lower().removesuffix("-v1"): one for one in known}
    if name.lower() not in wanted:
        likely = get_close_matches(name.lower(), list(wanted), 3, cutoff=0.5)
        found = list(dict.fromkeys(f"{suite}:{wanted[one]}" for one in likely))
        hint = f"did you mean {' or '.join(found)}?" if found else f"it has {', '.join(known)}"
        raise ValueError(f"{suite} has no environment {name!r}; {hint}")
    return _Maker(suite, wanted[name.lower()])


class _Maker:
    """Called as a vector environment's constructor: `options` are the environment's arguments and parameters."""

    def __init__(self, suite: str, name: str) -> None:
        self.suite, self.name = suite, name

    def __call__(
        self, num_envs: int, device: Any = "cpu", resets_at_once: int | None = None, **options: Any
    ) -> gym.vector.VectorEnv[Any, Any, Any]:
        from holdfast.envs.jax.vector_env import JaxVectorEnv

        settings = {"env": f"{self.suite}:{self.name}", **options}
        env = _make(self.suite, self.name, options)
        return JaxVectorEnv(env, num_envs, device, settings=settings, resets_at_once=resets_at_once)


def _import(env_id: str, suite: str) -> Any:
    package = {"craftax": "craftax.craftax_env", "brax": "brax.envs", "popgym-arcade": "popgym_arcade.registration"}
    try:
        return import_module(package.get(suite, suite))
    except ImportError as missing:
        raise ModuleNotFoundError(f"{env_id!r} needs {suite} ({missing}): pip install 'holdfast[{suite}]'") from missing


def _names(suite: str, module: Any) -> Sequence[str]:
    if suite == "craftax":
        return CRAFTAX
    if suite == "brax":
        return BRAX
    return list(module.registered_envs if suite == "gymnax" else module.REGISTERED_ENVIRONMENTS)


def _make(suite: str, name: str, options: dict[str, Any]) -> Any:
    module = _import(f"{suite}:{name}", suite)
    if suite == "brax":
        return BraxEnv.named(name, **options)
    if suite == "craftax":
        env = module.make_craftax_env_from_name(name, auto_reset=False)
        return GymnaxEnv(env, _with_options(env.default_params, options, name), images="Pixels" in name)
    env, params = module.make(name)
    arguments = _arguments(type(env))
    env, params = module.make(name, **{key: value for key, value in options.items() if key in arguments})
    return GymnaxEnv(
        env, _with_options(params, {k: v for k, v in options.items() if k not in arguments}, name, arguments)
    )


def _fields(params: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(params)]


def _arguments(kind: type) -> list[str]:
    parameters = inspect.signature(kind).parameters.values()
    return [one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]


def _with_options(params: Any, options: dict[str, Any], name: str, arguments: Sequence[str] = ()) -> Any:
    fields = _fields(params)
    for option, value in options.items():
        if option not in fields:
            raise ValueError(f"{name} has no parameter {option!r}; it has {', '.join([*arguments, *fields])}")
        default = getattr(params, option)
        if isinstance(value, str) and not isinstance(default, str):
            raise ValueError(f"{option} is {value!r}; {name} expects a number, such as {default}")
    return params.replace(**options) if options else params


# --- gymnax and those that follow it: Craftax, POPGym Arcade ----------------------------------------------------------


class GymnaxEnv:
    """An environment with gymnax's `reset_env` and `step_env`. images: floats from 0 to 1 become bytes, as in any image."""

    def __init__(self, env: Any, params: Any = None, images: bool = False) -> None:
        self.env, self.params, self.images = env, env.default_params if params is None else params, images
        self._space = gym_space(env.observation_space(self.params))
        self._has_integers = isinstance(self._space, gym.spaces.Box) and self._space.dtype.kind in "iu"
        # The same environment without a time limit, wherever it keeps it, to tell why an episode ended.
        limits = [name for name in LIMITS if name in _fields(self.params)]
        self._endless_params = self.params.replace(**dict.fromkeys(limits, NEVER)) if limits else self.params
        self._endless = copy.copy(env)
        for name in LIMITS:
            if name in vars(env):
                setattr(self._endless, name, NEVER)
        if self._has_integers and not images:
            self._require_whole_numbers()

    def reset(self, key: Any) -> tuple[Any, Any]:
        obs, state = self.env.reset_env(key, self.params)
        return self._seen(obs), state

    def step(self, key: Any, state: Any, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        import jax.numpy as jnp

        obs, state, reward, done, info = self.env.step_env(key, state, action, self.params)
        done = jnp.asarray(done).astype(bool)
        # From gymnax 1.0 on, `done` is a termination and the time limit is asked for.
        if hasattr(self.env, "is_truncated"):
            over_time = jnp.asarray(self.env.is_truncated(state, self.params)).astype(bool)
            return self._seen(obs), state, reward, done, over_time & ~done
        truncated = done & self._is_over_time(state, info)
        return self._seen(obs), state, reward, done & ~truncated, truncated

    def _is_over_time(self, state: Any, info: Any) -> Any:
        """Whether an episode that has just ended would go on without a time limit; as its info says, where it says so."""
        import jax.numpy as jnp

        if "truncated" in info:
            return jnp.asarray(info["truncated"]).astype(bool)
        try:
            return ~jnp.asarray(self._endless.is_terminal(state, self._endless_params)).astype(bool)
        except NotImplementedError:
            return False

    def observation_space(self) -> Space:
        return gym.spaces.Box(0, 255, self._space.shape, np.uint8) if self.images else self._space

    def action_space(self) -> Space:
        return gym_space(self.env.action_space(self.params))

    def _seen(self, obs: Any) -> Any:
        import jax.numpy as jnp

        if self.images:
            return jnp.round(obs * 255.0).astype(jnp.uint8)
        # Some of gymnax's spaces say integers where the observations are whole numbers as floats; see _require_whole_numbers.
        return obs.astype(self._space.dtype) if self._has_integers else obs

    def _require_whole_numbers(self) -> None:
        """Refuse a space of integers if observations have fractions, which it would cut off.

        Their dtype does not tell (`_seen`), so a few steps of a few worlds are played.
        """
        import jax
        import jax.numpy as jnp

        actions = self.action_space()
        actions.seed(0)
        keys = jax.random.split(jax.random.PRNGKey(0), WORLDS_PLAYED)
        step = jax.jit(jax.vmap(lambda key, state, action: self.env.step_env(key, state, action, self.params)[:2]))
        obs, state = jax.vmap(lambda key: self.env.reset_env(key, self.params))(keys)
        for _ in range(STEPS_PLAYED):
            if bool((obs != jnp.round(obs)).any()):
                raise ValueError(
                    f"{type(self.env).__name__} returned an observation with fractions, but its observation space is "
                    f"{self._space}, which cannot hold it; give both the same dtype"
                )
            obs, state = step(keys, state, np.stack([actions.sample() for _ in range(WORLDS_PLAYED)]))


# --- Brax -------------------------------------------------------------------------------------------------------------


class BraxEnv:
    """A Brax environment. It has no time limit of its own: episodes are truncated after `episode_length` steps."""

    def __init__(self, env: Any, episode_length: int = 1000) -> None:
        self.env, self.episode_length = env, episode_length

    @classmethod
    def named(cls, name: str, episode_length: int = 1000, **options: Any) -> BraxEnv:
        """One of Brax's own."""
        from brax import envs

        return cls(envs.get_environment(name, **options), episode_length)

    def reset(self, key: Any) -> tuple[Any, Any]:
        import jax.numpy as jnp

        state = self.env.reset(key)
        return state.obs, {"world": state, "steps": jnp.zeros((), jnp.int32)}

    def step(self, key: Any, state: Any, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        world, steps = self.env.step(state["world"], action), state["steps"] + 1
        terminated = world.done > 0.5
        truncated = (steps >= self.episode_length) & ~terminated
        return world.obs, {"world": world, "steps": steps}, world.reward, terminated, truncated

    def observation_space(self) -> Space:
        size = self.env.observation_size
        if isinstance(size, dict):
            return gym.spaces.Dict({name: _unbounded(np.atleast_1d(one)) for name, one in size.items()})
        return _unbounded((size,))

    def action_space(self) -> Space:
        return gym.spaces.Box(-1.0, 1.0, (self.env.action_size,))


def _unbounded(shape: Any) -> Space:
    return gym.spaces.Box(-np.inf, np.inf, tuple(int(size) for size in shape))


# --- objects ----------------------------------------------------------------------------------------------------------


def as_jax_env(env: Any, **options: Any) -> Any:
    """An environment object of any of these kinds as a `JaxEnv`."""
    if hasattr(env, "step_env") and hasattr(env, "default_params"):
        return GymnaxEnv(env, **options)
    if hasattr(env, "observation_size") and hasattr(env, "action_size"):
        return BraxEnv(env, **options)
    if options:
        raise ValueError(f"{type(env).__name__} takes no {', '.join(options)}")
    return env


def from_jax(
    env: Any, num_envs: int, *, device: Any = "cpu", resets_at_once: int | None = None, **options: Any
) -> gym.vector.VectorEnv[Any, Any, Any]:
    """A vector environment with `num_envs` copies of an environment written in JAX.

    `env` has the four functions of `JaxEnv`, or is an environment of gymnax, Craftax or Brax (options: `params` for the first
    two, `episode_length` for Brax), or a class of those (options: its arguments). Observations, rewards and flags are tensors
    on `device`. resets_at_once: how many new worlds are made together; by default 16, or one for 16 rows.
    """
    from holdfast.envs.jax.vector_env import JaxVectorEnv

    import_jax()
    made = as_jax_env(env(**options)) if isinstance(env, type) else as_jax_env(env, **options)
    kind, plain = env if isinstance(env, type) else type(env), (bool, int, float, str)
    settings = {"env": kind.__name__, **{name: value for name, value in options.items() if isinstance(value, plain)}}
    return JaxVectorEnv(made, num_envs, device, settings=settings, resets_at_once=resets_at_once)
