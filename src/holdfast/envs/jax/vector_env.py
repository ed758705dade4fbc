"""`JaxVectorEnv`: many copies of an environment written in JAX, stepped by one compiled function, with torch tensors outside.

An episode that ends is followed by a new one in the same step. New worlds are made ahead, many at once, since making one takes as
many launches as making a thousand: a step hands out those that are ready, and a loop inside it makes more only when none is left.
Worlds are numbered in the order in which they are handed out, and number and seed decide what a world is. So no world is used
twice, and how many are made at once changes no number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.envs.base import State, TorchVectorEnv, Transition
from holdfast.envs.jax import tensors
from holdfast.envs.jax.one_env import Arrays, OneEnv
from holdfast.envs.jax.protocol import JaxEnv

LARGE = 1024  # bytes of one row of a state: from here on only the rows that change are written


class JaxVectorEnv(TorchVectorEnv):
    """`num_envs` copies of `env` on `device`, a CPU or a GPU.

    settings: plain data that tells this environment from others when a saved state is loaded. resets_at_once: how many worlds are
    made together. A step takes over the arrays of the state before it, so keep `state_dict()` and not `state`.
    """

    can_be_captured = False
    state: Any  # arrays of JAX: "rows", one per environment, and what is "ahead", the worlds that are ready

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
        self._resets_at_once = min(num_envs, resets_at_once or max(1, num_envs // 16))
        self._begin, self._make_ahead = jax.jit(self._begin_all), jax.jit(self._worlds_from)
        # Actions that a world does not look at are passed all the same: a step waits for what torch still reads through them.
        self._step = jax.jit(self._step_all, donate_argnums=0, keep_unused=True)
        self._nothing = torch.empty(0, device=self.device)
        if hasattr(env, "action_mask"):
            masks = jax.vmap(self._one.action_mask)
            # The number comes from torch, so that the masks are written after what torch still reads.
            allowed = jax.jit(lambda rows, number: masks(rows) & (number == 0))
            zero = torch.zeros((), dtype=torch.int32, device=self.device)
            self.action_masks = lambda: tensors.to_torch(allowed(self.state["rows"], tensors.to_jax(zero)))

    # --- what a task writes -------------------------------------------------------------------------------------------

    def draw(self) -> Tensor:
        """Nothing: `begin` draws one key, and everything after it follows from that."""
        return self._nothing

    def begin(self, draws: Tensor) -> tuple[State, Any]:
        obs, state = self._begin(tensors.to_jax(self._draw_key()))
        return state, _observation(obs)

    def transition(self, state: State, actions: Tensor, draws: Tensor) -> Transition:
        if actions.dtype == torch.int64:
            actions = actions.int()  # JAX has 32 bits unless told otherwise
        obs, state, reward, terminated, truncated, final = self._step(state, tensors.to_jax(actions))
        seen, ended, cut = _observation(obs), tensors.to_torch(terminated), tensors.to_torch(truncated)
        return Transition(state, seen, tensors.to_torch(reward), ended, cut, ended | cut, _observation(final))

    def _draw_key(self) -> Tensor:
        return torch.randint(-(2**31), 2**31, (2,), generator=self.generator, device=self.device, dtype=torch.int32)

    # --- saving -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        saved = super().state_dict()
        if self.state is not None:
            saved["numbering"] = {
                name: tensors.saved_form(self.state["ahead"][name]).to("cpu", copy=True) for name in NUMBERING
            }
        return saved

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self.state is None:
            return
        if "numbering" in state_dict:
            found = {name: state_dict["numbering"][name].to(self.device) for name in NUMBERING}
            numbering = {name: tensors.from_saved_form(part, np.dtype("uint32")) for name, part in found.items()}
        else:  # of another number of ranks: worlds are numbered afresh, for each rank with a key of its own
            numbering = _first_numbers(tensors.to_jax(self._draw_key()))
        self.state["ahead"] = self._make_ahead(numbering)

    def regroup(self, saved: Sequence[Mapping[str, Any]], first: int, part: int, seed: int) -> dict[str, Any]:
        state = super().regroup(saved, first, part, seed)
        state.pop("numbering", None)
        return state

    def state_as_tensors(self, state: Any) -> State:
        return {name: tensors.saved_form(array) for name, array in state["rows"].items()}

    def state_from_tensors(self, saved: State) -> Any:
        rows = {name: tensors.from_saved_form(saved[name], one.dtype) for name, one in self._one.state.items()}
        return {"rows": rows}

    def example_state(self) -> State:
        import jax.numpy as jnp

        one = {name: jnp.zeros(one.shape, one.dtype) for name, one in self._one.state.items()}
        rows = self.state_as_tensors({"rows": one})
        return {name: row.expand(self.num_envs, *row.shape) for name, row in rows.items()}

    # --- compiled -----------------------------------------------------------------------------------------------------

    def _begin_all(self, draws: Any) -> tuple[Arrays, Any]:
        import jax
        import jax.numpy as jnp

        def empty(count: int) -> dict[str, Arrays]:
            one = {"obs": self._one.obs, "rows": self._one.state}
            return jax.tree.map(lambda leaf: jnp.zeros((count, *leaf.shape), leaf.dtype), one)

        at_once = self._resets_at_once
        nothing_ahead = {**_first_numbers(draws), **empty(at_once), "used": jnp.int32(at_once)}
        obs, rows, ahead = self._restart(jnp.ones(self.num_envs, bool), **empty(self.num_envs), ahead=nothing_ahead)
        return obs, {"rows": rows, "ahead": ahead}

    def _step_all(self, state: Any, actions: Any) -> tuple[Any, ...]:
        import jax

        rows, ahead = state["rows"], state["ahead"]
        key = jax.random.fold_in(_key_of("steps", ahead), ahead["step"])
        keys = jax.random.split(key, self.num_envs)
        last, rows, reward, terminated, truncated = jax.vmap(self._one.step)(keys, rows, actions)
        ahead = {**ahead, "step": ahead["step"] + 1}
        obs, rows, ahead = self._restart(terminated | truncated, last, rows, ahead)
        return obs, {"rows": rows, "ahead": ahead}, reward, terminated, truncated, last

    def _worlds_from(self, numbering: Arrays) -> Arrays:
        """The next worlds, made ahead."""
        import jax
        import jax.numpy as jnp

        at_once = self._resets_at_once
        numbers = numbering["world"] + jnp.arange(at_once, dtype=jnp.uint32)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(_key_of("worlds", numbering), numbers)
        obs, rows = jax.vmap(self._one.reset)(keys)
        return {**numbering, "obs": obs, "rows": rows, "used": jnp.zeros((), jnp.int32)}

    def _restart(self, ended: Any, obs: Arrays, rows: Arrays, ahead: Any) -> tuple[Arrays, Arrays, Any]:
        """New episodes in the rows [B] where `ended` is True."""
        import jax

        def make_more(carry: Any) -> Any:
            waiting, obs, rows, ahead = carry
            return self._hand_out(waiting, obs, rows, self._worlds_from({name: ahead[name] for name in NUMBERING}))

        handed_out = self._hand_out(ended, obs, rows, ahead)
        return jax.lax.while_loop(lambda carry: carry[0].any(), make_more, handed_out)[1:]

    def _hand_out(self, waiting: Any, obs: Arrays, rows: Arrays, ahead: Any) -> tuple[Any, Arrays, Arrays, Any]:
        """The worlds that are ready to the first rows that wait, as far as they reach."""
        import jax.numpy as jnp

        at_once, used = self._resets_at_once, ahead["used"]
        world = used + jnp.cumsum(waiting, dtype=jnp.int32) - 1  # [B]: of each row that waits
        served = waiting & (world < at_once)
        some = jnp.nonzero(served, size=at_once, fill_value=self.num_envs)[0]  # [at_once]: rows, then numbers of no row

        def put(old: Any, new: Any) -> Any:
            if old[0].nbytes < LARGE:
                return jnp.where(served.reshape(-1, *[1] * (old.ndim - 1)), new[jnp.clip(world, 0, at_once - 1)], old)
            ready = jnp.clip(used + jnp.arange(at_once), 0, at_once - 1)
            return old.at[some].set(new[ready], mode="drop")

        obs = {name: put(old, ahead["obs"][name]) for name, old in obs.items()}
        rows = {name: put(old, ahead["rows"][name]) for name, old in rows.items()}
        count = served.sum(dtype=jnp.int32)
        ahead = {**ahead, "used": used + count, "world": ahead["world"] + count.astype(jnp.uint32)}
        return waiting & ~served, obs, rows, ahead


NUMBERING = ("key", "step", "world")
"""What decides everything that is random: the key of a run of episodes, the next step's number, the next world's."""


def _first_numbers(draws: Any) -> Arrays:
    import jax
    import jax.numpy as jnp

    zero = jnp.zeros((), jnp.uint32)
    return {"key": jax.lax.bitcast_convert_type(draws, "uint32"), "step": zero, "world": zero}


def _key_of(what: str, numbering: Arrays) -> Any:
    import jax

    return jax.random.split(numbering["key"])[("steps", "worlds").index(what)]


def _observation(arrays: Arrays) -> Any:
    found = {name: tensors.to_torch(array) for name, array in arrays.items()}
    return found.get("", found)
