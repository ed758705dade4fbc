"""Settings and presets of every algorithm: plain data, without torch."""

from __future__ import annotations

from holdfast.config.on_policy import OnPolicyConfig
from holdfast.config.ppo import PPOConfig
from holdfast.config.pqn import PQNConfig
from holdfast.config.presets import PRESETS
from holdfast.config.run import RunConfig, config_class
from holdfast.config.settings import Setting, flag_of, given, named, named_as_flags, setting, settings_of

ALGORITHMS: dict[str, type[RunConfig]] = {"ppo": PPOConfig, "pqn": PQNConfig}
"""The config class of each algorithm of ours, by the name that `--algorithm` takes."""
TrainConfig = PPOConfig
"""The name that configs had when PPO was the only algorithm."""

__all__ = [
    "ALGORITHMS",
    "PRESETS",
    "OnPolicyConfig",
    "PPOConfig",
    "PQNConfig",
    "RunConfig",
    "Setting",
    "TrainConfig",
    "config_class",
    "flag_of",
    "given",
    "named",
    "named_as_flags",
    "setting",
    "settings_of",
]
