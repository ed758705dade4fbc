"""The doctor: finds hidden-state bugs in anybody's recurrent policy.

    report = hf.doctor.examine(subjects.CleanRL(agent, observation_space))
    report.ok, report.findings; report.print(); report.to_html("report.html")

It does not judge how well a policy plays, and it changes nothing in it.
"""

from holdfast.doctor import subjects
from holdfast.doctor.credit import CreditMap
from holdfast.doctor.examine import CannotExamine, assert_healthy, examine
from holdfast.doctor.findings import Finding
from holdfast.doctor.report import Report
from holdfast.doctor.subject import Replay, Segment, Step, Subject
from holdfast.doctor.watch import StaleGraphWarning, watch

__all__ = [
    "CannotExamine",
    "CreditMap",
    "Finding",
    "Replay",
    "Report",
    "Segment",
    "StaleGraphWarning",
    "Step",
    "Subject",
    "assert_healthy",
    "examine",
    "subjects",
    "watch",
]
