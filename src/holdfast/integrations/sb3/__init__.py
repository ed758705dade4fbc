"""Stable-Baselines3: `RecurrentPPO`, a drop-in for `sb3_contrib.RecurrentPPO` that is several times faster.

    from holdfast.integrations.sb3 import RecurrentPPO        # was: from sb3_contrib import RecurrentPPO

Rollouts, callbacks, logging, saving and the loss are sb3-contrib's own code. Replaced are the recurrence (any Holdfast
core, resets inside the sequence) and the cutting of a rollout into training sequences. Added are action masks, GRU, and
memory in checkpoints. Needs the extra `sb3`.
"""

from __future__ import annotations

try:
    from holdfast.integrations.sb3.policies import CnnLstmPolicy, CorePolicy, MlpLstmPolicy, MultiInputLstmPolicy
    from holdfast.integrations.sb3.ppo import RecurrentPPO
except ModuleNotFoundError as error:
    if error.name not in ("stable_baselines3", "sb3_contrib"):
        raise
    raise ModuleNotFoundError(f"{error}; install it with: pip install 'holdfast[sb3]'", name=error.name) from error

__all__ = ["CnnLstmPolicy", "CorePolicy", "MlpLstmPolicy", "MultiInputLstmPolicy", "RecurrentPPO"]
