"""A module that a file names is imported only if the user allows it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast as hf
from holdfast.cli import main
from holdfast.config import imports
from holdfast.runs import checkpoint

MODULE = """
from pathlib import Path
import gymnasium as gym
Path({mark!r}).touch()
gym.register("Named-v0", entry_point="gymnasium.envs.classic_control:CartPoleEnv", max_episode_steps=20)
"""


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Exists once `named_by_a_file` was imported."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "named_by_a_file.py").write_text(MODULE.format(mark=str(tmp_path / "mark")))
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "named_by_a_file", raising=False)
    return tmp_path / "mark"


@pytest.fixture
def run(tmp_path: Path, mark: Path) -> Path:
    """A run whose files name the module, made without it."""
    settings = dict(hidden_size=4, num_envs=2, num_steps=4, minibatches=1, epochs=1, threads=1, device="cpu")
    config = hf.TrainConfig(
        env="CartPole-v1", total_steps=8, run_dir=str(tmp_path / "run"), quiet=True, final_eval_episodes=1, **settings
    )
    folder = hf.Trainer(config).run().run_dir
    file = checkpoint.find(folder)
    saved = checkpoint.load(file)
    saved["config"]["env"] = "named_by_a_file:Named-v0"
    checkpoint.save(file, saved)
    (folder / "config.json").write_text(json.dumps(saved["config"]))
    return folder


def commands(run: Path) -> dict[str, list[str]]:
    more = ["--total-steps", "16", "--final-eval-episodes", "1"]
    return {
        "eval": ["eval", str(run), "--episodes", "1"],
        "resume": ["train", "--resume", str(run), *more],
        "config": ["train", "--config", str(run / "config.json"), *more],
    }


@pytest.mark.parametrize("command", ["eval", "resume", "config"])
def test_a_command_that_reads_a_file_imports_only_what_the_user_allows(run: Path, mark: Path, command: str, capsys):
    arguments = commands(run)[command]
    before = sorted(run.rglob("*"))
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "the code of the module 'named_by_a_file'; if you trust this file, add --allow-imports" in line
    assert not mark.exists() and sorted(run.rglob("*")) == before
    assert main([*arguments, "--allow-imports"]) == 0, capsys.readouterr().err
    assert mark.exists()


def test_a_module_that_the_user_types_is_imported(run: Path, mark: Path):
    named = ["--env", "named_by_a_file:Named-v0"]
    assert main(["train", "--config", str(run / "config.json"), *named, "--total-steps", "8"]) == 0
    assert mark.exists()


def test_reading_the_policy_alone_imports_nothing(run: Path, mark: Path):
    hf.load(run)
    with pytest.raises(ValueError, match="allow_imports=True"):
        hf.Trainer.resume(run)
    assert not mark.exists()
    hf.Trainer.resume(run, allow_imports=True)
    assert mark.exists()


@pytest.mark.parametrize("name", ["../escape", "/tmp/escape", "a/../../escape", ".."])
def test_a_name_does_not_leave_the_folder_of_runs(name: str):
    with pytest.raises(ValueError, match=r"name .* leaves the folder runs/; use run_dir"):
        hf.TrainConfig(name=name)


@pytest.mark.parametrize(
    ("field", "name"),
    [("policy", "os:abort"), ("core", "builtins:eval"), ("env", "os:abort"), ("policy", "json:JSONEncoder")],
)
def test_a_name_in_a_module_that_is_in_use_is_refused_unless_it_is_a_class_of_its_kind(field: str, name: str):
    with pytest.raises(imports.ImportNotAllowedError, match="add --allow-imports"):
        imports.require_allowed(hf.TrainConfig(**{field: name}), Path("config.json"), allowed=False)


def test_a_class_of_its_kind_in_a_module_that_is_in_use_needs_no_permission():
    for field, name in {
        "policy": "holdfast:ActorCritic",
        "core": "holdfast:LSTM",
        "env": "holdfast:No-such-id-v0",
    }.items():
        imports.require_allowed(hf.TrainConfig(**{field: name}), Path("config.json"), allowed=False)


def test_a_run_that_is_continued_may_name_what_it_was_started_with_and_nothing_else(run: Path, mark: Path):
    with pytest.raises(imports.ImportNotAllowedError):
        hf.Trainer.resume(run, allow_imports=imports.named_in(hf.TrainConfig(env="CartPole-v1")))
    assert not mark.exists()
    hf.Trainer.resume(run, allow_imports=imports.named_in(hf.TrainConfig(env="named_by_a_file:Named-v0")))
    assert mark.exists()


@pytest.mark.parametrize("field", ["env", "cores", "policy"])
def test_a_suite_imports_only_what_the_user_allows(
    field: str, tmp_path: Path, mark: Path, capsys: pytest.CaptureFixture
):
    name = "named_by_a_file:Named"
    suite = dict(name="s", steps=8, tasks=[{"name": "A", "env": name if field == "env" else "CartPole-v1"}])
    suite |= {"cores": [name]} if field == "cores" else {"settings": {"policy": name}} if field == "policy" else {}
    (tmp_path / "suite.json").write_text(json.dumps(suite))
    assert main(["bench", "suite.json", "--device", "cpu"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "suite.json names" in line and "add --allow-imports" in line
    assert not mark.exists() and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("source", ["--preset", "--config", "--space"])
def test_a_sweep_imports_only_what_the_user_allows(
    source: str, tmp_path: Path, mark: Path, capsys: pytest.CaptureFixture
):
    pytest.importorskip("optuna")
    settings = (
        {"env": "named_by_a_file:Named-v0"} if source != "--space" else {"core": {"choices": ["named_by_a_file:C"]}}
    )
    (tmp_path / "file.json").write_text(json.dumps(settings))
    assert main(["sweep", source, "file.json", "--trials", "1", "--workers", "1", "--device", "cpu"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "file.json names" in line and "add --allow-imports" in line
    assert not mark.exists() and not list(tmp_path.glob("runs/sweeps/*/study.db"))


@pytest.mark.parametrize("bridge", imports.BRIDGES)
def test_the_prefix_of_an_environment_is_no_permission_for_anything_else(bridge: str):
    imports.require_name_allowed("env", f"{bridge}:Some-v0", "it names", False)
    for kind in ("core", "policy", "algorithm"):
        with pytest.raises(imports.ImportNotAllowedError, match="add --allow-imports"):
            imports.require_name_allowed(kind, f"{bridge}:os.abort", "it names", False)


def test_a_bridge_is_an_installed_package_and_not_a_file_in_the_current_folder(tmp_path: Path):
    for name in {*(bridge.replace("-", "_") for bridge in imports.BRIDGES), "jax"}:
        (tmp_path / name).mkdir()
        for file in ("__init__.py", "envs.py", "registration.py", "craftax_env.py", "sisl.py"):
            (tmp_path / name / file).write_text("print(__file__)\n")
    program = f"""
import sys, holdfast.envs
sys.path.insert(0, "")  # as `python -m holdfast` has it
for bridge in {imports.BRIDGES}:
    for name in ("sisl", "..sisl", "x:sisl"):
        try:
            holdfast.envs.make(f"{{bridge}}:{{name}}", 2)
        except (ValueError, ModuleNotFoundError):
            assert sys.path[0] == ""
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done


def test_the_other_packages_of_a_suggestion_are_not_looked_for_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "popgym").mkdir()
    for name in ("__init__.py", "envs.py"):
        (tmp_path / "popgym" / name).write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "popgym"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend("")
    with pytest.raises(ValueError, match="no environment"):
        hf.envs.make("No-such-env-v0", 2)
    assert not (tmp_path / "mark").exists()


def test_an_environment_whose_argument_names_a_module_needs_permission():
    for name in ("GymV21Environment-v0", "GymV26Environment-v0"):
        with pytest.raises(imports.ImportNotAllowedError, match="add --allow-imports"):
            imports.require_name_allowed("env", name, "it names", False)
