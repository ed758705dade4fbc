"""`OneEnv`: a `JaxEnv` in the form that `JaxVectorEnv` steps, checked before anything is compiled.

Observations and states are dicts of arrays by name, with one dtype each; random keys in a state are plain numbers. What an
environment returns in another form, or in forms that differ between `reset` and `step`, is an error of one line.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

from holdfast.envs.jax.protocol import JaxEnv, Space, ask_space, flat_space, named_leaves

Arrays = dict[str, Any]
STEP = ("observation", "state", "reward", "terminated", "truncated")


class OneEnv:
    """One environment. `obs` and `state` describe one row: name to shape and dtype."""

    def __init__(self, env: JaxEnv) -> None:
        import jax

        self.env, self.name = env, type(env).__name__
        space = flat_space(ask_space(env, "observation_space"))
        self._spaces = dict(space.items()) if isinstance(space, gym.spaces.Dict) else {"": space}
        self._spaces = {name: _with_plain_dtype(part) for name, part in self._spaces.items()}
        self.observation_space = self._spaces[""] if "" in self._spaces else gym.spaces.Dict(self._spaces)
        self.action_space = ask_space(env, "action_space")
        key = jax.ShapeDtypeStruct((2,), np.uint32)
        self._reset, self._step = (jax.jit(function, inline=True) for function in (env.reset, env.step))  # traced once
        first = jax.eval_shape(self._reset, key)
        self._require_tuple("reset", first, STEP[:2])
        self._kinds, self._tree = jax.tree.flatten(first[1])
        self._state_names = list(named_leaves(first[1]))
        self._key_impls: dict[str, Any] = {}  # of the random keys in a state, filled when `_pack` is traced
        self._require_observation("reset", first[0])
        self.obs, self.state = jax.eval_shape(self._observation, first[0]), jax.eval_shape(self._pack, first[1])
        self._require_step(jax.eval_shape(self._step, key, first[1], self._action()))
        if hasattr(env, "action_mask"):
            self._require_mask(jax.eval_shape(env.action_mask, first[1]))

    # --- the environment's functions ----------------------------------------------------------------------------------

    def reset(self, key: Any) -> tuple[Arrays, Arrays]:
        """Observation and state of a new episode."""
        obs, state = self._reset(key)
        return self._observation(obs), self._pack(state)

    def step(self, key: Any, state: Arrays, action: Any) -> tuple[Arrays, Arrays, Any, Any, Any]:
        """Observation, state, reward, terminated, truncated."""
        import jax.numpy as jnp

        obs, next_state, reward, terminated, truncated = self._step(key, self._unpack(state), action)
        numbers = (_as(reward, jnp.float32), _as(terminated, bool), _as(truncated, bool))
        return self._observation(obs), self._pack(next_state), *(number.reshape(()) for number in numbers)

    def action_mask(self, state: Arrays) -> Any:
        """Which actions are allowed in a state."""
        return _as(self.env.action_mask(self._unpack(state)), bool)  # type: ignore[attr-defined]

    # --- forms --------------------------------------------------------------------------------------------------------

    def _observation(self, obs: Any) -> Arrays:
        leaves = named_leaves(obs)
        return {name: _as(leaves[name], _plain(space)) for name, space in self._spaces.items()}

    def _pack(self, state: Any) -> Arrays:
        import jax

        packed = {}
        for name, leaf, kind in zip(self._state_names, jax.tree.leaves(state), self._kinds):
            if _is_key(kind):
                self._key_impls[name] = jax.random.key_impl(leaf)
            packed[name] = jax.random.key_data(leaf) if _is_key(kind) else _as(leaf, kind.dtype)
        return packed

    def _unpack(self, state: Arrays) -> Any:
        import jax

        def original(name: str) -> Any:
            impl = self._key_impls.get(name)
            return state[name] if impl is None else jax.random.wrap_key_data(state[name], impl=impl)

        return jax.tree.unflatten(self._tree, [original(name) for name in self._state_names])

    def _action(self) -> Any:
        import jax

        dtype = np.float32 if isinstance(self.action_space, gym.spaces.Box) else np.int32
        return jax.ShapeDtypeStruct(self.action_space.shape, dtype)

    # --- checks -------------------------------------------------------------------------------------------------------

    def _require_tuple(self, function: str, result: Any, expected: tuple[str, ...]) -> None:
        if not isinstance(result, (tuple, list)) or len(result) != len(expected):
            came = f"{len(result)} values" if isinstance(result, (tuple, list)) else type(result).__name__
            raise ValueError(f"{self.name}.{function} returned {came}, expected {', '.join(expected)}")

    def _require_observation(self, function: str, obs: Any) -> None:
        leaves = named_leaves(obs)
        came = {name: tuple(leaf.shape) for name, leaf in leaves.items()}
        expected = {name: tuple(space.shape or ()) for name, space in self._spaces.items()}
        if came != expected:
            raise ValueError(
                f"{self.name}.{function} returned an observation of {_described(came)}, but its observation space has "
                f"{_described(expected)}"
            )
        for name, space in self._spaces.items():
            if _kind(leaves[name].dtype) > _kind(_plain(space)):
                raise ValueError(
                    f"{self.name}.{function} returned the observation {name + ' ' if name else ''}as {leaves[name].dtype}, but its "
                    f"observation space is {space}, which cannot hold it; give both the same dtype"
                )

    def _require_step(self, result: Any) -> None:
        import jax

        self._require_tuple("step", result, STEP)
        obs, state, *numbers = result
        self._require_observation("step", obs)
        before, after = (named_leaves(one) for one in (self._example(), state))
        shapes = [{name: tuple(leaf.shape) for name, leaf in leaves.items()} for leaves in (before, after)]
        if shapes[0] != shapes[1] or jax.tree.structure(state) != self._tree:
            changed = [name for name in before | after if shapes[0].get(name) != shapes[1].get(name)]
            what = ", ".join(sorted(changed)) if all(changed) and changed else "the tree"
            raise ValueError(
                f"{self.name}.step returned another state than reset: {what} differ(s); a state keeps its names and shapes"
            )
        for name, leaf in after.items():
            if _kind(leaf.dtype) > _kind(before[name].dtype):
                raise ValueError(
                    f"{self.name}.step returned the state's {name or 'array'} as {leaf.dtype}, but reset as "
                    f"{before[name].dtype}, which cannot hold it; give it the same dtype in both"
                )
        for name, number in zip(STEP[2:], numbers):
            if np.prod(number.shape) != 1:
                raise ValueError(
                    f"{self.name}.step returned {name} of shape {tuple(number.shape)}, expected one number"
                )

    def _example(self) -> Any:
        import jax

        return jax.tree.unflatten(self._tree, self._kinds)

    def _require_mask(self, mask: Any) -> None:
        space = self.action_space
        size = space.n if isinstance(space, gym.spaces.Discrete) else sum(getattr(space, "nvec", [])) or None
        if size is None:
            raise ValueError(f"{self.name}.action_mask needs Discrete or MultiDiscrete actions, they are {space}")
        if tuple(mask.shape) != (size,):
            raise ValueError(f"{self.name}.action_mask returned shape {tuple(mask.shape)}, expected ({size},)")


def _as(value: Any, dtype: Any) -> Any:
    import jax.numpy as jnp

    return jnp.asarray(value).astype(dtype)


def _is_key(kind: Any) -> bool:
    import jax

    return bool(jax.dtypes.issubdtype(kind.dtype, jax.dtypes.prng_key))


def _kind(dtype: Any) -> int:
    """0 flags, 1 integers, 2 floats, 3 complex numbers, 4 random keys: a kind holds those before it."""
    import jax.numpy as jnp

    kinds = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
    return next((number for number, kind in enumerate(kinds) if jnp.issubdtype(dtype, kind)), len(kinds))


def _plain(space: Space) -> Any:
    """The dtype of observations: JAX has 32 bits unless told otherwise."""
    return np.int32 if isinstance(space, (gym.spaces.Discrete, gym.spaces.MultiDiscrete)) else space.dtype


def _with_plain_dtype(space: Space) -> Space:
    """A Box of floats or flags as one of float32, of 64-bit integers as one of int32."""
    if isinstance(space, gym.spaces.Box):
        dtype = np.float32 if space.dtype.kind in "fb" else np.int32 if space.dtype.itemsize == 8 else space.dtype.type
        low, high = (np.asarray(bound).astype(dtype) for bound in (space.low, space.high))
        return gym.spaces.Box(low, high, space.shape, dtype)
    if space.shape is None:
        raise TypeError(
            f"observations of {space} are not supported; expected Box, Discrete, MultiDiscrete, MultiBinary"
        )
    return space


def _described(shapes: dict[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {shape}" if name else f"shape {shape}" for name, shape in shapes.items())
