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
    from holdfast.kernels.linear import linear_recurrence
    from holdfast.memory import Memory
    from holdfast.policies.base import Evaluation, PolicyOutput, RecurrentPolicy, Step
    from holdfast.rollout.advantages import gae, resets_from, segment_advantages
    from holdfast.rollout.collector import Collector, collect
    from holdfast.rollout.segment import Segment
    from holdfast.state import RowShape
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
    from holdfast.algorithms.off_policy import OffPolicy
    from holdfast.algorithms.on_policy import OnPolicy
    from holdfast.algorithms.ppo import ppo_loss
    from holdfast.algorithms.reward_model import RewardModel
    from holdfast.config import (
        OffPolicyConfig,
        OnPolicyConfig,
        PPOConfig,
        PQNConfig,
        R2D2Config,
        RunConfig,
        SACConfig,
        TrainConfig,
        setting,
    )
    from holdfast.deploy.export import export_policy
    from holdfast.deploy.hub import push_to_hub, save_pretrained
    from holdfast.deploy.runner import Runner
    from holdfast.policies.actor_critic import ActorCritic
    from holdfast.policies.q_network import QNetwork
    from holdfast.policies.soft_actor_critic import SoftActorCritic
    from holdfast.profiling.profile import Profile
    from holdfast.rollout.buffer import SequenceBuffer
    from holdfast.runs.saved_policy import load
    from holdfast.training.callbacks import Callback
    from holdfast.training.evaluation import evaluate
    from holdfast.training.trainer import Trainer

__version__ = "0.2.0"

# Names that need gymnasium or more are imported at first use, so that `import holdfast` costs little more than torch.
_FROM = {
    "algorithms.base": ("Algorithm",),
    "algorithms.loss": ("Loss",),
    "algorithms.off_policy": ("OffPolicy",),
    "algorithms.on_policy": ("OnPolicy",),
    "algorithms.ppo": ("ppo_loss",),
    "algorithms.reward_model": ("RewardModel",),
    "config": (
        "OffPolicyConfig",
        "OnPolicyConfig",
        "PPOConfig",
        "PQNConfig",
        "R2D2Config",
        "RunConfig",
        "SACConfig",
        "TrainConfig",
        "setting",
    ),
    "deploy.export": ("export_policy",),
    "deploy.hub": ("push_to_hub", "save_pretrained"),
    "deploy.runner": ("Runner",),
    "policies.actor_critic": ("ActorCritic",),
    "policies.q_network": ("QNetwork",),
    "policies.soft_actor_critic": ("SoftActorCritic",),
    "profiling.profile": ("Profile",),
    "rollout.buffer": ("SequenceBuffer",),
    "runs.saved_policy": ("load",),
    "training.callbacks": ("Callback",),
    "training.evaluation": ("evaluate",),
    "training.trainer": ("Trainer",),
}
_LAZY = {name: f"holdfast.{module}" for module, names in _FROM.items() for name in names}
_MODULES = ("doctor", "envs", "heads")

__all__ = [
    "FFM", "GRU", "LRU", "LSTM", "MLSTM", "ActorCritic", "Algorithm", "Block", "Callback", "Collector", "Core",
    "Evaluation", "Loss", "Memory", "Memoryless", "MinGRU", "OffPolicy", "OffPolicyConfig", "OnPolicy",
    "OnPolicyConfig", "PPOConfig", "PQNConfig", "Parallel", "PolicyOutput", "Profile", "QNetwork", "R2D2Config",
    "RecurrentPolicy", "RewardModel", "RowShape", "RunConfig", "Runner", "SACConfig", "Segment", "SequenceBuffer",
    "SoftActorCritic", "Stack", "Step", "TrainConfig", "Trainer", "WindowAttention", "collect", "debug", "doctor",
    "evaluate", "export_policy", "gae", "linear_recurrence", "load", "ppo_loss", "push_to_hub", "resets_from",
    "save_pretrained", "segment_advantages", "setting",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"holdfast.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
