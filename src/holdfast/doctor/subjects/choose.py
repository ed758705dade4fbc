"""Chooses the subject for a policy that the doctor knows."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from holdfast.doctor import subjects
from holdfast.doctor.observations import Observations
from holdfast.doctor.subjects.base import Subject
from holdfast.doctor.subjects.recognize import recognize

FORMS = "docs/doctor.md#the-forms-of-a-policy"


def as_subject(thing: Any, observation_space: Any = None) -> Subject:
    """A subject as it is; a policy or module of a known kind in the subject for its kind.

    `observation_space`: what the policy observes, if it is not what it says or what fits its first layer.
    """
    if isinstance(thing, Subject):
        if observation_space is not None:
            thing.space = Observations(observation_space)
        return thing
    if isinstance(thing, nn.RNNBase):
        return subjects.Module(thing, observation_space)
    if hasattr(thing, "rollout_buffer") and hasattr(thing, "policy"):
        return subjects.SB3(thing)
    ours = _as_holdfast(thing, observation_space)
    subject = ours or recognize(thing, observation_space)
    if subject is not None:
        return subject
    raise TypeError(
        f"the doctor does not know how {_called(thing)} is used. Return it in the subject for its form, such as "
        "subjects.Module(policy, (4,)) for (x, state) -> (y, state) or subjects.Stateful(policy, hidden='h') for a state "
        "kept as an attribute (from holdfast.doctor import subjects), or in your own Subject, which has four methods: "
        f"see the documentation, {FORMS}. If it observes something else than one tensor, set its `observation_space`"
    )


def _called(thing: Any) -> str:
    """A class with what its call takes, or without a call with its methods."""
    name = type(thing).__name__
    if not isinstance(thing, nn.Module):
        return name
    if type(thing).forward is not nn.Module.forward:
        return f"{name}, forward{inspect.signature(thing.forward)},"
    own = [m for m in vars(type(thing)) if not m.startswith("_")]
    return f"{name}, which has no forward ({', '.join(own) or 'and no methods'}),"


def _as_holdfast(thing: Any, space: Any) -> Subject | None:
    if not isinstance(thing, nn.Module):
        return None
    if all(hasattr(thing, name) for name in ("act", "evaluate", "peek_value", "core")):
        return subjects.Holdfast(thing, space)
    if all(hasattr(thing, name) for name in ("start_state", "reset_memory", "get_memory")):
        return subjects.TensorDictPolicy(thing, space)
    if all(hasattr(thing, name) for name in ("initial_state", "input_size", "output_size")):
        return subjects.Module(thing, space)
    return None
