"""Holdfast: reinforcement-learning policies that remember, right by construction, and fast."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from holdfast.checks import debug

# Not lazily: importing a module named like its function would otherwise put the module in the function's place.
from holdfast.collect import Collector, Segment, collect
from holdfast.cores import GRU, LSTM, Core, Memoryless, Parallel, Stack
from holdfast.gae import gae, resets_from
from holdfast.memory import Memory
from holdfast.policy import Evaluation, RecurrentPolicy, Step

if TYPE_CHECKING:
    from holdfast import doctor as doctor
    from holdfast.actor_critic import ActorCritic
    from holdfast.config import TrainConfig
    from holdfast.evaluation import evaluate
    from holdfast.export import export_policy
    from holdfast.ppo import ppo_loss
    from holdfast.profile import Profile
    from holdfast.runner import Runner
    from holdfast.saved_policy import load
    from holdfast.trainer import Callback, Trainer

__version__ = "0.1.0"

# What needs gymnasium or more is imported when it is first used: `import holdfast` costs little more than torch.
_LAZY = {
    "ActorCritic": "holdfast.actor_critic",
    "Callback": "holdfast.trainer",
    "Profile": "holdfast.profile",
    "Runner": "holdfast.runner",
    "TrainConfig": "holdfast.config",
    "Trainer": "holdfast.trainer",
    "evaluate": "holdfast.evaluation",
    "export_policy": "holdfast.export",
    "load": "holdfast.saved_policy",
    "ppo_loss": "holdfast.ppo",
    "doctor": "holdfast.doctor",
}

__all__ = [
    "GRU",
    "LSTM",
    "ActorCritic",
    "Callback",
    "Collector",
    "Core",
    "Evaluation",
    "Memory",
    "Memoryless",
    "Parallel",
    "Profile",
    "RecurrentPolicy",
    "Runner",
    "Segment",
    "Stack",
    "Step",
    "TrainConfig",
    "Trainer",
    "collect",
    "debug",
    "doctor",
    "evaluate",
    "export_policy",
    "gae",
    "load",
    "ppo_loss",
    "resets_from",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    module = importlib.import_module(_LAZY[name])
    value = module if _LAZY[name] == f"holdfast.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
