"""Commands run in the test's process and in an empty folder; trainings are tiny."""

import pytest

from holdfast.cli import main

TINY = ["--hidden-size", 8, "--num-envs", 4, "--num-steps", 8, "--minibatches", 2, "--epochs", 1, "--threads", 1]
TINY += ["--final-eval-episodes", 2, "--no-tensorboard"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run():
    """Runs a command; returns its exit code, also when it exits by itself."""

    def run(*argv):
        try:
            return main([str(argument) for argument in argv])
        except SystemExit as end:
            return end.code or 0

    return run


@pytest.fixture
def tiny():
    """Flags of a training that takes well under a second."""
    return [str(flag) for flag in TINY]


@pytest.fixture
def train(run):
    def train(*more, steps=64):
        assert run("train", *TINY, "--total-steps", steps, *more) == 0

    return train
