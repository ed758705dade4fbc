"""`PQNConfig`: settings of a run that learns by parallelized Q-learning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from holdfast.config.on_policy import OnPolicyConfig
from holdfast.config.settings import NearOne, override, setting


@dataclass
class PQNConfig(OnPolicyConfig):
    """Settings of a training run with PQN."""

    algorithm: str = override(OnPolicyConfig, "algorithm", "pqn")
    learning_rate: float = override(OnPolicyConfig, "learning_rate", 1e-3)
    normalize_reward: bool = override(OnPolicyConfig, "normalize_reward", True)
    activation: Literal["tanh", "relu", "silu", "gelu"] = override(OnPolicyConfig, "activation", "relu")
    q_lambda: float = setting(0.65, low=0, high=1, short="lambda", search=NearOne(4))
    """Lambda of the Q(lambda) targets: 0 is one-step Q-learning, 1 sums rewards to the end of the episode."""
    epsilon_start: float = setting(1.0, low=0, high=1)
    """Fraction of random actions in rollouts at the start."""
    epsilon_end: float = setting(0.02, low=0, high=1)
    """Fraction of random actions in rollouts at the end of the decay."""
    epsilon_decay: float = setting(0.3, low=0, high=1)
    """Part of the run over which the fraction of random actions falls."""
    dueling: bool = setting(False, short="dueling", about="network", fixed=True)
    """Let the network split Q into a value and advantages."""
    layer_norm: bool = setting(True, short="norm", about="network", fixed=True)
    """LayerNorm before the Q head, in place of a target network."""
