"""The commit in a benchmark's results: the one that is named, else git's."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def this_commit(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    from this_commit import this_commit

    return this_commit


def test_a_copy_that_stands_in_another_repository_is_named_by_the_variable(this_commit, monkeypatch):
    monkeypatch.setenv("HOLDFAST_COMMIT", "1234abc")
    assert this_commit() == "1234abc"


def test_without_it_git_is_asked_and_a_folder_without_git_is_unknown(this_commit, monkeypatch):
    monkeypatch.delenv("HOLDFAST_COMMIT", raising=False)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, stdout="89ab012\n"))
    assert this_commit() == "89ab012"
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 128, stdout=""))
    assert this_commit() == "unknown"
