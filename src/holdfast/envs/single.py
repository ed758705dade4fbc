"""One copy of an environment written in torch as an ordinary `gymnasium.Env` with numpy arrays: `gym.make("holdfast/...")`.

The catalog registers `holdfast.envs.single:t_maze.TMaze` for the class at `holdfast.envs.t_maze:TMaze`. Training uses the
vector environments themselves, which are many times faster.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.error import ResetNeeded

from holdfast.envs.base import TorchVectorEnv
from holdfast.state import tree_map


class SingleEnv(gym.Env[Any, Any]):
    """One environment of a task; `settings` are the task's arguments."""

    def __init__(self, task: Callable[..., TorchVectorEnv], render_mode: str | None = None, **settings: Any) -> None:
        modes = list(getattr(task, "render_modes", ()))
        if render_mode is not None:
            if render_mode not in modes:
                can = f"only {', '.join(modes)}" if modes else "nothing"
                raise ValueError(
                    f"{getattr(task, '__name__', task)} can render {can}, not {render_mode!r}; leave it out"
                )
            settings["render_mode"] = render_mode
        self.vector_env = task(1, **settings)
        self.metadata, self.render_mode = {"render_modes": modes}, render_mode
        self.observation_space = self.vector_env.single_observation_space
        self.action_space = self.vector_env.single_action_space
        self._over = True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        obs, info = self.vector_env.reset(seed=seed, options=options)
        self._over = False
        return self._first_row(obs), info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._over:
            raise ResetNeeded(
                f"{type(self.vector_env).__name__}: call reset() before the first step and after an episode's end"
            )
        _, rewards, terminated, truncated, info = self.vector_env.step(np.asarray([action]))
        self._over = bool(terminated[0] | truncated[0])
        obs = self._first_row(info["final_obs"])  # the vector environment has begun the next episode already
        return obs, float(rewards[0]), bool(terminated[0]), bool(truncated[0]), {}

    def render(self) -> Any:
        """What the task draws; after an episode's end, the episode that follows it."""
        frames = self.vector_env.render()
        return None if frames is None else frames[0]

    def _first_row(self, obs: Any) -> Any:
        return tree_map(lambda o: o[0].cpu().numpy()[()], obs)  # [()]: a number where there is one number


def __getattr__(name: str) -> Callable[..., SingleEnv]:
    """What gymnasium calls to make one: `single:t_maze.TMaze` names the class TMaze of `holdfast.envs.t_maze`."""
    module, dot, task = name.rpartition(".")
    if not dot:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return partial(SingleEnv, getattr(import_module(f"holdfast.envs.{module}"), task))
