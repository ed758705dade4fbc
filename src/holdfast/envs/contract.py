"""`check`: does an environment written in torch keep what `TorchVectorEnv` promises? For a test of one's own environment.

It plays random episodes and reports every fault in one line. It does not judge the task: whether rewards are right, and what
happens where random actions do not lead.
"""

from __future__ import annotations

import inspect
import io
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from holdfast.envs.base import State, TorchVectorEnv, Transition
from holdfast.envs.bridge import make
from holdfast.envs.user_envs import can_be_made_again
from holdfast.policies.encoders import leaf_spaces
from holdfast.state import leaves, named_leaves

ROWS = 17
"""Environments that are played: a number that other dimensions are unlikely to have."""
AFTER_AN_END = 64
"""Steps that are played after the first end of an episode."""
LONGEST = 5000
"""Steps in which an episode must end."""


def check(env: Any, *, device: torch.device | str | None = None, **env_kwargs: Any) -> None:
    """Raise AssertionError with all faults of an environment written in torch, one line each.

    >>> from holdfast.envs import TMaze, check
    >>> check(TMaze, length=5)

    `env` is a subclass of `TorchVectorEnv`, a function that makes one, or a name ("my_module:MyEnv"); `env_kwargs` are the
    arguments of its constructor. Checked are: the form of what `draw`, `begin` and `transition` return; that they are pure,
    wait for no device and compile; that environments do not affect each other; autoreset; seeds; saving and restoring. With
    `device="cuda"` (the default where there is a GPU) a transition is also captured in a CUDA graph.
    """
    if not can_be_made_again(env):
        raise TypeError(f"check makes several environments; pass the class of this {type(env).__name__}, or a function")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    contract = _Contract(partial(make, env, device=device, env_kwargs=env_kwargs))
    if contract.faults:
        lines = "".join(f"\n- {line}" for line in contract.faults.values())
        raise AssertionError(f"{type(contract.env).__name__} breaks what holdfast.envs.TorchVectorEnv promises:{lines}")


class _Unusable(Exception):
    """What a function returned does not have the form that further checks need."""


class _Contract:
    """All checks of one environment. `faults`: the first of each kind."""

    def __init__(self, make_envs: Any) -> None:
        self.faults: dict[str, str] = {}
        self.make_envs = make_envs
        try:
            for rows in (1, ROWS):
                self.env = make_envs(num_envs=rows)
                if not isinstance(self.env, TorchVectorEnv) or not self.env.can_be_captured:
                    raise TypeError(f"check takes a TorchVectorEnv; {type(self.env).__name__} is not written in torch")
                self.env.action_space.seed(0)
                self.look_at_functions()
            steps = self.play()
        except _Unusable:
            return
        if "pure" not in self.faults:
            self.compare_runs(steps)
            if "waits" not in self.faults:
                self.compile()

    def fault(self, kind: str, text: str) -> None:
        self.faults.setdefault(kind, text)

    # --- each function by itself ----------------------------------------------------------------------------------------

    def look_at_functions(self) -> None:
        env = self.env
        draws = env.draw()
        self.expect("draw()", draws, dim=0)
        state = self.begun(env.begin(draws))
        env.transition(state, self.actions(state), draws)  # what is cached at the first call is there now
        self.is_random = not torch.equal(draws, self.watched("draw"))
        state = self.begun(self.watched("begin", draws=draws))
        for _ in range(3):
            out = self.watched("transition", state=state, actions=self.actions(state), draws=env.draw())
            self.look_at(out, state)
            state = out.state

    def watched(self, name: str, **inputs: Any) -> Any:
        """What a function of the environment returns. Whatever else it does is a fault."""
        before, given = self.surroundings(name), named_leaves(inputs)
        kept = {what: (leaf._version, leaf.clone()) for what, leaf in given.items()}
        with _Waits(self, name):
            out = getattr(self.env, name)(**inputs)
        for what, (version, copy) in kept.items():
            if given[what]._version != version or not torch.equal(given[what], copy):
                self.fault("in place", f"{name}() writes into {what}; return a new tensor")
        changed = [what for what, seen in self.surroundings(name).items() if before.get(what) != seen]
        if changed and "generator" in changed[0]:
            self.fault("pure", f"{name}() uses {changed[0]}; draw in draw(), with generator=self.generator")
        elif changed:
            self.fault("pure", f"{name}() changes {changed[0]}; put what changes into the state, which is saved")
        if isinstance(out, tuple):
            others = named_leaves({"given": inputs, "self": vars(self.env), "state": out[0]})
            owners = {leaf.untyped_storage().data_ptr(): w for w, leaf in others.items() if isinstance(leaf, Tensor)}
            for shared in owners.keys() & {leaf.untyped_storage().data_ptr() for leaf in leaves(out[1:])} - {0}:
                self.fault("shared", f"{name}() returns a tensor that shares memory with {owners[shared]}; clone it")
        return out

    def surroundings(self, name: str) -> dict[str, Any]:
        """What a pure function leaves as it is."""
        found = {
            "torch's global generator": bytes(torch.get_rng_state().numpy()),
            "numpy's global generator": str(np.random.get_state()),
            "Python's global generator": random.getstate(),
            "the environment's generator": name == "draw" or bytes(self.env.generator.get_state().numpy()),
        }
        return found | {f"self.{k}": (id(v), getattr(v, "_version", 0)) for k, v in vars(self.env).items()}

    def begun(self, result: Any) -> State:
        """The state that `begin` returned."""
        state, obs = result
        for name, leaf in state.items():
            self.expect(f"state[{name!r}] of begin()", leaf, dim=self.env.env_dims.get(name, 0))
        self.look_at_obs("obs of begin()", obs)
        return state

    def look_at(self, out: Transition, before: State) -> None:
        """The form of what `transition` returned, and whether the numbers are possible."""
        if not isinstance(out, Transition):
            self.unusable(f"transition() returned a {type(out).__name__}, expected a holdfast.envs.Transition")
        if out.state.keys() != before.keys():
            self.unusable(f"the state of transition() holds {sorted(out.state)}, that of begin() {sorted(before)}")
        for name, leaf in before.items():
            self.expect(f"state[{name!r}] of transition()", out.state[name], leaf.shape, leaf.dtype)
        for name in ("rewards", "terminated", "truncated", "done"):
            dtype = torch.float32 if name == "rewards" else torch.bool
            self.expect(f"{name} of transition()", getattr(out, name), (self.env.num_envs,), dtype)
        self.look_at_obs("obs of transition()", out.obs)
        self.look_at_obs("final_obs of transition()", out.final_obs)
        if not out.rewards.isfinite().all():
            self.fault("rewards", f"transition() gives the reward {out.rewards[~out.rewards.isfinite()][0].item()}")
        if not torch.equal(out.done, out.terminated | out.truncated):
            self.fault("done", "done is not terminated | truncated")
        if not self.env.can_truncate and out.truncated.any():
            self.fault("truncated", "an episode was truncated, but the class says can_truncate = False")
        if not all(_same(a[~out.done], b[~out.done]) for a, b in zip(leaves(out.obs), leaves(out.final_obs))):
            self.fault("final_obs", "final_obs differs from obs in environments whose episode goes on")

    def look_at_obs(self, what: str, obs: Any) -> None:
        spaces, parts = dict(leaf_spaces(self.env.observation_space)), named_leaves(obs)
        if spaces.keys() != parts.keys():
            self.unusable(f"{what} has the parts {sorted(parts)}, but the observation space {sorted(spaces)}")
        for name, space in spaces.items():
            leaf, which = parts[name], f"{what}, part {name}," if name else what
            self.expect(which, leaf, space.shape, torch.from_numpy(np.zeros(0, space.dtype)).dtype)
            if not space.contains(leaf.cpu().numpy()):
                span = f"from {leaf.min().item():g} to {leaf.max().item():g}"
                self.fault("obs", f"{which} goes {span}, outside of {self.env.single_observation_space}")

    def expect(self, what: str, leaf: Any, shape: Any = None, dtype: Any = None, dim: int = 0) -> None:
        """A tensor of this shape and dtype on the environment's device; without a shape: with its rows in `dim`."""
        if not isinstance(leaf, Tensor):
            self.unusable(f"{what} is a {type(leaf).__name__}, expected a tensor")
        if shape is None:
            shape = (*leaf.shape[:dim], self.env.num_envs, *leaf.shape[dim + 1 :])
        got = f"{leaf.dtype} {tuple(leaf.shape)} on {leaf.device.type}"
        expected = f"{dtype or leaf.dtype} {tuple(shape)} on {self.env.device.type}"
        if got != expected:
            self.unusable(f"{what} is {got}, expected {expected}")

    def unusable(self, text: str) -> None:
        self.fault("form", text)
        raise _Unusable

    # --- episodes -------------------------------------------------------------------------------------------------------

    def actions(self, state: State) -> Tensor:
        """Random actions; allowed ones, where there are masks."""
        env, space = self.env, self.env.single_action_space
        if not hasattr(env, "action_masks"):
            kind = torch.float32 if space.dtype.kind == "f" else torch.int64
            return torch.as_tensor(env.action_space.sample(), dtype=kind, device=env.device)
        env.state = state
        masks = env.action_masks().bool()
        chances = masks * torch.as_tensor(1 + env.action_space.np_random.random(masks.shape), device=env.device)
        parts = chances.split(np.ravel(space.nvec if hasattr(space, "nvec") else space.n).tolist(), 1)
        return torch.stack([part.argmax(1) for part in parts], 1).reshape(env.num_envs, *space.shape)

    def step(self, state: State, actions: Tensor, draws: Tensor) -> Transition:
        """A transition with arguments of its own: one that writes into them spoils no other check."""
        return self.env.transition({name: leaf.clone() for name, leaf in state.items()}, actions.clone(), draws.clone())

    def play(self) -> int:
        """Steps the environments until episodes have ended; returns the number of steps."""
        env, t, until, ended = self.env, 0, LONGEST, 0
        state = restarted = env.begin(env.draw())[0]
        elsewhere = env.begin(env.draw())[0]
        finals: list[tuple[Tensor, Tensor]] = []
        row_0 = torch.arange(ROWS, device=env.device) == 0
        while t < until and "pure" not in self.faults:
            here, there = ({"actions": self.actions(now), "draws": env.draw()} for now in (state, elsewhere))
            out, t = self.step(state, **here), t + 1
            if t > AFTER_AN_END and not ended and not out.done.any():  # nothing new before the first end
                state = restarted = out.state
                continue
            self.look_at(out, state)
            other = self.step(elsewhere, **there)
            # The arguments of `other` in row 0, of `out` in the rest: each row must be as there.
            mixed = self.step(self.merge(row_0, elsewhere, state), **self.merge(row_0, there, here))
            if part := self.difference(out, mixed, slice(1, None)) or self.difference(other, mixed, slice(1)):
                if again := self.difference(out, self.step(state, **here)):
                    self.fault("pure", f"transition() gives other {again} for the same state, actions and draws")
                    break
                self.fault("rows", f"{part} of an environment depends on other environments")
            # The same episodes, but those after an end begin with `begin`: nobody may see the difference.
            fresher = self.step(restarted, **here)
            if part := self.difference(out._replace(state={}), fresher):
                self.fault("autoreset", f"after an end, {part} differs from the episode of begin() with the same draws")
            done, (fresh, first) = out.done, env.begin(here["draws"])
            restarted = self.merge(done, fresh, fresher.state) if env.begins_afresh and not part else out.state
            if done.any():
                ended, until = ended + int(done.sum()), min(until, t + AFTER_AN_END)
                finals += [(a[done], b[done]) for a, b in zip(leaves(out.final_obs), leaves(out.obs))]
                if not all(_same(a[done], b[done]) for a, b in zip(leaves(out.obs), leaves(first))):
                    self.fault(
                        "autoreset", "where an episode ended, obs differs from that of begin() with the same draws"
                    )
            state, elsewhere = out.state, other.state
        if t == LONGEST:
            self.fault("autoreset", f"no episode ended in {t} steps; give check arguments for shorter episodes")
        varied = ended >= ROWS and any(len(first.unique(dim=0)) > 1 for _, first in finals)
        if varied and "autoreset" not in self.faults and all(_same(*pair) for pair in finals):
            self.fault("final_obs", "where an episode ended, final_obs is the first observation of the next one")
        return t

    def merge(self, rows: Tensor, new: State, old: State) -> State:
        """`new` in some rows, `old` in the others."""

        def along(name: str, leaf: Tensor) -> Tensor:
            dim = self.env.env_dims.get(name, 0)
            return rows.view(*[1] * dim, -1, *[1] * (leaf.dim() - dim - 1))

        return {name: torch.where(along(name, leaf), new[name], leaf) for name, leaf in old.items()}

    def difference(self, one: Transition, other: Transition, rows: Any = ...) -> str | None:
        """The part of `one` that differs in some rows; None if all are equal."""
        dims = {f"state.{name}": dim for name, dim in self.env.env_dims.items()}
        others = named_leaves(other._asdict())
        for name, leaf in named_leaves(one._asdict()).items():
            a, b = (part.movedim(dims.get(name, 0), 0)[rows] for part in (leaf, others[name]))
            if not _same(a, b):
                return name
        return None

    # --- whole runs -----------------------------------------------------------------------------------------------------

    def compare_runs(self, steps: int) -> None:
        """Runs through `reset` and `step`: of one seed twice, the second restored in the middle; and of another seed."""
        env, same, other = self.env, self.make_envs(num_envs=ROWS), self.make_envs(num_envs=ROWS)
        obs = [leaves(one.reset(seed=seed)[0]) for one, seed in ((env, 1), (same, 1), (other, 2))]
        part = None if all(map(_same, obs[0], obs[1])) else "obs"
        alike = self.is_random and not hasattr(env, "action_masks") and all(map(_same, obs[0], obs[2]))
        for t in range(steps):
            if t == steps // 2:
                same = self.make_envs(num_envs=ROWS)
                try:
                    torch.save(env.state_dict(), file := io.BytesIO())
                    same.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
                except Exception as error:  # the environment is the user's code
                    return self.fault("saving", f"state_dict() cannot be saved and loaded: {_first_line(error)}")
            actions = self.actions(env.state)
            result = _result(env.step(actions))
            part = part or self.difference(result, _result(same.step(actions)))
            if part and t < steps // 2:
                return self.fault(
                    "seeds", f"reset(seed=1) gives other {part} the second time; use self.generator in draw()"
                )
            if part:
                return self.fault("saving", f"after saving and restoring, the environment goes on with other {part}")
            alike = alike and not self.difference(result, _result(other.step(actions)))
        if alike:
            self.fault("seeds", "reset(seed=2) gives the same episodes as reset(seed=1), although draw() does not")

    def compile(self) -> None:
        """The transition as one graph of torch.compile; on a GPU also as a CUDA graph."""
        env, state, part = self.env, self.env.begin(self.env.draw())[0], None
        torch.compiler.reset()
        compiled: Any = torch.compile(env.transition, fullgraph=True, backend="eager", dynamic=False)
        try:
            with torch._dynamo.config.patch(error_on_recompile=True):
                for _ in range(4):
                    given = state, self.actions(state), env.draw()
                    out = env.transition(*given)
                    part, state = part or self.difference(out, compiled(*given)), out.state
            if env.device.type == "cuda":
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    captured = env.transition(*given)
                graph.replay()
                part = part or self.difference(out, captured)
            problem = part and f"it gives other {part}"
        except Exception as error:  # torch.compile raises errors of many kinds
            problem = _first_line(error)
        if problem:
            self.fault("graph", f"transition() cannot be compiled as one graph: {problem}")


# --- no waiting for the device ------------------------------------------------------------------------------------------

# fmt: off
WAITS = ["item", "tolist", "numpy", "cpu", "__array__", "__bool__", "__int__", "__float__", "__index__", "__format__", "nonzero",
         "argwhere", "masked_select", "unique", "unique_consecutive", "equal", "allclose", "bincount", "tensor"]
"""Functions that need a tensor's numbers on the host, or that copy numbers from there."""
MAKES = ["zeros", "ones", "full", "empty", "arange", "rand", "randn", "randint", "randperm", "eye", "linspace"]
"""Functions that make a tensor on the CPU unless they are told where."""
# fmt: on


class _Waits(TorchFunctionMode):
    """Reports where the user's code would wait for a GPU, or forget it, with the line."""

    def __init__(self, contract: _Contract, name: str) -> None:
        super().__init__()
        self.contract, self.name = contract, name

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        alone = len(args) + len(kwargs) == 1
        indexes = name == "__getitem__" or (name == "__setitem__" and isinstance(args[2], Tensor))
        index = (args[1] if isinstance(args[1], tuple) else args[1:2]) if indexes else ()
        if name in WAITS or (name in ("where", "one_hot") and alone) or (name == "to" and "cpu" in map(str, args)):
            self.report("waits", f"{name} waits for the device")
        elif any(isinstance(part, Tensor) and part.dtype == torch.bool for part in index):
            self.report("waits", "indexing by a mask waits for the device; torch.where does not")
        elif name in MAKES and kwargs.get("device") is None:
            self.report("device", f"{name} makes a tensor on the CPU; pass device=self.device")
        return func(*args, **kwargs)

    def report(self, kind: str, text: str) -> None:
        frame: Any = inspect.currentframe()
        while frame.f_code.co_filename == __file__ or frame.f_code.co_filename.startswith(torch.__path__[0]):
            frame = frame.f_back
        file = Path(frame.f_code.co_filename).name
        self.contract.fault(kind, f"{self.name}(): {text} ({file}, line {frame.f_lineno})")


# --- parts --------------------------------------------------------------------------------------------------------------


def _result(stepped: Any) -> Transition:
    obs, rewards, terminated, truncated, info = stepped
    return Transition({}, obs, rewards, terminated, truncated, info["_final_obs"], info["final_obs"])


def _same(one: Tensor, other: Tensor) -> bool:
    """Equal, where NaN equals NaN."""
    return torch.equal(one, other) or torch.equal(one.nan_to_num(7e7), other.nan_to_num(7e7))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
