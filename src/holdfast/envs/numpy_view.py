"""`NumpyView`: an environment written in torch, seen as one that uses numpy arrays.

gymnasium's vector wrappers (`RecordEpisodeStatistics`, `NormalizeReward`, `DictInfoToList`, ...) compute in numpy and
fail on tensors. They work on this view. The trainer needs none of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv, VectorWrapper

from holdfast.state import map_tensors, tree_map


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
        info = _arrays(info)
        if "final_obs" in info:
            info["final_obs"] = readable_final_obs(info["final_obs"], info["_final_obs"])
        return _arrays(obs), _arrays(rewards), _arrays(terminated), _arrays(truncated), info

    def state_dict(self) -> dict[str, Any]:
        """As the environment's own."""
        return self.env.state_dict()  # type: ignore[attr-defined]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the environment's own."""
        self.env.load_state_dict(state_dict)  # type: ignore[attr-defined]


def _arrays(tree: Any) -> Any:
    return map_tensors(lambda t: t.cpu().numpy().copy(), tree)  # a wrapper may change what it is given in place


def readable_final_obs(final: Any, ended: np.ndarray[Any, Any]) -> Any:
    """Final observations as gymnasium's wrappers read them: with a tuple inside, one observation per row, None elsewhere."""
    if not _holds_a_tuple(final):
        return final
    rows = np.full(len(ended), None, dtype=object)
    for row in ended.nonzero()[0]:
        rows[row] = tree_map(lambda part, row=row: part[row], final)
    return rows


def _holds_a_tuple(tree: Any) -> bool:
    return isinstance(tree, tuple) or (isinstance(tree, dict) and any(map(_holds_a_tuple, tree.values())))
