"""A few of the random trainings of tests/whole_runs.py, and of the hostile files of tests/file_mutants.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import file_mutants
import whole_runs
from holdfast.rollout.collector import Acting


@pytest.mark.parametrize("seed", range(4))
def test_a_run_with_random_settings_replays_resumes_and_deploys_what_it_trained(seed: int):
    assert [problem for problem in whole_runs.hunt(seed + 100, range(1)) if problem] == []


def test_these_runs_notice_a_bootstrap_that_is_a_little_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    finals = Acting.final_values

    def a_little_wrong(acting: Acting, like: Any) -> Any:
        values = finals(acting, like)
        return None if values is None else 0.99 * values

    monkeypatch.setattr(Acting, "final_values", a_little_wrong)
    what = whole_runs.draw_run(41, 0)
    assert what["mode"] != "NEXT_STEP" and what["settings"]["gamma"] > 0, "otherwise nothing is bootstrapped so"
    assert "advantage is" in whole_runs.play(what, tmp_path)


def test_files_for_the_commands_end_in_one_line_and_neither_import_nor_inject():
    pytest.importorskip("optuna")
    assert [problem for problem in file_mutants.hunt(5, range(70)) if problem] == []
