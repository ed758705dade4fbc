"""`R2D2Config`: settings of a run that learns Q values from prioritized sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from holdfast.config.off_policy import OffPolicyConfig
from holdfast.config.settings import override, setting


@dataclass
class R2D2Config(OffPolicyConfig):
    """Settings of a training run with R2D2."""

    algorithm: str = override(OffPolicyConfig, "algorithm", "r2d2")
    head_sizes: tuple[int, ...] | None = override(OffPolicyConfig, "head_sizes", (128,))
    learning_rate: float = override(OffPolicyConfig, "learning_rate", 1e-3)
    lr_schedule: Literal["constant", "linear", "cosine"] | str = override(OffPolicyConfig, "lr_schedule", "linear")
    max_grad_norm: float = override(OffPolicyConfig, "max_grad_norm", 10.0)
    batch_size: int = override(OffPolicyConfig, "batch_size", 32)
    train_length: int = override(OffPolicyConfig, "train_length", 32)
    burn_in: int = override(OffPolicyConfig, "burn_in", 32)
    update_ratio: float = override(OffPolicyConfig, "update_ratio", 0.0625)
    n_step: int = setting(5, low=1, short="n")
    """Rewards in a target before the next Q value."""
    target_every: int = setting(200, low=1, short="target")
    """Gradient steps between copies of the network to the target network."""
    rescale: bool = setting(True, short="rescale")
    """Learn values of which large ones are compressed, about like their square root."""
    epsilon: float = setting(0.4, low=0, high=1, short="eps")
    """Fraction of random actions in the environment that explores most."""
    epsilon_spread: float = setting(7.0, low=0, short="spread")
    """Environment i of n explores with epsilon ** (1 + i / (n - 1) * epsilon_spread)."""
    prioritized: bool = setting(True, short="prioritized", fixed=True)
    """Draw sequences with large errors more often."""
    dueling: bool = setting(True, short="dueling", about="network", fixed=True)
    """Let the network split Q into a value and advantages."""
    layer_norm: bool = setting(False, short="norm", about="network", fixed=True)
    """LayerNorm before and after the core."""
