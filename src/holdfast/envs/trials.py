"""`Trials`: several episodes of one task as one trial, for memory across episodes (RL squared)."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from holdfast.envs.observation_masks import Wrapper


class Trials(gym.Wrapper[Any, Any, Any, Any], gym.utils.RecordConstructorArgs):
    """Plays `episodes` episodes of the same task, which the learner sees as one: a trial.

    Memory, previous action, previous reward and credit run through a trial; resets come between trials. Each trial has a seed, and
    each of its episodes begins with `reset(seed=...)`: what the environment draws there from `np_random` (a maze, the arms of a
    bandit) stays, what it draws in a step does not. For an environment that keeps its task by itself write `begin_next`.

    An observation is a Dict with `episode_start`, 1 where an episode begins, and `obs`; a Dict keeps its keys. The first observation
    of the next episode takes the place of an episode's last one. The ends of inner episodes, terminated or truncated, are no ends
    for the learner: its return sums all episodes as they were played, and what a time limit cut off counts nowhere. The flags of the
    last episode are those of the trial: if a time limit ends it, its value is bootstrapped, as if that episode went on.

    `info["trial_returns"]` holds the return of each episode when a trial is over.

    >>> env = Trials(gym.make("CartPole-v1"), episodes=3)
    >>> sorted(env.observation_space)
    ['episode_start', 'obs']
    """

    def __init__(self, env: gym.Env[Any, Any], episodes: int) -> None:
        if isinstance(episodes, bool) or not isinstance(episodes, int) or episodes < 1:
            raise ValueError(f"episodes is {episodes!r}; expected the number of episodes in a trial, at least 1")
        gym.utils.RecordConstructorArgs.__init__(self, episodes=episodes)
        gym.Wrapper.__init__(self, env)
        self.episodes = episodes
        space = env.observation_space
        parts = space.spaces if isinstance(space, spaces.Dict) else {"obs": space}
        if "episode_start" in parts:
            raise ValueError(f"the observations of {env} have a part episode_start already; rename it")
        self.observation_space = spaces.Dict({**parts, "episode_start": spaces.Box(0.0, 1.0, (1,), np.float32)})
        inputs = ("obs", "prev_action", "prev_reward")
        self.metadata = {**(env.metadata or {}), "inputs": inputs, "trial_episodes": episodes}
        self._seeds: np.random.Generator | None = None  # made at the first reset: copies of this object draw their own
        self.returns: list[float] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin a trial. `seed` seeds its task and all that follow."""
        if seed is not None or self._seeds is None:
            self._seeds = np.random.default_rng(seed)
        self.trial_seed, self.options = int(self._seeds.integers(2**31)), options
        self.returns = [0.0]
        obs, info = self._begin()
        return self._seen(obs, True), info

    def begin_next(self) -> tuple[Any, dict[str, Any]]:
        """Reset for the next episode of the same trial, number `len(self.returns)`. By default with the trial's seed."""
        return self._begin()

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.returns[-1] += float(reward or 0.0)  # who returns None hears of it from the vector environment
        if not (terminated or truncated):
            return self._seen(obs, False), reward, False, False, info
        if len(self.returns) == self.episodes:
            info = {**info, "trial_returns": np.array(self.returns)}
            return self._seen(obs, False), reward, terminated, truncated, info
        self.returns.append(0.0)
        obs, first_info = self.begin_next()
        return self._seen(obs, True), reward, False, False, {**info, **first_info}

    def _begin(self) -> tuple[Any, dict[str, Any]]:
        assert self._seeds is not None
        obs, info = self.env.reset(seed=self.trial_seed, options=self.options)
        self.np_random = np.random.default_rng(self._seeds.integers(2**63))  # so that chance differs between episodes
        return obs, info

    def _seen(self, obs: Any, start: bool) -> Any:
        parts = obs if isinstance(self.env.observation_space, spaces.Dict) else {"obs": obs}
        return {**parts, "episode_start": np.full(1, start, np.float32)}


def around(mask: Wrapper | None, episodes: int) -> Wrapper | None:
    """A mask, and trials of so many episodes around it."""
    return mask if episodes == 1 else partial(_masked_trials, mask, episodes)


def _masked_trials(mask: Wrapper | None, episodes: int, env: gym.Env[Any, Any]) -> Trials:
    return Trials(env if mask is None else mask(env), episodes)
