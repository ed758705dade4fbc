"""The action distributions of `hf.ActorCritic`, under their documented name; they live in `policies/heads.py`."""

from holdfast.policies.heads import *  # noqa: F403
