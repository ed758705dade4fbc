"""What a check is, and the list of checks that the other modules of this folder fill."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.causes import CAUSES
from holdfast.doctor.report.findings import Finding, make_finding
from holdfast.doctor.script import STEPS

if TYPE_CHECKING:
    from holdfast.doctor.comparison import Difference
    from holdfast.doctor.recordings import Recordings

#: in the place of an earlier cause: the finding follows from nothing else
ITSELF = "itself"
CARRIES_ON = "by declaration: memory continues across episodes"


class NotApplicable(Exception):
    """The check has nothing to look at in this subject. The text says why."""


@dataclass
class Case:
    """What a check receives: the recordings, and a way to report what it found.

    `earlier`: the causes that earlier checks reported.
    """

    recordings: Recordings
    check: str
    findings: list[tuple[Finding, str | None]]
    earlier: frozenset[str]

    def report(
        self,
        cause: str,
        evidence: str,
        because_of: str | None = None,
        *,
        removed: bool = False,
        explained: bool = False,
    ) -> str:
        """Add a finding. Returns "", what a check says that did not pass.

        `because_of`: an earlier cause that it follows from, or "any".

        `removed`: the mistake has no effect on later checks, because the doctor took it out of its copy. `explained`: a
        rule reproduces the whole run, so this is a mistake of its own, whatever else was found.
        """
        assert cause in CAUSES, cause
        framework = self.recordings.subject.framework
        self.findings.append(
            (
                make_finding(self.check, cause, evidence, framework=framework),
                because_of or (ITSELF if explained else None),
            )
        )
        if removed:
            self.recordings.removed.add(cause)
        return ""


@dataclass(frozen=True)
class Check:
    """`run` reports findings through the case, and returns a sentence with the number behind a pass."""

    name: str
    protects: str
    run: Callable[[Case], str]
    extra: bool = False


REGISTRY: list[Check] = []


def check(name: str, protects: str, *, extra: bool = False) -> Callable[[Callable[[Case], str]], Callable[[Case], str]]:
    """Register a check. `extra`: it runs only when asked for."""

    def register(function: Callable[[Case], str]) -> Callable[[Case], str]:
        REGISTRY.append(Check(name, protects, function, extra))
        return function

    return register


def place(step: int, row: int) -> str:
    """A step of the script in words."""
    return f"env {row}, t={step} (segment {step // STEPS}, its step {step % STEPS})"


def by_how_much(difference: Difference, first: int = 0) -> str:
    """The size of a difference and its first place in words. `first`: the step of the script that its recordings begin with."""
    step, row = difference.where.nonzero()[0].tolist()
    return f"by up to {difference.largest:.2g}, first at {place(first + step, row)}"


def first_line(error: Exception) -> str:
    """The first line of an error message, shortened."""
    line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return line if len(line) <= 110 else line[:110].rsplit(" ", 1)[0] + " ..."
