"""`NumpyView`: an environment written in torch, seen as one that uses numpy arrays.

gymnasium's vector wrappers (`RecordEpisodeStatistics`, `NormalizeReward`, `DictInfoToList`, ...) compute in numpy and
fail on tensors. They work on this view. The trainer needs none of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv, VectorWrapper

from holdfast.state import map_tensors


class NumpyView(VectorWrapper):  # generic in newer gymnasium only
    """The same environment; `reset` and `step` return arrays, on the CPU, instead of tensors.

    >>> import holdfast.envs
    >>> from gymnasium.wrappers.vector import RecordEpisodeStatistics
    >>> env = RecordEpisodeStatistics(NumpyView(holdfast.envs.make("holdfast/TMaze-v0", num_envs=2)))
    >>> type(env.reset(seed=1)[0])
    <class 'numpy.ndarray'>
    """

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        super().__init__(env)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(seed=seed, options=options)
        return _arrays(obs), _arrays(info)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        obs, rewards, terminated, truncated, info = self.env.step(np.asarray(actions))
        return _arrays(obs), _arrays(rewards), _arrays(terminated), _arrays(truncated), _arrays(info)

    def state_dict(self) -> dict[str, Any]:
        """As the environment's own."""
        return self.env.state_dict()  # type: ignore[attr-defined]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the environment's own."""
        self.env.load_state_dict(state_dict)  # type: ignore[attr-defined]


def _arrays(tree: Any) -> Any:
    return map_tensors(lambda t: t.cpu().numpy().copy(), tree)  # a wrapper may change what it is given in place
