"""The report in the formats of continuous integration: GitHub annotations, SARIF 2.1.0, JUnit XML."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from holdfast.causes import CAUSES

if TYPE_CHECKING:
    from holdfast.doctor.report.findings import Finding
    from holdfast.doctor.report.report import Report

_GITHUB_LEVELS = {"error": "error", "warning": "warning", "note": "notice"}
SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


@dataclass(frozen=True)
class Location:
    """Where the policy is written: a path relative to the repository, and a line."""

    path: str
    line: int = 1


def github(report: Report, location: Location | None = None) -> str:
    """One workflow command per finding; GitHub shows them at the lines of a pull request."""
    if not report.findings:
        return f"::notice title=holdfast doctor::{_data(report.verdict)}"
    lines = []
    for found in report.findings:
        where = f"file={_property(location.path)},line={location.line}," if location is not None else ""
        title = _property(f"holdfast doctor: {found.cause}")
        lines.append(f"::{_GITHUB_LEVELS[found.severity]} {where}title={title}::{_data(describe(found))}")
    return "\n".join(lines)


def describe(found: Finding) -> str:
    """A finding as a few lines of text."""
    parts = [found.meaning, f"Seen: {found.evidence}.", f"Fix: {found.fix}"]
    if found.patch:
        parts.append(found.patch)
    return "\n".join(parts)


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def sarif(report: Report, location: Location | None = None) -> dict[str, Any]:
    """A SARIF log with one run; GitHub's code scanning accepts it when there is a location."""
    from holdfast import __version__

    rules = [
        {
            "id": cause,
            "shortDescription": {"text": CAUSES[cause].meaning},
            "help": {"text": CAUSES[cause].fix},
            "defaultConfiguration": {"level": CAUSES[cause].severity},
        }
        for cause in sorted({found.cause for found in report.findings})
    ]
    driver = {"name": "holdfast doctor", "version": __version__, "rules": rules}
    return {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": [_result(found, location) for found in report.findings]}],
    }


def _result(found: Finding, location: Location | None) -> dict[str, Any]:
    result: dict[str, Any] = {
        "ruleId": found.cause,
        "level": found.severity,
        "message": {"text": describe(found)},
        "properties": {"check": found.check, "consequences": [inner.cause for inner in found.consequences]},
    }
    if location is not None:
        place = {"artifactLocation": {"uri": location.path}, "region": {"startLine": location.line}}
        result["locations"] = [{"physicalLocation": place}]
    return result


def junit(report: Report) -> str:
    """One test case per check: failed where an error was found, skipped where the check does not apply."""
    suite = ElementTree.Element("testsuite", name=f"holdfast doctor: {report.subject}", time=f"{report.seconds:.3f}")
    counts = {"tests": 0, "failures": 0, "skipped": 0}
    for outcome in report.outcomes:
        case = ElementTree.SubElement(
            suite, "testcase", classname=f"holdfast.doctor.{report.subject}", name=outcome.check
        )
        counts["tests"] += 1
        if outcome.verdict == "failed":
            counts["failures"] += 1
            causes = ", ".join(found.cause for found in outcome.findings)
            text = "\n\n".join(describe(found) for found in outcome.findings)
            ElementTree.SubElement(case, "failure", message=causes).text = text
        elif outcome.verdict in ("not applicable", "not examined"):
            counts["skipped"] += 1
            ElementTree.SubElement(case, "skipped", message=outcome.said.strip())
        else:
            ElementTree.SubElement(case, "system-out").text = outcome.said.strip()
    suite.attrib.update({key: str(count) for key, count in counts.items()})
    root = ElementTree.Element("testsuites")
    root.append(suite)
    for element in root.iter():
        element.text = _allowed_in_xml(element.text) if element.text else None
        element.attrib.update({key: _allowed_in_xml(value) for key, value in element.attrib.items()})
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _allowed_in_xml(text: str) -> str:
    """Without colors and control characters, which an exception's text may have and XML 1.0 forbids."""
    text = re.sub(r"\x1b\[[0-9;?]*[ -/]*[@-~]", "", text)
    return re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "", text)
