"""The report in its four shapes, and the credit map."""

import json

import pytest
import torch
from patients.base import OBS
from patients.cleanrl_agents import Agent, DetachesEveryStep, RunsTheSegmentAsOneEpisode

from holdfast import doctor
from holdfast.doctor import subjects
from holdfast.doctor.credit import CreditMap


@pytest.fixture(scope="module")
def reports():
    torch.manual_seed(1)
    kinds = {"healthy": Agent, "leaking": RunsTheSegmentAsOneEpisode, "detached": DetachesEveryStep}
    return {name: doctor.examine(subjects.CleanRL(kind(), (OBS,))) for name, kind in kinds.items()}


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
    assert "reset-dropped-in-training" in text and "fix:" in text and "docs/doctor.md#replay" in text
    assert "healthy" in reports["healthy"].to_text()


def test_html_is_one_page_without_script_or_address(reports, tmp_path):
    path = reports["leaking"].to_html(tmp_path / "report.html")
    text = path.read_text()
    for word in ("<script", "http://", "https://", "@import", "src="):
        assert word not in text
    assert "default-src 'none'" in text


def test_names_are_escaped(reports, tmp_path):
    from dataclasses import replace

    text = replace(reports["healthy"], subject="<b>A&B").to_html(tmp_path / "x.html").read_text()
    assert "&lt;b&gt;A&amp;B" in text and "<b>A&B" not in text


def test_credit_map_shows_leaks_beyond_the_boundary(reports):
    credit = reports["leaking"].credit
    row = credit.busiest_row
    outside = ~credit.allowed(row) & (credit.values[:, :, row] > 0)
    assert outside.any() and "!!" in credit.to_blocks()


def test_credit_map_of_an_over_detached_policy_is_its_diagonal(reports):
    values = reports["detached"].credit.values
    assert (torch.einsum("ttb->tb", values) > 0).all()
    assert (
        (values.tril(-1) == 0).all()
        if values.dim() == 2
        else all((values[:, :, b].tril(-1) == 0).all() for b in range(5))
    )


def test_credit_map_of_a_healthy_policy_fills_its_triangles(reports):
    credit = reports["healthy"].credit
    for row in range(credit.values.shape[2]):
        assert torch.equal(credit.values[:, :, row] > 0, credit.allowed(row))
    assert "!!" not in credit.to_blocks()


def test_blocks_by_hand():
    values = torch.tensor([[1.0, 0.0], [0.5, 1.0]]).unsqueeze(-1)
    same = CreditMap(values, torch.tensor([[True], [False]]))
    assert same.to_blocks(0).splitlines() == ["t=  0  ██", "t=  1  ██ ██"]
    apart = CreditMap(values, torch.tensor([[True], [True]]))
    assert apart.to_blocks(0).splitlines()[1] == "t=  1  !!|██"


def test_png_is_a_picture(reports, tmp_path):
    from PIL import Image

    reports["leaking"].credit.to_png(tmp_path / "credit.png", cell=8)
    picture = Image.open(tmp_path / "credit.png")
    assert picture.size == (96, 96)
    colours = {picture.getpixel((x, y)) for x in range(96) for y in range(96)}
    assert any(red > 150 and blue < 120 for red, _, blue in colours)
