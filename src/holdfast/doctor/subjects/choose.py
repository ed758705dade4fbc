"""Chooses the subject for a policy that the doctor knows."""

from __future__ import annotations

from typing import Any

from torch import nn

from holdfast.doctor import subjects
from holdfast.doctor.subjects.base import Subject


def as_subject(thing: Any) -> Subject:
    """A subject as it is; a policy or module of a known kind in the subject for its kind."""
    if isinstance(thing, Subject):
        return thing
    if isinstance(thing, nn.RNNBase):
        return subjects.Module(thing)
    if hasattr(thing, "rollout_buffer") and hasattr(thing, "policy"):
        return subjects.SB3(thing)
    ours = _as_holdfast(thing)
    if ours is not None:
        return ours
    raise TypeError(
        f"the doctor does not know how {type(thing).__name__} is used. Wrap it in the subject for its form "
        "(holdfast.doctor.subjects: CleanRL, Stateful, Puffer, TorchRL, SB3, Module, ...), or write your own Subject: "
        "it takes four methods"
    )


def _as_holdfast(thing: Any) -> Subject | None:
    if not isinstance(thing, nn.Module):
        return None
    if all(hasattr(thing, name) for name in ("act", "evaluate", "peek_value", "core")):
        return subjects.Holdfast(thing)
    if all(hasattr(thing, name) for name in ("start_state", "reset_memory", "get_memory")):
        return subjects.TensorDictPolicy(thing)
    if all(hasattr(thing, name) for name in ("initial_state", "input_size", "output_size")):
        return subjects.Module(thing)
    return None
