"""Why an environment failed inside gymnasium: which rule of gymnasium's interface it breaks, in words.

Nothing is run to find out. The traceback shows what gymnasium was doing, and the vector environment still holds the
observations that did not fit.
"""

from __future__ import annotations

import re
from typing import Any

import gymnasium as gym
import numpy as np

from holdfast.envs.user_envs import NO_REWARD

_FRAME = re.compile(r'  File "([^"]+)", line \d+, in \w+\n((?:    .*\n)*)')
_ONE_NUMBER = "step() must return the reward as one number"
_RESULTS = {
    "2": "reset() must return two things: observation, info",
    "5": "step() must return five things: observation, reward, terminated, truncated, info",
}


def broken_rule(report: str, vector_env: Any) -> str | None:
    """The rule that the environment breaks, and what to write instead; None if it failed by itself.

    report: a traceback. vector_env: the one it comes from.
    """
    error = report.strip().splitlines()[-1]
    if error.endswith(NO_REWARD):
        return f"{_ONE_NUMBER}, got None"
    frames = [(file, code) for file, code in _FRAME.findall(report) if "numpy" not in file]
    if not frames or "gymnasium" not in frames[-1][0]:  # the environment's own code raised
        return None
    file, code = frames[-1]
    if "unexpected keyword argument 'seed'" in error or "unexpected keyword argument 'options'" in error:
        return "reset() takes no seed; write reset(self, *, seed=None, options=None) and call super().reset(seed=seed)"
    if unpacked := re.search(r"to unpack \(expected (\d)", error):
        return _RESULTS.get(unpacked[1])
    if "_rewards[" in code:
        return _ONE_NUMBER
    if file.endswith("shared_memory.py"):  # in a process of its own, which is gone
        return f"the observation does not fit observation_space ({error})"
    return _misfit(vector_env) if file.endswith("space_utils.py") else None


def _misfit(vector_env: Any) -> str | None:
    """What is wrong with the first observation that is not in its space."""
    space = getattr(vector_env, "single_observation_space", None)
    for obs in getattr(vector_env.unwrapped, "_env_obs", None) or ():
        if obs is not None and space is not None and (problem := _difference(obs, space)):
            return f"{problem}; change observation_space or what reset() and step() return"
    return None


def _difference(obs: Any, space: gym.Space[Any], where: str = "the observation") -> str | None:
    if isinstance(space, gym.spaces.Dict):
        if not isinstance(obs, dict):
            return f"{where} is a {type(obs).__name__}, observation_space says {space}"
        if missing := [key for key in space if key not in obs]:
            return f"{where} has no {missing[0]!r}, observation_space has"
        return next((text for key in space if (text := _difference(obs[key], space[key], f"{where}[{key!r}]"))), None)
    if isinstance(space, gym.spaces.Tuple):
        pairs = zip(obs, space)
        return next((text for i, (o, s) in enumerate(pairs) if (text := _difference(o, s, f"{where}[{i}]"))), None)
    if space.shape is not None and np.shape(obs) != space.shape:
        return f"{where} has shape {np.shape(obs)}, observation_space says {space.shape}"
    return None
