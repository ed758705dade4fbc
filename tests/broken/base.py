"""What a broken policy is, and what must be said about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from holdfast.doctor import Subject

OBS, HIDDEN, ACTIONS, ENVS = 4, 16, 3, 5


@dataclass
class Sizes:
    """The sizes of the policies that are built next. Tests leave them alone; benchmarks/doctor_accuracy.py draws others."""

    obs: int = OBS
    hidden: int = HIDDEN
    actions: int = ACTIONS
    envs: int = ENVS


size = Sizes()


@dataclass(frozen=True)
class Broken:
    """A policy with one mistake, and a healthy twin that differs in nothing else.

    `case`: the number in the list of things that a recurrent policy must get right. `does`: what it does wrong.

    What must be said about it:
    `doctor`: the cause that the doctor names, with its `severity`; None if the doctor cannot see the mistake.
    `conformance`: the tests of the suite that fail. Only policies of Holdfast can be put through it.
    `replay_check`: words of the error that stops a training run; None if the run is not stopped, because law 1 holds
    in spite of the mistake, or because the mistake is not part of a run.
    """

    name: str
    case: int
    does: str
    doctor: str | None
    subject: Callable[[], Subject]
    healthy: Callable[[], Subject]
    severity: str = "error"
    driver: Callable[[], Any] | None = None
    conformance: tuple[str, ...] = ()
    replay_check: str | None = None


def first_line(kind: type) -> str:
    """What a broken class does wrong, as its docstring says."""
    assert kind.__doc__, f"{kind.__name__} does not say what it does wrong"
    return kind.__doc__.splitlines()[0]


def late_by_one(flags: Tensor) -> Tensor:
    """`[T, B]`, each flag one step later."""
    return torch.cat([torch.zeros_like(flags[:1]), flags[:-1]])


def early_by_one(flags: Tensor) -> Tensor:
    """`[T, B]`, each flag one step earlier."""
    return torch.cat([flags[1:], torch.zeros_like(flags[:1])])
