"""What `meta.json` says about the process, without running anything that a folder contains."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from holdfast.runs import metadata


def git(folder: Path, *arguments: str) -> str:
    names = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **names})
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    (folder / "file").write_text("1")
    git(folder, "add", "file")
    git(folder, "commit", "-q", "-m", "first")
    return folder


def test_git_state_is_none_outside_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert metadata.git_state() is None


def test_the_commit_is_found_as_git_finds_it(repository: Path, monkeypatch: pytest.MonkeyPatch):
    def commit(folder: Path) -> str:
        monkeypatch.chdir(folder)
        state = metadata.git_state()
        assert state is not None and state["commit"] == git(folder, "rev-parse", "HEAD")
        return str(state["commit"])

    first = commit(repository)
    (repository / "below" / "deep").mkdir(parents=True)
    assert commit(repository / "below" / "deep") == first
    git(repository, "worktree", "add", "-q", "-b", "side", str(repository.parent / "side"))
    git(repository.parent / "side", "commit", "-q", "--allow-empty", "-m", "second")
    second = commit(repository.parent / "side")
    assert second != first == commit(repository)
    git(repository, "pack-refs", "--all")
    assert commit(repository.parent / "side") == second and commit(repository) == first
    git(repository, "checkout", "-q", "--detach", second)
    assert commit(repository) == second


def test_a_hostile_repository_runs_nothing(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    mark, program = tmp_path / "mark", tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {mark}\ncat\n")
    program.chmod(0o755)
    for name in ("core.fsmonitor", "filter.evil.clean", "filter.evil.process"):
        git(repository, "config", name, str(program))
    (repository / ".gitattributes").write_text("* filter=evil\n")
    (repository / "file").write_text("2")
    monkeypatch.chdir(repository)
    assert len(metadata.describe_process()["git"]["commit"]) == 40
    assert not mark.exists()
    subprocess.run(["git", "status"], cwd=repository, capture_output=True)
    assert mark.exists(), "it is hostile indeed"


@pytest.mark.parametrize("head", ["", "ref: refs/heads/../../../secret", "ref: /etc/passwd", "x" * 10_000, "\xff"])
def test_a_damaged_repository_is_none(repository: Path, monkeypatch: pytest.MonkeyPatch, head: str):
    (repository.parent / "secret").write_text("0" * 40)
    (repository / ".git" / "HEAD").write_text(head)
    monkeypatch.chdir(repository)
    assert metadata.git_state() is None


def test_a_pipe_in_the_place_of_a_file_does_not_hang(repository: Path, monkeypatch: pytest.MonkeyPatch):
    (repository / ".git" / "HEAD").unlink()
    os.mkfifo(repository / ".git" / "HEAD")
    monkeypatch.chdir(repository)
    assert metadata.git_state() is None
