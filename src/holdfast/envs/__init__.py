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
    **{task: module for module, task in (row.entry_point.split(":") for row in list_envs())},
    "TorchVectorEnv": "holdfast.envs.base",
    "Transition": "holdfast.envs.base",
    "check": "holdfast.envs.contract",
    "KeepObs": "holdfast.envs.observation_masks",
    "PositionMask": "holdfast.envs.observation_masks",
    "VelocityMask": "holdfast.envs.observation_masks",
    "Trials": "holdfast.envs.trials",
    "WorkersVectorEnv": "holdfast.envs.workers",
    "NumpyView": "holdfast.envs.numpy_view",
    "from_pettingzoo": "holdfast.envs.pettingzoo",
    "from_rsl_rl": "holdfast.envs.rsl_rl",
    "from_jax": "holdfast.envs.jax.suites",
    "JaxEnv": "holdfast.envs.jax.protocol",
    "JaxVectorEnv": "holdfast.envs.jax.vector_env",
}

__all__ = ["EnvRow", "UnknownEnvError", "list_envs", "make", "register_all", *_CLASSES]

register_all()


def __getattr__(name: str) -> Any:
    if name in _CLASSES:
        from importlib import import_module

        return getattr(import_module(_CLASSES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
