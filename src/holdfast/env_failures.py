"""`RebuildingEnv` under its documented name. The code is in `rollout/env_failures.py` and `training/training_env.py`."""

from holdfast.rollout.env_failures import EnvFailedError, RebuildingEnv
from holdfast.training.training_env import FailureLog, training_env

__all__ = ["EnvFailedError", "FailureLog", "RebuildingEnv", "training_env"]
