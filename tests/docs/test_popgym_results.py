"""The results on docs/popgym.md are made from the runs that are committed, by one command."""

from __future__ import annotations

import importlib
import json
import sys

import pytest

from bench.finished_runs import row
from docs.blocks import ROOT

sys.path.insert(0, str(ROOT / "docs" / "tools"))
tool = importlib.import_module("popgym_results")
STEPS = 15_000_000
ROWS = [
    row("RepeatPreviousEasy", "gru", 1, 0.985, 0.97, steps=STEPS),  # published: 1.0, best 1.0
    row("RepeatPreviousMedium", "gru", 1, -0.4, -0.41, steps=STEPS),  # published: -0.315, best 0.789
    row("RepeatPreviousMedium", "window", 1, 0.9, 0.89, steps=STEPS),
    row("MineSweeperEasy", "gru", 1, 0.5, 0.4, steps=STEPS),
]


@pytest.fixture
def places(tmp_path, monkeypatch):
    """The page and the file of runs, in a folder of the test; no browser."""
    for name, file in (("PAGE", "page.md"), ("COMMITTED", "committed.jsonl"), ("PICTURE", "picture.png")):
        monkeypatch.setattr(tool, name, tmp_path / file)
    monkeypatch.setattr(tool, "take_picture", lambda html, path: False)
    (tmp_path / "page.md").write_text(f"# Before\n\n{tool.BEGIN}\n{tool.NOTHING}\n{tool.END}\nAfter.\n")
    return tmp_path


def write(path, rows):
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return str(path)


def test_the_page_shows_the_runs_that_are_committed():
    text = tool.section(tool.joined([tool.COMMITTED]), picture=tool.PICTURE.exists())
    page = tool.PAGE.read_text()
    assert page == tool.with_section(page, text), "run `python docs/tools/popgym_results.py`"


def test_results_of_several_machines_are_joined_and_shown(places, capsys):
    one, two = write(places / "one.jsonl", ROWS[:2]), write(places / "two.jsonl", ROWS[2:])
    assert tool.main([one]) == 0
    assert tool.main([two]) == 0
    assert "4 of them on" in capsys.readouterr().out
    assert [json.loads(line) for line in tool.COMMITTED.read_text().splitlines()] == ROWS
    page = tool.PAGE.read_text()
    assert page.startswith("# Before\n\n<!--") and page.endswith(f"{tool.END}\nAfter.\n") and tool.NOTHING not in page
    assert (
        "| RepeatPreviousMedium | 15,000,000 | -0.500 | -0.315 | 0.789 | -0.400 ▼ −0.085 (-0.410) | 0.900 ▲ +0.111 (0.890) |"
        in page
    )
    assert "| RepeatPreviousMedium | 3.0 (2.0), 500/s | 3.0 (2.0), 500/s |" in page
    assert "gru reaches the published GRU (minus 0.02) in 1 of 2 tasks; not in RepeatPreviousMedium." in page
    assert (
        "The best of ours is above the best of 13 published by more than 0.02 in 1 of 2 tasks, within 0.02 of it in 1."
        in page
    )
    assert "\n# " not in page.partition(tool.BEGIN)[2] and "popgym.png" not in page

    assert tool.main([]) == 0  # again, from the file
    assert tool.PAGE.read_text() == page


def test_a_run_that_was_made_again_takes_the_place_of_the_old_one(places):
    tool.main([write(places / "one.jsonl", ROWS)])
    tool.main([write(places / "two.jsonl", [{**ROWS[1], "best": 0.1, "id": "new"}])])
    assert sorted(one["id"] for one in tool.joined([tool.COMMITTED])) == sorted(
        ["new", *(r["id"] for r in ROWS if r is not ROWS[1])]
    )
    assert "in 2 of 2 tasks." in tool.PAGE.read_text()


def test_a_page_without_its_comments_is_left_alone(places):
    tool.PAGE.write_text("# Before\n")
    with pytest.raises(SystemExit, match="has lost the comment"):
        tool.main([write(places / "one.jsonl", ROWS)])
    assert tool.PAGE.read_text() == "# Before\n"
