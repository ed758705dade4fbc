"""`SACConfig`: settings of a run that learns by soft actor-critic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from holdfast.config.off_policy import OffPolicyConfig
from holdfast.config.settings import override, setting


@dataclass
class SACConfig(OffPolicyConfig):
    """Settings of a training run with SAC."""

    algorithm: str = override(OffPolicyConfig, "algorithm", "sac")
    critic_core: Literal["shared", "separate", "none"] = override(OffPolicyConfig, "critic_core", "separate")
    max_grad_norm: float = override(OffPolicyConfig, "max_grad_norm", 1.0)
    actor_learning_rate: float | None = setting(None, low=0, above=True, short="actor-lr")
    """Learning rate of the actor's encoder and head; None: learning_rate."""
    critic_learning_rate: float | None = setting(None, low=0, above=True, short="critic-lr")
    """Learning rate of the critics' encoder and heads; None: learning_rate."""
    temperature_learning_rate: float | None = setting(None, low=0, above=True, short="temperature-lr")
    """Learning rate of the temperature; None: learning_rate."""
    critics: int = setting(2, low=1, high=100, short="critics", about="network", fixed=True)
    """Number of Q heads."""
    target_critics: int = setting(2, low=1, high=100, short="target-critics")
    """How many of them are drawn for a target, at most; it takes the smallest."""
    tau: float = setting(0.005, low=0, high=1, above=True, short="tau")
    """How much of the distance to the critics their target copy moves after a gradient step."""
    initial_temperature: float = setting(1.0, low=0, above=True, short="temperature")
    """Weight of the entropy at the start."""
    learn_temperature: bool = setting(True, short="learn-temperature", fixed=True)
    """Let the temperature follow the target entropy."""
    target_entropy: float | None = setting(None, unbounded="entropies can be any number", short="entropy")
    """Entropy that the temperature keeps; None: minus the number of actions of a Box, 0.89 log(allowed) of a Discrete."""
    skip: bool = setting(True, short="skip", about="network", fixed=True)
    """Let heads read the encoder's output besides the core's."""
