"""`TorchVectorEnv`: what all environments written in torch share.

A subclass writes three functions over tensors, `draw`, `begin` and `transition`. This class makes a gymnasium
`VectorEnv` of them: spaces, seeds, SAME_STEP autoreset, dense `final_obs`, saving and restoring. It contains no task.

A step neither reads a tensor's value nor changes a tensor in place. So it never waits for the device, and `transition`
can be compiled or captured in a CUDA graph.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from torch import Tensor

State = dict[str, Tensor]
"""What an environment carries from step to step, by name."""


class Transition(NamedTuple):
    """One step of all B environments. Where an episode ended, the next one has already started."""

    state: State
    obs: Any
    """[B, ...] what the policy sees next. Where an episode ended: the first observation of the new one. A tuple of such
    tensors if the observation space is a Tuple."""
    rewards: Tensor
    """[B] float32."""
    terminated: Tensor
    """[B] bool."""
    truncated: Tensor
    """[B] bool."""
    done: Tensor
    """[B] bool, terminated or truncated."""
    final_obs: Any
    """[B, ...] where an episode ended: its last observation. Elsewhere: `obs`."""


class TorchVectorEnv(VectorEnv[Any, Tensor, Tensor]):
    """`num_envs` copies of one task, in one set of tensors on `device`.

    `step` takes actions as a tensor or a numpy array and returns tensors on `device`. `info["final_obs"]` is always
    present and has a row for every environment; `info["_final_obs"]` says in which rows an episode ended. Action values
    are checked in numpy arrays only, because reading a tensor may wait for the device.
    """

    settings: dict[str, Any]
    """The task's parameters. A state saved with other settings is refused."""
    env_dims: ClassVar[dict[str, int]] = {}
    """Which dimension of a part of the state is the environments', where it is not the first."""
    render_modes: ClassVar[tuple[str, ...]] = ()
    """("ansi",) if the task writes `text`."""
    inputs: tuple[str, ...] = ("obs",)
    """What a policy with memory sees by default: ("obs", "prev_action") where it helps to know what was done."""
    can_truncate: bool = True
    """False if `truncated` is never True. Rollouts then skip what only a truncation needs."""
    can_be_captured: ClassVar[bool] = True
    """False if a step is not made of torch operations alone, so that no CUDA graph can hold it."""
    begins_afresh: ClassVar[bool] = True
    """False if the episode after an end is not the one that `begin` makes of the same draws: it was drawn ahead."""

    def __init__(
        self,
        num_envs: int,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        settings: dict[str, Any],
        device: torch.device | str = "cpu",
        render_mode: str | None = None,
    ) -> None:
        if not isinstance(num_envs, int) or num_envs < 1:
            raise ValueError(f"num_envs is {num_envs!r}; expected an integer of at least 1")
        if render_mode is not None and render_mode not in self.render_modes:
            raise ValueError(
                f"render_mode is {render_mode!r}; expected None{''.join(f' or {m}' for m in self.render_modes)}"
            )
        self.metadata = {
            "autoreset_mode": AutoresetMode.SAME_STEP,
            "render_modes": list(self.render_modes),
            "inputs": self.inputs,
        }
        self.render_mode = render_mode
        self.num_envs = num_envs
        self.single_observation_space = observation_space
        self.single_action_space = action_space
        self.observation_space = batch_space(observation_space, num_envs)
        self.action_space = batch_space(action_space, num_envs)
        self.settings = settings
        self.device = torch.device(device)
        self.generator = torch.Generator(device=self.device)
        self.generator.seed()
        self.state: State | None = None
        self._actions = _ActionFormat(action_space, num_envs)

    # --- what a task writes ---------------------------------------------------------------------------------

    @abstractmethod
    def draw(self) -> Tensor:
        """The random numbers [B, ...] of one step of all environments. Nothing else uses `self.generator`."""

    @abstractmethod
    def begin(self, draws: Tensor) -> tuple[State, Any]:
        """New episodes in all environments: the state and the first observations [B, ...]. Pure."""

    @abstractmethod
    def transition(self, state: State, actions: Tensor, draws: Tensor) -> Transition:
        """One step, including autoreset. Pure: `state` does not change, the result holds a new one.

        Where an episode ended, the next one is what `begin` makes of the same draws.
        """

    def text(self, row: int) -> str:
        """Environment `row` in letters, for `render_mode="ansi"`. May wait for the device."""
        raise NotImplementedError(f"{type(self).__name__} cannot be rendered")

    # --- the gymnasium interface ----------------------------------------------------------------------------

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start new episodes in all environments. `seed` seeds the generator that they share."""
        if options:
            raise ValueError(f"{type(self).__name__} has no reset options, got {sorted(options)}; leave options out")
        if seed is not None:
            if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
                raise TypeError(f"seed is {seed!r}; expected one integer: all {self.num_envs} environments share it")
            self.generator.manual_seed(int(seed))
        self.state, obs = self.begin(self.draw())
        return obs, {}

    @property
    def np_random_seed(self) -> int:
        """The seed of the generator that all environments share: that of the last `reset(seed=...)`."""
        return self.generator.initial_seed()

    def step(self, actions: Tensor | np.ndarray[Any, Any]) -> tuple[Any, Tensor, Tensor, Tensor, dict[str, Any]]:
        """One step in every environment; actions [B, ...] of the action space: integers, or floats for a Box."""
        if self.state is None:
            raise ResetNeeded(f"{type(self).__name__}: call reset() before step()")
        actions = self._actions.read(actions)
        if actions.device != self.device:
            actions = actions.to(self.device)
        state, obs, rewards, terminated, truncated, done, final_obs = self.transition(self.state, actions, self.draw())
        self.state = state
        return obs, rewards, terminated, truncated, {"final_obs": final_obs, "_final_obs": done}

    def render(self) -> tuple[str, ...] | None:
        """All environments in letters. None unless the environment was made with `render_mode="ansi"`."""
        if self.render_mode is None:
            return None
        if self.state is None:
            raise ResetNeeded(f"{type(self).__name__}: call reset() before render()")
        return tuple(self.text(row) for row in range(self.num_envs))

    # --- saving and restoring -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What is needed to continue exactly from here, including the random generator: a copy, on the CPU.

        Tensors, numbers and strings only. It does not hold the last observation, which `step` returned.
        """
        state = {} if self.state is None else self.state_as_tensors(self.state)
        return {
            "env": type(self).__name__,
            "num_envs": self.num_envs,
            "settings": dict(self.settings),
            "device": self.device.type,
            "generator": self.generator.get_state().clone(),
            "state": {name: leaf.detach().to("cpu", copy=True) for name, leaf in state.items()},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a `state_dict()` of the same task, number of environments and type of device."""
        mine = {
            "env": type(self).__name__,
            "num_envs": self.num_envs,
            "settings": self.settings,
            "device": self.device.type,  # generators of different devices have different states
        }
        missing = [key for key in (*mine, "generator", "state") if key not in state_dict]
        if missing:
            raise ValueError(
                f"this is not the state of a {mine['env']}: {missing} missing; pass what state_dict() returned"
            )
        for key, expected in mine.items():
            if state_dict[key] != expected:
                raise ValueError(
                    f"the saved environment has {key} = {state_dict[key]!r}, this one {expected!r}; "
                    "create the environment with the arguments it had when it was saved"
                )
        self.state = self._checked_state(state_dict["state"])
        self.generator.set_state(state_dict["generator"].to("cpu", torch.uint8))

    def regroup(self, saved: Sequence[Mapping[str, Any]], first: int, part: int, seed: int) -> dict[str, Any]:
        """A state for this environment: rows `first` to `first + num_envs` of all `saved` states together.

        The random generator continues from `saved[part]`, or starts from `seed` if there is no such part.
        """
        state = {}
        for name in saved[0]["state"]:
            dim = self.env_dims.get(name, 0)
            state[name] = torch.cat([one["state"][name] for one in saved], dim).narrow(dim, first, self.num_envs)
        stream = torch.Generator(device=self.device).manual_seed(seed).get_state()
        generator = saved[part]["generator"] if part < len(saved) else stream
        return {**saved[0], "num_envs": self.num_envs, "generator": generator, "state": state}

    def _checked_state(self, saved: Mapping[str, Tensor]) -> State | None:
        if not saved:  # saved before the first reset
            return None
        expected = self.example_state()
        for name, leaf in expected.items():
            if name not in saved or saved[name].shape != leaf.shape or saved[name].dtype != leaf.dtype:
                got = f"{saved[name].dtype} {tuple(saved[name].shape)}" if name in saved else "missing"
                raise ValueError(f"saved {name!r} is {got}, expected {leaf.dtype} {tuple(leaf.shape)}")
        self.require_possible(saved)
        return self.state_from_tensors({name: saved[name].to(self.device, copy=True) for name in expected})

    def example_state(self) -> State:
        """A state of the names, shapes and dtypes that a saved one must have."""
        before = self.generator.get_state()
        state, _ = self.begin(self.draw())
        self.generator.set_state(before)
        return state

    def state_as_tensors(self, state: Any) -> State:
        """The state to save. A task whose state is not made of tensors converts it here, and back below."""
        return state

    def state_from_tensors(self, saved: State) -> Any:
        """The inverse of `state_as_tensors`, on `device`."""
        return saved

    def require_possible(self, saved: Mapping[str, Tensor]) -> None:
        """Raise ValueError for a saved state, right in shape, that no episode reaches. Write it where that would break a step."""


class _ActionFormat:
    """The shape and dtype of all environments' actions. Values are checked in numpy arrays only."""

    def __init__(self, space: gym.Space[Any], num_envs: int) -> None:
        self.shape = (num_envs, *(space.shape or ()))
        self.most: Any = None  # the largest action; None if actions are floats
        if isinstance(space, gym.spaces.Discrete):
            self.most = int(space.n) - 1
        elif isinstance(space, gym.spaces.MultiDiscrete):
            self.most = space.nvec - 1
        elif not isinstance(space, gym.spaces.Box):
            raise TypeError(f"the action space is {space}; expected Discrete, MultiDiscrete or Box")
        self.dtype = torch.float32 if self.most is None else torch.int64

    def read(self, actions: Any) -> Tensor:
        """The actions as a tensor of `shape` and `dtype`."""
        if not isinstance(actions, Tensor):
            actions = self._from_numpy(np.asarray(actions))
        if actions.shape != self.shape:
            raise ValueError(f"actions have shape {tuple(actions.shape)}, expected {self.shape}: one per environment")
        return actions if actions.dtype is self.dtype else self._convert(actions)

    def _from_numpy(self, array: np.ndarray[Any, Any]) -> Tensor:
        readable = self.most is not None and array.size and array.dtype.kind in "iu"
        if readable and (array.min() < 0 or (array > self.most).any()):
            raise ValueError(f"actions range from {array.min()} to {array.max()}, expected 0 to {self.most}")
        return torch.as_tensor(array)

    def _convert(self, actions: Tensor) -> Tensor:
        if self.most is None and actions.is_floating_point():
            return actions.to(self.dtype)
        if self.most is None or actions.dtype not in (torch.int8, torch.uint8, torch.int16, torch.int32):
            expected = "floats" if self.most is None else f"integers from 0 to {self.most}"
            raise TypeError(f"actions are {actions.dtype}, expected {expected}")
        return actions.to(self.dtype)
