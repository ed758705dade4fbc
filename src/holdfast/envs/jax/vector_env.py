"""`JaxVectorEnv`: many copies of an environment written in JAX, stepped by one compiled function, with torch tensors outside.

An episode that ends is followed by a new one in the same step. New worlds are made ahead, many at once, since making one takes as
many launches as making a thousand: a step hands out those that are ready, and more are made only when none is left. The host asks
after every step whether a row still waits, so what makes worlds is a program of its own and is not compiled inside the step too.
Worlds are numbered in the order in which they are handed out, and number and seed decide what a world is. So no world is used
twice, and how many are made at once changes no number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from holdfast.envs.base import State, TorchVectorEnv, Transition
from holdfast.envs.jax import tensors
from holdfast.envs.jax.one_env import Arrays, OneEnv
from holdfast.envs.jax.protocol import JaxEnv

LARGE = 1024  # bytes of one row of a state: from here on only the rows that change are written


class Programs(NamedTuple):
    """What is compiled. Each takes the arrays that it changes over."""

    step: Any
    """state, actions -> obs, state, reward, terminated, truncated, final, waiting [B], whether any waits"""
    make_worlds: Any
    """numbering -> ahead"""
    hand_out: Any
    """waiting, obs, rows, ahead -> waiting, whether any waits, obs, rows, ahead"""
    nothing: Any
    """draws -> numbering, and waiting, obs, rows before the first episode"""


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
        at_once = max(16, num_envs // 16) if resets_at_once is None else resets_at_once
        if not isinstance(at_once, int) or at_once < 1:
            raise ValueError(f"resets_at_once is {at_once!r}; expected an integer of at least 1")
        self._resets_at_once = min(num_envs, at_once)
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
        numbering, waiting, obs, rows = self._programs.nothing(tensors.to_jax(self._draw_key()))
        obs, state = self._with_new_worlds(waiting, obs, rows, numbering)
        return state, _observation(obs)

    def transition(self, state: State, actions: Tensor, draws: Tensor) -> Transition:
        if actions.dtype == torch.int64:
            actions = actions.int()  # JAX has 32 bits unless told otherwise
        *result, waiting, wait = self._programs.step(state, tensors.to_jax(actions))
        obs, after, reward, terminated, truncated, final = result
        if wait:
            obs, after = self._with_new_worlds(waiting, obs, after["rows"], after["ahead"])
        seen, ended, cut = _observation(obs), tensors.to_torch(terminated), tensors.to_torch(truncated)
        return Transition(after, seen, tensors.to_torch(reward), ended, cut, ended | cut, _observation(final))

    def _with_new_worlds(self, waiting: Any, obs: Arrays, rows: Arrays, numbering: Arrays) -> tuple[Arrays, Any]:
        """Observations and state after as many new worlds as the rows that wait need. None is ready."""
        wait, ahead = True, numbering
        while wait:
            ahead = self._programs.make_worlds({name: ahead[name] for name in NUMBERING})
            waiting, wait, obs, rows, ahead = self._programs.hand_out(waiting, obs, rows, ahead)
        return obs, {"rows": rows, "ahead": ahead}

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
        self.state["ahead"] = self._programs.make_worlds(numbering)

    def regroup(self, saved: Sequence[Mapping[str, Any]], first: int, part: int, seed: int) -> dict[str, Any]:
        state = super().regroup(saved, first, part, seed)
        state.pop("numbering", None)
        return state

    def state_as_tensors(self, state: Any) -> State:
        self._wait_for_torch()
        return {name: tensors.saved_form(array) for name, array in state["rows"].items()}

    def state_from_tensors(self, saved: State) -> Any:
        rows = {name: tensors.from_saved_form(saved[name], one.dtype) for name, one in self._one.state.items()}
        return {"rows": rows}

    def example_state(self) -> State:
        import jax.numpy as jnp

        self._wait_for_torch()
        one = {name: jnp.zeros(one.shape, one.dtype) for name, one in self._one.state.items()}
        rows = self.state_as_tensors({"rows": one})
        return {name: row.expand(self.num_envs, *row.shape) for name, row in rows.items()}

    def _wait_for_torch(self) -> None:
        """Before JAX computes without a tensor of torch's (tensors.py): it may write where torch still reads."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    # --- compiled -----------------------------------------------------------------------------------------------------

    @cached_property
    def _programs(self) -> Programs:
        """Compiled at their first use, the two that take long at the same time."""
        import jax

        example = tensors.to_jax(torch.zeros(2, dtype=torch.int32, device=self.device))

        def here(kind: Any) -> Any:
            return jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=example.sharding)

        def lower(function: Any, *arguments: Any, donate: tuple[int, ...] = ()) -> tuple[Any, Any]:
            # Actions that a world ignores are passed too: through them a step waits for what torch still reads.
            jitted = jax.jit(function, donate_argnums=donate, keep_unused=True)
            traced = jitted.trace(*jax.tree.map(here, arguments))
            return traced.lower(), traced.out_info

        nothing, (numbering, waiting, obs, rows) = lower(self._nothing_yet, example)
        make_worlds, ahead = lower(self._worlds_from, numbering)
        hand_out, _ = lower(self._hand_out, waiting, obs, rows, ahead, donate=(1, 2, 3))
        actions = jax.ShapeDtypeStruct(self._actions.shape, "float32" if self._actions.most is None else "int32")
        step, _ = lower(self._step_all, {"rows": rows, "ahead": ahead}, actions, donate=(0,))
        with ThreadPoolExecutor(1) as pool:
            slow = pool.submit(step.compile)
            fast = [one.compile() for one in (make_worlds, hand_out, nothing)]
        return Programs(slow.result(), *fast)

    def _nothing_yet(self, draws: Any) -> tuple[Arrays, Any, Arrays, Arrays]:
        """The numbering of a run of episodes, and rows that all wait for their first world."""
        import jax
        import jax.numpy as jnp

        one = (self._one.obs, self._one.state)
        empty = jax.tree.map(lambda leaf: jnp.zeros((self.num_envs, *leaf.shape), leaf.dtype), one)
        return _first_numbers(draws), jnp.ones(self.num_envs, bool), *empty

    def _step_all(self, state: Any, actions: Any) -> tuple[Any, ...]:
        import jax

        rows, ahead = state["rows"], state["ahead"]
        key = jax.random.fold_in(_key_of("steps", ahead), ahead["step"])
        keys = jax.random.split(key, self.num_envs)
        last, rows, reward, terminated, truncated = jax.vmap(self._one.step)(keys, rows, actions)
        ahead = {**ahead, "step": ahead["step"] + 1}
        waiting, wait, obs, rows, ahead = self._hand_out(terminated | truncated, last, rows, ahead)
        return obs, {"rows": rows, "ahead": ahead}, reward, terminated, truncated, last, waiting, wait

    def _worlds_from(self, numbering: Arrays) -> Arrays:
        """The next worlds, made ahead."""
        import jax
        import jax.numpy as jnp

        at_once = self._resets_at_once
        numbers = numbering["world"] + jnp.arange(at_once, dtype=jnp.uint32)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(_key_of("worlds", numbering), numbers)
        obs, rows = jax.vmap(self._one.reset)(keys)
        return {**numbering, "obs": obs, "rows": rows, "used": jnp.zeros((), jnp.int32)}

    def _hand_out(self, waiting: Any, obs: Arrays, rows: Arrays, ahead: Any) -> tuple[Any, Any, Arrays, Arrays, Any]:
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
        waiting = waiting & ~served
        return waiting, waiting.any(), obs, rows, ahead


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
