"""Settings and presets of every algorithm: plain data, without torch."""

from __future__ import annotations

from typing import Any

from holdfast.config.off_policy import OffPolicyConfig
from holdfast.config.on_policy import OnPolicyConfig
from holdfast.config.ppo import PPOConfig
from holdfast.config.pqn import PQNConfig
from holdfast.config.presets import PRESETS
from holdfast.config.r2d2 import R2D2Config
from holdfast.config.run import BEFORE_ALGORITHMS, RunConfig, config_class
from holdfast.config.sac import SACConfig
from holdfast.config.settings import (
    Setting,
    flag_of,
    given,
    named,
    named_as_flags,
    names_about,
    override,
    setting,
    settings_of,
)

ALGORITHMS: dict[str, type[RunConfig]] = {
    "ppo": PPOConfig,
    "pqn": PQNConfig,
    "sac": SACConfig,
    "r2d2": R2D2Config,
}
"""The config class of each algorithm of ours, by the name that `--algorithm` takes."""


def default_config(**settings: Any) -> RunConfig:
    """A config of the algorithm that is used if none is named."""
    return config_class(BEFORE_ALGORITHMS)(**settings)


TrainConfig = PPOConfig
"""The name that configs had when PPO was the only algorithm."""

__all__ = [
    "ALGORITHMS",
    "PRESETS",
    "OffPolicyConfig",
    "OnPolicyConfig",
    "PPOConfig",
    "PQNConfig",
    "R2D2Config",
    "RunConfig",
    "SACConfig",
    "Setting",
    "TrainConfig",
    "config_class",
    "default_config",
    "flag_of",
    "given",
    "named",
    "named_as_flags",
    "names_about",
    "override",
    "setting",
    "settings_of",
]
