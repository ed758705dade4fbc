from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from holdfast.doctor import Subject

OBS, HIDDEN, ACTIONS = 4, 16, 3


@dataclass(frozen=True)
class Patient:
    """`case`: the number in the list of things a recurrent policy must get right. `cause`: what the doctor must say."""

    name: str
    case: int
    cause: str
    sick: Callable[[], Subject]
    healthy: Callable[[], Subject]
    severity: str = "error"
