"""docs/architecture.md lists the spine of `holdfast train`; a traced run passes through it in that order."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

from holdfast.cli import main
from holdfast.kernels.cpu import recurrence as native
from holdfast.training.iteration import Iteration
from structure.source_tree import PACKAGE, ROOT

ANY_RUN = [
    "train", "--env", "holdfast/RepeatPreviousEasy-v0", "--hidden-size", "8", "--num-envs", "8", "--num-steps", "8",
    "--final-eval-episodes", "2", "--run-dir", "run", "--quiet",
]  # fmt: skip
SHORT_RUN = [*ANY_RUN, "--minibatches", "2", "--epochs", "1", "--total-steps", "128"]
SHORT_SAC = [
    *ANY_RUN, "--algorithm", "sac", "--core", "gru", "--warmup-steps", "256", "--train-length", "8", "--batch-size", "8",
    "--total-steps", "512",
]  # fmt: skip
# A run, an update after its preparations, and the most files that it may pass through. 0.2.0, which had PPO only: 48.
COUNTED = {"ppo": (SHORT_RUN, 2, 33), "sac": (SHORT_SAC, 7, 40)}


def spine(heading: str) -> list[str]:
    """The dotted names of the functions in the numbered list below a heading, in order."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    section = page.partition(f"### {heading}\n")[2].partition("\n#")[0]
    return re.findall(r"^\d+\. `(holdfast\.[\w.]+)`", section, flags=re.MULTILINE)


def code_of(name: str) -> CodeType:
    """The code of a function from its dotted name, without the decorators around it."""
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return inspect.unwrap(found).__code__
    raise LookupError(f"{name} does not exist; correct docs/architecture.md")


def first_calls(run: Callable[[], Any], names: list[str]) -> list[str]:
    """Those of `names` that `run` calls, in the order of their first calls."""
    waiting = {code_of(name): name for name in names}
    order: list[str] = []

    def watch(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call" and frame.f_code in waiting:
            order.append(waiting.pop(frame.f_code))

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        run()
    finally:
        sys.setprofile(before)
    return order


@pytest.mark.parametrize("heading", ["On a CPU", "On a GPU", "With SAC"])
def test_the_spine_is_short_and_names_functions_that_exist(heading):
    names = spine(heading)
    assert 10 <= len(names) <= 15
    assert len({code_of(name) for name in names}) == len(names)
    assert names[0] == "holdfast.cli.train.main" and names[-1] == "holdfast.runs.checkpoint.save"


@pytest.mark.skipif(not native.in_use(), reason="the page shows the run with the compiled kernel")
def test_a_run_on_a_cpu_passes_through_the_spine_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = spine("On a CPU")
    assert first_calls(lambda: main([*SHORT_RUN, "--device", "cpu"]), names) == names


@pytest.mark.skipif(not native.in_use(), reason="the page shows the run with the compiled kernel")
def test_a_run_of_sac_passes_through_its_spine_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = spine("With SAC")
    assert first_calls(lambda: main([*SHORT_SAC, "--device", "cpu"]), names) == names


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_run_on_a_gpu_passes_through_the_spine_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = spine("On a GPU")
    assert first_calls(lambda: main([*SHORT_RUN, "--device", "cuda"]), names) == names


def files_of_one_update(arguments: list[str], number: int, folder: Path) -> set[str]:
    """The files of the package that one iteration of training passes through: a rollout, its checks, an update, its row."""
    run, seen, count = Iteration.run, set(), [0]

    def watch(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            seen.add(str(Path(frame.f_code.co_filename).relative_to(PACKAGE)))

    def watched(iteration: Iteration) -> Any:
        count[0] += 1
        if count[0] != number:
            return run(iteration)
        sys.setprofile(watch)
        try:
            return run(iteration)
        finally:
            sys.setprofile(None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Iteration, "run", watched)
        patch.chdir(folder)
        assert main([*arguments, "--device", "cpu"]) == 0
    return seen


@pytest.mark.skipif(not native.in_use(), reason="counted with the compiled kernel")
@pytest.mark.parametrize("algorithm", COUNTED)
def test_an_update_on_a_cpu_passes_through_few_files(algorithm: str, tmp_path: Path):
    arguments, number, most = COUNTED[algorithm]
    files = files_of_one_update(arguments, number, tmp_path)
    loop = {"ppo": "algorithms/on_policy.py", "sac": "algorithms/off_policy.py"}[algorithm]
    assert "rollout/collector.py" in files and loop in files
    assert len(files) <= most, sorted(files)
