"""Holdfast: reinforcement-learning policies that remember, right by construction, and fast.

This module lists the public names and holds the version. Everything else lives in the folders; docs/architecture.md
says which.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

try:
    from holdfast.checks import debug
    from holdfast.cores import (
        FFM,
        GRU,
        LRU,
        LSTM,
        MLSTM,
        Block,
        Core,
        Memoryless,
        MinGRU,
        Parallel,
        Stack,
        WindowAttention,
    )
    from holdfast.memory import Memory
    from holdfast.policies.base import Evaluation, PolicyOutput, RecurrentPolicy, Step
    from holdfast.rollout.advantages import gae, resets_from
    from holdfast.rollout.collector import Collector, collect
    from holdfast.rollout.segment import Segment
except KeyboardInterrupt:  # torch takes its time, and the command has no other place to catch Ctrl-C meanwhile
    if not (Path(sys.argv[0]).stem == "holdfast" or (sys.argv[0] == "-m" and "holdfast" in sys.orig_argv)):
        raise
    print("stopped", file=sys.stderr)
    sys.exit(130)

if TYPE_CHECKING:
    from holdfast import doctor as doctor
    from holdfast import envs as envs
    from holdfast import heads as heads
    from holdfast.algorithms.base import Algorithm
    from holdfast.algorithms.loss import Loss
    from holdfast.algorithms.on_policy import OnPolicy
    from holdfast.algorithms.ppo import ppo_loss
    from holdfast.config import OnPolicyConfig, PPOConfig, PQNConfig, RunConfig, TrainConfig, setting
    from holdfast.deploy.export import export_policy
    from holdfast.deploy.hub import push_to_hub, save_pretrained
    from holdfast.deploy.runner import Runner
    from holdfast.policies.actor_critic import ActorCritic
    from holdfast.policies.q_network import QNetwork
    from holdfast.profiling.profile import Profile
    from holdfast.runs.saved_policy import load
    from holdfast.training.callbacks import Callback
    from holdfast.training.evaluation import evaluate
    from holdfast.training.trainer import Trainer

__version__ = "0.2.0"

# Names that need gymnasium or more are imported at first use, so that `import holdfast` costs little more than torch.
_LAZY = {
    "ActorCritic": "holdfast.policies.actor_critic",
    "Callback": "holdfast.training.callbacks",
    "Profile": "holdfast.profiling.profile",
    "Runner": "holdfast.deploy.runner",
    "TrainConfig": "holdfast.config",
    "Trainer": "holdfast.training.trainer",
    "evaluate": "holdfast.training.evaluation",
    "export_policy": "holdfast.deploy.export",
    "load": "holdfast.runs.saved_policy",
    "push_to_hub": "holdfast.deploy.hub",
    "save_pretrained": "holdfast.deploy.hub",
    "Algorithm": "holdfast.algorithms.base",
    "Loss": "holdfast.algorithms.loss",
    "OnPolicy": "holdfast.algorithms.on_policy",
    "OnPolicyConfig": "holdfast.config",
    "PPOConfig": "holdfast.config",
    "PQNConfig": "holdfast.config",
    "QNetwork": "holdfast.policies.q_network",
    "RunConfig": "holdfast.config",
    "ppo_loss": "holdfast.algorithms.ppo",
    "setting": "holdfast.config",
    "doctor": "holdfast.doctor",
    "envs": "holdfast.envs",
    "heads": "holdfast.heads",
}

__all__ = [
    "FFM",
    "GRU",
    "LRU",
    "LSTM",
    "MLSTM",
    "ActorCritic",
    "Algorithm",
    "Block",
    "Callback",
    "Collector",
    "Core",
    "Evaluation",
    "Loss",
    "Memory",
    "Memoryless",
    "MinGRU",
    "OnPolicy",
    "OnPolicyConfig",
    "PPOConfig",
    "PQNConfig",
    "Parallel",
    "PolicyOutput",
    "Profile",
    "QNetwork",
    "RecurrentPolicy",
    "RunConfig",
    "Runner",
    "Segment",
    "Stack",
    "Step",
    "TrainConfig",
    "Trainer",
    "WindowAttention",
    "collect",
    "debug",
    "doctor",
    "evaluate",
    "export_policy",
    "gae",
    "load",
    "ppo_loss",
    "push_to_hub",
    "resets_from",
    "save_pretrained",
    "setting",
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
