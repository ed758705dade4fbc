"""Holdfast's memory and update inside rsl_rl (Isaac Lab, mjlab, Legged Gym): three strings of a training config.

    train_cfg["actor"]["class_name"] = "holdfast.integrations.rsl_rl:RNNModel"       # was "RNNModel"
    train_cfg["critic"]["class_name"] = "holdfast.integrations.rsl_rl:RNNModel"
    train_cfg["algorithm"]["class_name"] = "holdfast.integrations.rsl_rl:PPO"        # was "PPO"

`OnPolicyRunner` and everything around it stay rsl_rl's. Needs `pip install 'holdfast[rsl_rl]'`; rsl_rl 5.
"""

try:
    import rsl_rl  # noqa: F401
except ModuleNotFoundError as missing:
    raise ImportError(f"holdfast.integrations.rsl_rl needs {missing.name}: pip install 'holdfast[rsl_rl]'") from missing

from holdfast.integrations.rsl_rl.models import RNNModel
from holdfast.integrations.rsl_rl.ppo import PPO

__all__ = ["PPO", "RNNModel"]
