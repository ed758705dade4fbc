"""rsl_rl's vector environments (Isaac Lab, mjlab, Legged Gym) for our trainer and `hf.collect`.

    env = holdfast.envs.from_rsl_rl(RslRlVecEnvWrapper(gym_env))
    hf.Trainer(hf.TrainConfig(num_envs=env.num_envs, actor_obs=("policy",), critic_obs=("policy", "critic"), ...), env=env)

Observation groups become the keys of a Dict observation, `time_outs` become truncations, and tensors stay on their device.
Nothing here imports rsl_rl: whatever has its interface (`get_observations`, `step`, `num_envs`, `num_actions`) works.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from torch import Tensor

NEEDED = ("num_envs", "num_actions", "get_observations", "step")
FINAL_OBS = ("final_obs", "final_observation")
"""Where in `extras` an environment may give the last observations of episodes that ended, a row per environment."""


def from_rsl_rl(env: Any, groups: Sequence[str] | None = None, clip_actions: float | None = None) -> RslRlEnv:
    """A vector environment with the observations of these groups (None: all).

    clip_actions: actions are cut off at this size, as `RslRlVecEnvWrapper(clip_actions=...)` does; None: no bounds.
    """
    missing = [name for name in NEEDED if not hasattr(env, name)]
    if missing:
        raise TypeError(
            f"{type(env).__name__} is not an rsl_rl environment (it has no {missing[0]}); wrap it, e.g. with Isaac Lab's "
            "RslRlVecEnvWrapper"
        )
    return RslRlEnv(env, groups, clip_actions)


class RslRlEnv(VectorEnv[Any, Tensor, Tensor]):
    """Gymnasium's interface over rsl_rl's. An episode that ends is reset in the same step.

    The value after a timeout is that of the final observation if the environment gives it in `extras["final_obs"]`, and of
    the last observation before it otherwise, with one warning.
    """

    def __init__(self, env: Any, groups: Sequence[str] | None, clip_actions: float | None) -> None:
        self.env, self.num_envs = env, int(env.num_envs)
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        first = env.get_observations()
        self.groups = _checked_groups(first, groups)
        spaces: dict[str, gym.Space[Any]] = {group: _space(group, first[group]) for group in self.groups}
        self.single_observation_space = gym.spaces.Dict(spaces)
        bound = np.inf if clip_actions is None else clip_actions
        self.single_action_space = gym.spaces.Box(-bound, bound, (int(env.num_actions),), np.float32)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._last = self._observations(first)
        self._warned = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """New episodes everywhere if the environment has a method `reset`; otherwise its episodes go on."""
        if seed is not None and callable(getattr(self.env, "seed", None)):
            self.env.seed(seed)
        if callable(getattr(self.env, "reset", None)):
            result = self.env.reset()
            obs = result[0] if isinstance(result, tuple) else result
        else:
            obs = None
        self._last = self._observations(self.env.get_observations() if obs is None else obs)
        return self._last, {}

    def step(self, actions: Any) -> tuple[Any, Tensor, Tensor, Tensor, dict[str, Any]]:
        actions = torch.as_tensor(actions, device=self.env.device if hasattr(self.env, "device") else None)
        obs, rewards, dones, extras = self.env.step(actions)
        done = dones.reshape(-1) == 1
        timed_out = extras.get("time_outs")
        truncated = torch.zeros_like(done) if timed_out is None else done & timed_out.reshape(-1).to(done.device).bool()
        info = {"final_obs": self._final(extras), "_final_obs": done}
        self._last = self._observations(obs)
        return self._last, rewards.reshape(-1), done & ~truncated, truncated, info

    def close_extras(self, **options: Any) -> None:
        if callable(getattr(self.env, "close", None)):
            self.env.close()

    def _final(self, extras: dict[str, Any]) -> dict[str, Tensor]:
        """The last observations of episodes that ended, before the environment reset them."""
        for key in FINAL_OBS:
            if extras.get(key) is not None:
                return self._observations(extras[key])
        if not self._warned and extras.get("time_outs") is not None:
            self._warned = True
            warnings.warn(
                f"{type(self.env).__name__} gives no extras['final_obs'], so the value after a timeout is taken from the "
                "observation before it, as rsl_rl does",
                stacklevel=2,
            )
        return self._last

    def _observations(self, obs: Any) -> dict[str, Tensor]:
        # Copies: some environments write into the tensors that they returned.
        return {group: obs[group].clone() for group in self.groups}


def _checked_groups(obs: Any, groups: Sequence[str] | None) -> list[str]:
    known = list(obs.keys())
    if groups is None:
        return known
    unknown = [group for group in groups if group not in known]
    if unknown or not groups or isinstance(groups, str):
        raise ValueError(f"groups is {groups!r}, expected some of the observation groups {', '.join(map(repr, known))}")
    return list(groups)


def _space(group: str, part: Any) -> gym.spaces.Box:
    if not isinstance(part, Tensor):
        raise TypeError(
            f"observation group {group!r} is a {type(part).__name__}, expected a tensor; leave it out with groups="
        )
    if part.dtype == torch.uint8:
        return gym.spaces.Box(0, 255, tuple(part.shape[1:]), np.uint8)
    return gym.spaces.Box(-np.inf, np.inf, tuple(part.shape[1:]), np.float32)
