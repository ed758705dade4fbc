"""Environments: memory tasks written in torch for any device, and a bridge to gymnasium and POPGym.

>>> import holdfast.envs
>>> env = holdfast.envs.make("holdfast/RepeatPreviousEasy-v0", num_envs=64)
>>> obs, info = env.reset(seed=1)

Importing this package registers the ids, so that `gymnasium.make_vec` and `gymnasium.make` know them too. It imports
nothing heavy: classes are imported at first use.
"""

from __future__ import annotations

from typing import Any

from holdfast.envs.bridge import UnknownEnvError, make
from holdfast.envs.catalog import EnvRow, list_envs, register_all

_CLASSES = {
    "TorchVectorEnv": "base",
    "Transition": "base",
    "RepeatPrevious": "repeat_previous",
    "RepeatFirst": "repeat_first",
    "PositionOnlyCartPole": "position_only_cartpole",
    "TMaze": "t_maze",
    "KeepObs": "observation_masks",
    "PositionMask": "observation_masks",
    "VelocityMask": "observation_masks",
    "WorkersVectorEnv": "workers",
    "NoisyPositionOnlyCartPole": "popgym.cartpole",
    "VelocityOnlyCartPole": "popgym.cartpole",
    "PositionOnlyPendulum": "popgym.pendulum",
    "NoisyPositionOnlyPendulum": "popgym.pendulum",
    "MultiarmedBandit": "popgym.multiarmed_bandit",
    "HigherLower": "popgym.higher_lower",
    "Autoencode": "popgym.autoencode",
    "CountRecall": "popgym.count_recall",
    "Concentration": "popgym.concentration",
    "Battleship": "popgym.battleship",
    "MineSweeper": "popgym.minesweeper",
    "LabyrinthEscape": "popgym.labyrinth",
    "LabyrinthExplore": "popgym.labyrinth",
    "NumpyView": "numpy_view",
    "from_pettingzoo": "pettingzoo",
    "from_rsl_rl": "rsl_rl",
    "from_jax": "jax.suites",
    "JaxEnv": "jax.protocol",
    "JaxVectorEnv": "jax.vector_env",
}

__all__ = ["EnvRow", "UnknownEnvError", "list_envs", "make", "register_all", *_CLASSES]

register_all()


def __getattr__(name: str) -> Any:
    if name in _CLASSES:
        from importlib import import_module

        return getattr(import_module(f"holdfast.envs.{_CLASSES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
