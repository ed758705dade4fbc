"""A pytest plugin: `pytest --holdfast-doctor my_package.my_module:make_policy`, one test for each check of the doctor.

This module stands outside the package `holdfast` so that pytest can load it without torch: nothing heavy is imported
until the flag is given.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from holdfast.doctor.report import Finding, Outcome, Report


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("holdfast", "Holdfast's doctor of recurrent policies")
    group.addoption(
        "--holdfast-doctor",
        action="append",
        default=[],
        metavar="MODULE:FACTORY",
        help="examine this policy, as `holdfast doctor` does: one test for each check (can be given several times)",
    )
    group.addoption(
        "--holdfast-doctor-seed", type=int, default=0, metavar="N", help="seed for weights and data of the examination"
    )


def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    for target in config.getoption("--holdfast-doctor"):
        patient = Patient.from_parent(session, name=target, nodeid=f"holdfast-doctor[{target}]", target=target)
        items.extend(patient.collect())


class Patient(pytest.Collector):
    """A policy, examined once, when its first test runs."""

    def __init__(self, target: str, **options: Any) -> None:
        super().__init__(**options)
        self.target = target
        self._report: Report | None = None
        self._could_not: str | None = None

    def collect(self) -> Iterator[CheckItem]:
        from holdfast.doctor.checks import REGISTRY

        for check in REGISTRY:
            if not check.extra:
                yield CheckItem.from_parent(self, name=check.name)

    def report(self) -> Report:
        """The report. If the policy cannot be examined, one test fails with the reason and the others are skipped."""
        if self._could_not is not None:
            pytest.skip(f"{self.target} could not be examined")
        if self._report is None:
            from holdfast.cli.doctor import subject_of
            from holdfast.doctor import examine

            seed = self.config.getoption("--holdfast-doctor-seed")
            try:
                self._report = examine(subject_of(self.target, seed), seed=seed)
            except Exception as error:
                self._could_not = f"could not examine {self.target}: {type(error).__name__}: {error}"
                raise Unhealthy(self._could_not) from error
        return self._report


class CheckItem(pytest.Item):
    """One check of one policy."""

    def runtest(self) -> None:
        report = self.parent.report()  # type: ignore[union-attr]
        outcome = next((o for o in report.outcomes if o.check == self.name), None)
        if outcome is None:
            if not report.ok:
                raise Unhealthy(_text(report.findings))
            pytest.skip("not reached")
        if outcome.verdict == "failed":
            raise Unhealthy(_explain(outcome, report))
        if outcome.verdict == "not applicable":
            pytest.skip(outcome.said.strip())
        for found in outcome.findings:
            warnings.warn(f"{found.cause}: {found.evidence}. {found.fix}", stacklevel=1)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, Unhealthy):
            return str(excinfo.value)
        return super().repr_failure(excinfo)

    def reportinfo(self) -> Any:
        return self.path, None, self.name


class Unhealthy(Exception):
    """What the doctor found, as text."""


def _explain(outcome: Outcome, report: Report) -> str:
    """What this check found; where that follows from another finding, which one."""
    own = {(found.check, found.cause) for found in report.findings}
    if any((found.check, found.cause) in own for found in outcome.findings):
        return _text(outcome.findings)
    roots = [f.cause for f in report.findings if any(inner.check == outcome.check for inner in f.consequences)]
    seen = "\n".join(f"{found.cause}: {found.evidence}" for found in outcome.findings)
    return f"{seen}\nThis follows from {', '.join(roots)}: fix that first."


def _text(findings: Any) -> str:
    return "\n\n".join(_describe(found) for found in findings)


def _describe(found: Finding) -> str:
    from holdfast.doctor.report.ci import describe

    return f"{found.severity}: {found.cause}\n{describe(found)}\n{found.url}"
