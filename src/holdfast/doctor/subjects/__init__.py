"""Ready-made subjects: one file for each widespread way of writing a recurrent policy."""

import warnings
from typing import Any

from holdfast.doctor.subjects.base import NotOffered, RecordedSegment, Replay, Subject, SubjectStep
from holdfast.doctor.subjects.cleanrl import CleanRL
from holdfast.doctor.subjects.holdfast import Holdfast
from holdfast.doctor.subjects.jax import JAX
from holdfast.doctor.subjects.loop import Loop
from holdfast.doctor.subjects.module import Module
from holdfast.doctor.subjects.packed import Packed
from holdfast.doctor.subjects.puffer import Puffer
from holdfast.doctor.subjects.rllib import RLlib
from holdfast.doctor.subjects.rsl_rl import RslRl
from holdfast.doctor.subjects.sb3 import SB3
from holdfast.doctor.subjects.skrl import Skrl
from holdfast.doctor.subjects.stateful import Stateful
from holdfast.doctor.subjects.tensordict import TensorDictPolicy
from holdfast.doctor.subjects.torchrl import TorchRL

__all__ = [
    "JAX",
    "SB3",
    "CleanRL",
    "Holdfast",
    "Loop",
    "Module",
    "NotOffered",
    "Packed",
    "Puffer",
    "RLlib",
    "RecordedSegment",
    "Replay",
    "RslRl",
    "Skrl",
    "Stateful",
    "Subject",
    "SubjectStep",
    "TensorDictPolicy",
    "TorchRL",
]

_RENAMED: dict[str, type] = {"Segment": RecordedSegment, "Step": SubjectStep}  # since 0.1


def renamed(module: str, name: str) -> type:
    """The class that `name` was called in 0.1, with a warning. For `__getattr__` of a module."""
    if name not in _RENAMED:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    new = _RENAMED[name]
    warnings.warn(f"{module}.{name} is now called {new.__name__}", DeprecationWarning, stacklevel=3)
    return new


def __getattr__(name: str) -> Any:
    return renamed(__name__, name)
