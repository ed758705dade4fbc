"""The report as text and as JSON."""

import dataclasses
import json


def test_json_holds_the_findings(reports, tmp_path):
    text = reports["leaking"].to_json(tmp_path / "report.json")
    data = json.loads((tmp_path / "report.json").read_text())
    assert data == json.loads(text)
    assert data["ok"] is False
    (found,) = [f for f in data["findings"] if f["severity"] == "error"]
    assert set(found) >= {"check", "cause", "severity", "evidence", "fix", "url", "consequences"}
    assert len(data["checks"]) > 20


def test_text_says_what_and_how_to_repair_it(reports):
    text = reports["leaking"].to_text()
    assert (
        "reset-dropped-in-training" in text
        and "fix:" in text
        and "see the documentation, docs/doctor.md#replay" in text
    )
    assert "healthy" in reports["healthy"].to_text()


def test_a_name_between_colons_does_not_become_a_picture(reports, capsys):
    report = dataclasses.replace(reports["healthy"], subject="nets:boom:")
    report.print()
    assert report.to_text().startswith("nets:boom: is healthy") and capsys.readouterr().out.startswith("nets:boom:")
