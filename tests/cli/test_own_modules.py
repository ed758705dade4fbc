"""An environment and a policy from a module in the current folder, through every command that uses them."""

from __future__ import annotations

import json
import re
import shlex
import sys

import gymnasium as gym
import numpy as np
import pytest

import holdfast as hf

MODULE = """
import gymnasium as gym
import holdfast as hf
from counting_env import CountingEnv, SumPolicy

class Counter(CountingEnv):
    def __init__(self, unit: float = 0.1, length: int = 3):
        super().__init__(unit=unit, lengths=(length,))

class Policy(hf.ActorCritic):
    def __init__(self, observation_space, action_space, config):
        super().__init__(observation_space, action_space, "gru", config.hidden_size)

gym.register("OwnCounter-v0", entry_point=f"{__name__}:Counter")
"""
ENV, POLICY = "own_module:Counter", "own_module:Policy"


@pytest.fixture
def module(folder, monkeypatch):
    """The module, in the current folder of a program that was installed: the folder is not on its path."""
    (folder / "own_module.py").write_text(MODULE)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield folder
    sys.modules.pop("own_module", None)
    gym.registry.pop("OwnCounter-v0", None)


@pytest.mark.parametrize("vectorization", ["sync", "async", "workers"])
@pytest.mark.parametrize("env", [ENV, "own_module:OwnCounter-v0"])
def test_train_finds_an_environment_in_the_current_folder(train, module, env, vectorization):
    train("--env", env, "--run-dir", "run", "--quiet", "--vectorization", vectorization)
    assert json.loads((module / "run/config.json").read_text())["env"] == env


def test_every_command_takes_the_policy_that_the_run_was_trained_with(run, train, module, capsys):
    names = ["--env", ENV, "--policy", POLICY]
    train(*names, "--run-dir", "run", "--quiet", "--env-args", "unit=0.2")
    assert json.loads((module / "run/config.json").read_text())["policy"] == POLICY
    assert run("eval", "run", *names, "--episodes", 2) == 0
    assert f"{ENV}, {POLICY}, " in capsys.readouterr().out
    assert run("train", "--resume", "run", *names, "--total-steps", 128, "--quiet") == 0
    assert run("export", "run", "--policy", POLICY, "-o", "policy.pt2") == 0
    assert run("doctor", "run:run", "--policy", POLICY, "--quiet") == 0


def test_a_policy_that_does_not_say_what_it_sees_is_exported_for_what_its_run_saw(run, train, module):
    names = ["--env", ENV, "--policy", "own_module:SumPolicy"]
    train(*names, "--run-dir", "run", "--quiet")
    assert run("export", "run", "--allow-imports", "-o", "policy.pt2") == 0
    step = hf.Runner("policy.pt2").act(np.array([[0.5], [2.0]], np.float32))
    np.testing.assert_allclose(step.value, [0.5, 2.0], rtol=1e-6)


def test_an_environment_that_takes_no_render_mode_is_told_how_to_be_filmed(run, train, module, capsys):
    train("--env", ENV, "--run-dir", "run", "--quiet")
    assert run("eval", "run", "--env", ENV, "--episodes", 1, "--video", "films") == 2
    assert "cannot be filmed, because it takes no render_mode; give its constructor" in capsys.readouterr().err


def test_the_command_that_a_sweep_ends_with_works_as_it_is_printed(run, tiny, module, capsys):
    pytest.importorskip("optuna")
    flags = [flag for flag in tiny if not flag.startswith("--no-")]
    assert run("sweep", "--env", ENV, *flags, "--total-steps", 64, "--trials", 1, "--workers", 1, "--confirm", 0) == 0
    (printed,) = re.findall(r"train +holdfast (.*)", capsys.readouterr().out)
    del sys.modules["own_module"]  # as in a new process
    assert run(*shlex.split(printed), "--quiet") == 0


def test_the_commands_that_a_run_ends_with_work_as_they_are_printed(run, train, module, capsys):
    train("--env", ENV, "--run-dir", "run")
    printed = re.findall(r"(?:train on|measure) +holdfast (.*)", capsys.readouterr().out)
    assert len(printed) == 2
    for command in printed:
        del sys.modules["own_module"]  # as in a new process
        assert run(*command.split()) == 0, command


def test_the_default_folder_is_named_after_the_policy(train, module):
    train("--env", ENV, "--policy", POLICY, "--quiet")
    assert (module / "runs/own_module-Counter/Policy-h8-seed1/config.json").exists()


def test_a_run_of_a_program_asks_for_its_environment_and_policy_by_name(run, module, capsys):
    import holdfast as hf
    from counting_env import CountingEnv, SumPolicy

    settings = hf.TrainConfig(
        num_envs=2, num_steps=8, minibatches=1, total_steps=32, final_eval_episodes=2, tensorboard=False, quiet=True,
        run_dir="run", device="cpu",
    )  # fmt: skip
    hf.Trainer(settings, env=CountingEnv(unit=0.1), policy=SumPolicy()).run()
    own_policy = ["--policy", "counting_env:SumPolicy"]
    for command in (["eval", "run"], ["train", "--resume", "run"], ["export", "run"], ["doctor", "run:run"]):
        assert run(*command) == 2
        assert "--policy module:Name" in " ".join(capsys.readouterr().err.split())
    for command in (["eval", "run"], ["train", "--resume", "run", "--total-steps", 64]):
        assert run(*command, *own_policy) == 2
        error = capsys.readouterr().err
        assert "name it with --env module:Name" in error and error.count("\n") == 1
        assert run(*command, *own_policy, "--env", "counting_env:CountingEnv") == 0
    assert run("doctor", "run:run", *own_policy, "--quiet") == 0


def test_exporting_a_run_of_a_program_needs_no_environment(run, module):
    import holdfast as hf
    from counting_env import CountingEnv

    settings = hf.TrainConfig(
        num_envs=2, num_steps=8, minibatches=1, total_steps=16, final_eval_episodes=2, tensorboard=False, quiet=True,
        run_dir="run", device="cpu",
    )  # fmt: skip
    hf.Trainer(settings, env=CountingEnv(unit=0.1)).run()
    assert run("export", "run", "-o", "policy.pt2") == 0 and (module / "policy.pt2").exists()


def test_a_config_of_such_a_run_asks_too(run, module, capsys):
    import holdfast as hf

    (module / "config.json").write_text(json.dumps(hf.TrainConfig(env="own-env:Robot", quiet=True).to_dict()))
    assert run("train", "--config", "config.json") == 2
    assert "was given (Robot)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--env", "own_module:Count"], "no environment 'Count' in own_module"),
        (["--env", "own_module:Count"], "did you mean own_module:Counter?"),
        (["--env", "own_modul:Counter"], "there is no module own_modul, neither in"),
        (["--env", ENV, "--policy", "own_module:Polcy"], "own_module has no Polcy; did you mean Policy?"),
        (["--env", ENV, "--env-args", "length=abc"], "length is 'abc', expected a value of type int"),
        (["--env", "holdfast/TMaze-v0", "--env-args", "length=abc"], "length is 'abc', expected a value of type int"),
        (["--env", ENV, "--env-args", "lenght=4"], "there is no argument 'lenght'; it takes unit, length"),
        (["--env", "json:loads"], "json:loads: TypeError"),
    ],
)
def test_a_mistake_in_a_name_or_an_argument_is_one_line(run, tiny, module, capsys, flags, said):
    assert run("train", *tiny, *flags, "--total-steps", 64) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
