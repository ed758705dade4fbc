"""The doctor: finds hidden-state bugs in any recurrent policy.

    report = hf.doctor.examine(subjects.CleanRL(agent, observation_space))
    report.ok, report.findings; report.print(); report.to_html("report.html")

`subjects/` says how each kind of policy is driven, `checks/` what is tested, `report/` how findings are shown. The
doctor does not judge how well a policy plays, and it changes nothing in it.
"""

from typing import Any

from holdfast.doctor import subjects
from holdfast.doctor.examine import CannotExamine, assert_healthy, examine
from holdfast.doctor.report import CreditMap, Finding, Report
from holdfast.doctor.subjects.base import RecordedSegment, Replay, Subject, SubjectStep
from holdfast.doctor.watch import StaleGraphWarning, watch

__all__ = [
    "CannotExamine",
    "CreditMap",
    "Finding",
    "RecordedSegment",
    "Replay",
    "Report",
    "StaleGraphWarning",
    "Subject",
    "SubjectStep",
    "assert_healthy",
    "examine",
    "subjects",
    "watch",
]


def __getattr__(name: str) -> Any:
    return subjects.renamed(__name__, name)
