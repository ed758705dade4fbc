"""Findings, and the outcome of each check: plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from holdfast.causes import CAUSES, Severity
from holdfast.doctor.report.patches import patch_for

DOCS = "docs/doctor.md"


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, with the measurement.

    `check`: which check found it. `cause`: one of `causes.CAUSES`. `evidence`: the measurement, with environment and
    step. `consequences`: findings of other checks that follow from this one. `patch`: the lines to change, before
    (`-`) and after (`+`), for the framework of the subject; empty if there is no such example.
    """

    check: str
    cause: str
    severity: Severity
    evidence: str
    fix: str
    url: str
    consequences: tuple[Finding, ...] = ()
    patch: str = ""

    @property
    def meaning(self) -> str:
        return CAUSES[self.cause].meaning

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "meaning": self.meaning, "consequences": [f.to_dict() for f in self.consequences]}


Status = Literal["passed", "failed", "not applicable", "not examined"]


@dataclass
class Outcome:
    """How one check ended. `said`: the number behind a pass, or the reason why it does not apply."""

    check: str
    protects: str
    status: Status
    said: str = ""
    findings: list[Finding] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """`status`, except that a check which found only warnings has not failed."""
        if self.status == "failed" and all(f.severity != "error" for f in self.findings):
            return "warning"
        return self.status


def make_finding(
    check: str, cause: str, evidence: str, severity: Severity | None = None, framework: str = "torch"
) -> Finding:
    """A finding with the fix, the patch, the severity and the address that belong to the cause and the check."""
    entry, patch = CAUSES[cause], patch_for(cause, framework)
    return Finding(check, cause, severity or entry.severity, evidence, entry.fix, f"{DOCS}#{check}", patch=patch)
