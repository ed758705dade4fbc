"""What the doctor reports: causes, findings, and the report as text, JSON, HTML and a picture. It measures nothing."""

from holdfast.doctor.report.credit import CreditMap
from holdfast.doctor.report.findings import Finding, Outcome, make_finding
from holdfast.doctor.report.report import Report

__all__ = ["CreditMap", "Finding", "Outcome", "Report", "make_finding"]
