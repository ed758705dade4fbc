"""`JaxVectorEnv`: many copies of an environment written in JAX, stepped by one compiled function, with torch tensors outside.

An episode that ends is followed by a new one in the same step. Only rows that need a new episode get one: a loop inside the
compiled step starts `resets_at_once` of them at a time until none is left, and does nothing if no episode ended. Every episode
has a key of its own, so no world is used twice; it depends on the step and the row only, not on `resets_at_once`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from holdfast.envs.base import State, TorchVectorEnv, Transition
from holdfast.envs.jax import tensors
from holdfast.envs.jax.one_env import Arrays, OneEnv
from holdfast.envs.jax.protocol import JaxEnv


class JaxVectorEnv(TorchVectorEnv):
    """`num_envs` copies of `env` on `device`, a CPU or a GPU.

    settings: plain data that tells this environment from others when a saved state is loaded. A step takes over the arrays of the
    state before it, so keep `state_dict()` and not `state`.
    """

    can_be_captured = False

    def __init__(
        self,
        env: JaxEnv,
        num_envs: int,
        device: torch.device | str = "cpu",
        *,
        settings: dict[str, Any] | None = None,
        resets_at_once: int | None = None,
    ) -> None:
        jax = tensors.import_jax()
        tensors.require_device(jax, torch.device(device))
        self._one = OneEnv(env)
        settings = settings or {"env": type(env).__name__}
        super().__init__(num_envs, self._one.observation_space, self._one.action_space, settings, device)
        self._resets_at_once = min(num_envs, resets_at_once or max(1, num_envs // 64))
        self._begin = jax.jit(self._begin_all)
        self._step = jax.jit(self._step_all, donate_argnums=0)
        if hasattr(env, "action_mask"):
            allowed = jax.jit(jax.vmap(self._one.action_mask))
            self.action_masks = lambda: tensors.to_torch(allowed(self.state))

    # --- what a task writes -------------------------------------------------------------------------------------------

    def draw(self) -> Tensor:
        """The random key of a step: 64 bits."""
        return torch.randint(-(2**31), 2**31, (2,), generator=self.generator, device=self.device, dtype=torch.int32)

    def begin(self, draws: Tensor) -> tuple[State, Any]:
        obs, state = self._begin(tensors.to_jax(draws))
        return state, _observation(obs)

    def transition(self, state: State, actions: Tensor, draws: Tensor) -> Transition:
        if actions.dtype == torch.int64:
            actions = actions.int()  # JAX has 32 bits unless told otherwise
        results = self._step(state, tensors.to_jax(actions), tensors.to_jax(draws))
        obs, state, reward, terminated, truncated, final = results
        seen, ended, cut = _observation(obs), tensors.to_torch(terminated), tensors.to_torch(truncated)
        return Transition(state, seen, tensors.to_torch(reward), ended, cut, ended | cut, _observation(final))

    # --- saving -------------------------------------------------------------------------------------------------------

    def state_as_tensors(self, state: Any) -> State:
        return {name: tensors.saved_form(array) for name, array in state.items()}

    def state_from_tensors(self, saved: State) -> Any:
        return {name: tensors.from_saved_form(saved[name], one.dtype) for name, one in self._one.state.items()}

    def example_state(self) -> State:
        import jax.numpy as jnp

        rows = self.state_as_tensors({name: jnp.zeros(one.shape, one.dtype) for name, one in self._one.state.items()})
        return {name: row.expand(self.num_envs, *row.shape) for name, row in rows.items()}

    # --- compiled -----------------------------------------------------------------------------------------------------

    def _begin_all(self, draws: Any) -> tuple[Arrays, Arrays]:
        import jax.numpy as jnp

        def empty(one: Arrays) -> Arrays:
            return {name: jnp.zeros((self.num_envs, *leaf.shape), leaf.dtype) for name, leaf in one.items()}

        everywhere = jnp.ones(self.num_envs, bool)
        return self._restart(everywhere, _keys(draws, self.num_envs)[1], empty(self._one.obs), empty(self._one.state))

    def _step_all(self, state: Arrays, actions: Any, draws: Any) -> tuple[Any, ...]:
        import jax

        step_keys, reset_keys = _keys(draws, self.num_envs)
        last, state, reward, terminated, truncated = jax.vmap(self._one.step)(step_keys, state, actions)
        obs, state = self._restart(terminated | truncated, reset_keys, last, state)
        return obs, state, reward, terminated, truncated, last

    def _restart(self, rows: Any, keys: Any, obs: Arrays, state: Arrays) -> tuple[Arrays, Arrays]:
        """New episodes in the rows [B] where `rows` is True, started with their keys [B, 2]."""
        import jax
        import jax.numpy as jnp

        def restart_some(carry: Any) -> Any:
            waiting, whole = carry
            some = jnp.nonzero(waiting, size=self._resets_at_once, fill_value=self.num_envs)[0]
            started = jax.vmap(self._one.reset)(keys[some])  # a number of no row: started in vain, and dropped below
            put = jax.tree.map(lambda old, new: old.at[some].set(new, mode="drop"), whole, started)
            return waiting.at[some].set(False, mode="drop"), put

        _, restarted = jax.lax.while_loop(lambda carry: carry[0].any(), restart_some, (rows, (obs, state)))
        return restarted


def _keys(draws: Any, count: int) -> tuple[Any, Any]:
    """Keys of a step and of what may restart in it, [B, 2] each."""
    import jax

    key = jax.lax.bitcast_convert_type(draws, "uint32")
    step, restart = jax.random.split(key)
    return jax.random.split(step, count), jax.random.split(restart, count)


def _observation(arrays: Arrays) -> Any:
    found = {name: tensors.to_torch(array) for name, array in arrays.items()}
    return found.get("", found)
