"""`RebuildingEnv` under its documented name. The code is in `rollout/env_failures.py`."""

from holdfast.rollout.env_failures import EnvFailedError, FailureLog, RebuildingEnv, training_env

__all__ = ["EnvFailedError", "FailureLog", "RebuildingEnv", "training_env"]
