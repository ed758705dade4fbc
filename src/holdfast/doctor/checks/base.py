"""What a check is, and the list that the modules beside this one fill."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.doctor.causes import CAUSES
from holdfast.doctor.findings import Finding, finding

if TYPE_CHECKING:
    from holdfast.doctor.exam import Exam


class NotApplicable(Exception):
    """The check has nothing to look at in this subject. The text says why."""


@dataclass
class Case:
    """What a check is given: the exam, and a way to say what it found."""

    exam: Exam
    check: str
    findings: list[tuple[Finding, str | None]]
    earlier: frozenset[str]

    def report(self, cause: str, evidence: str, because_of: str | None = None) -> None:
        """Adds a finding; `because_of` names an earlier cause that it follows from."""
        assert cause in CAUSES, cause
        self.findings.append((finding(self.check, cause, evidence), because_of))


@dataclass(frozen=True)
class Check:
    """`run` returns a sentence with the figure behind a pass; it reports findings through the case."""

    name: str
    protects: str
    run: Callable[[Case], str]
    extra: bool = False


REGISTRY: list[Check] = []


def check(name: str, protects: str, *, extra: bool = False) -> Callable[[Callable[[Case], str]], Callable[[Case], str]]:
    """Registers a check. `extra`: runs only when asked for."""

    def register(function: Callable[[Case], str]) -> Callable[[Case], str]:
        REGISTRY.append(Check(name, protects, function, extra))
        return function

    return register


def place(step: int, row: int) -> str:
    """A step of the script in words."""
    from holdfast.doctor.script import STEPS

    return f"env {row}, t={step} (segment {step // STEPS}, its step {step % STEPS})"
