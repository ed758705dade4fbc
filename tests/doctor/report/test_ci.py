"""Formats of continuous integration: annotations, SARIF, JUnit."""

from dataclasses import replace
from xml.etree import ElementTree

import torch

from holdfast.doctor import examine, subjects
from holdfast.doctor.report import ci


def test_an_annotation_is_one_line_with_place_and_title(reports):
    text = ci.github(reports["leaking"], ci.Location("pkg/my,policy.py", 7))
    (line,) = text.splitlines()
    assert line.startswith(
        "::error file=pkg/my%2Cpolicy.py,line=7,title=holdfast doctor%3A reset-dropped-in-training::"
    )
    assert "%0AFix: " in line


def test_a_healthy_policy_is_announced(reports):
    assert ci.github(reports["healthy"]).startswith("::notice title=holdfast doctor::Agent is healthy")


def test_sarif_names_rule_level_and_place(reports):
    log = ci.sarif(reports["leaking"], ci.Location("policy.py", 3))
    (run,) = log["runs"]
    (rule,) = [r for r in run["tool"]["driver"]["rules"] if r["id"] == "reset-dropped-in-training"]
    assert rule["defaultConfiguration"]["level"] == "error"
    result = run["results"][0]
    assert (result["ruleId"], result["level"]) == ("reset-dropped-in-training", "error")
    place = result["locations"][0]["physicalLocation"]
    assert place == {"artifactLocation": {"uri": "policy.py"}, "region": {"startLine": 3}}
    assert log["version"] == "2.1.0"
    assert {r["ruleId"] for r in run["results"]} == {r["id"] for r in run["tool"]["driver"]["rules"]}


def test_junit_has_a_case_for_each_check_and_counts_them(reports):
    report = reports["leaking"]
    (suite,) = ElementTree.fromstring(ci.junit(report).split("?>", 1)[1])
    cases = {case.get("name"): case for case in suite}
    assert list(cases) == [o.check for o in report.outcomes]
    assert "reset-dropped-in-training" in cases["replay"].find("failure").get("message")
    assert cases["environment-ids"].find("skipped") is not None
    assert cases["remembers"].find("failure") is None
    assert int(suite.get("failures")) == sum(case.find("failure") is not None for case in suite)


def test_junit_is_well_formed_if_an_exception_has_colors(reports):
    report = reports["leaking"]
    (failed, *_) = [o for o in report.outcomes if o.status == "failed"]
    colored = replace(failed, status="not examined", said="Error: \x1b[31mred\x1b[0m \x00\x07", findings=[])
    suite = ElementTree.fromstring(ci.junit(replace(report, outcomes=(colored,))).split("?>", 1)[1])[0]
    assert suite[0].find("skipped").get("message").strip() == "Error: red"


def test_warnings_can_be_errors_and_causes_can_be_ignored(reports):
    report = reports["leaking"]
    assert not report.ok and report.judged(ignore=[f.cause for f in report.findings]).ok
    warned = replace(report, findings=(replace(report.findings[0], severity="warning"),))
    assert warned.ok and not warned.judged(strict=True).ok


def test_the_name_of_a_policy_invents_no_line_and_commands_no_terminal(tmp_path):
    """A shared policy may be called anything."""
    name = "\x1b]0;owned\x07\u202e\n::error::invented<script>"
    report = examine(subjects.Module(torch.nn.LSTM(4, 8), resets="nobody", name=name))
    page = report.to_html(tmp_path / "report.html").read_text()
    for text in (report.to_text(), page, ci.github(report), report.verdict):
        assert not any(sign in text for sign in ("\x1b", "\x07", "\u202e", "\n::error::invented"))
    assert "<script" not in page and "&lt;script&gt;" in page
