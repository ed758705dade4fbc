import json
import os
import signal
import subprocess
import sys
import time

import pytest

import holdfast as hf
from holdfast.cli import main
from holdfast.config import PRESETS
from holdfast.runs.log import read_progress


def test_train_ends_with_result_folder_plot_and_next_steps(train, folder, capsys):
    train(steps=512)  # 128 steps of each environment: episodes have ended
    out = capsys.readouterr().out
    run_folder = folder / "runs/RepeatPreviousEasy-v0/lstm-h8-seed1"
    assert "over 2 fresh episodes" in out and "steps/s" in out
    for line in (
        "run       runs/RepeatPreviousEasy-v0/lstm-h8-seed1",
        "curve     runs/RepeatPreviousEasy-v0/lstm-h8-seed1/curve.png",
        "holdfast eval runs/RepeatPreviousEasy-v0/lstm-h8-seed1",
        "holdfast plot runs/RepeatPreviousEasy-v0/* -o curves.png",
        "holdfast train --resume runs/RepeatPreviousEasy-v0/lstm-h8-seed1 --total-steps 1024",
    ):
        assert line in out
    assert (run_folder / "curve.png").exists() and (run_folder / "meta.json").exists()
    assert len(read_progress(run_folder)) == 16


def test_quiet_prints_the_result_and_the_folder_only(train, folder, capsys):
    train("--quiet")
    result, where = capsys.readouterr().out.splitlines()
    assert result.startswith("return ") and where == "run  runs/RepeatPreviousEasy-v0/lstm-h8-seed1"


@pytest.mark.parametrize("preset", ["lunar-lander", "lunar-lander-masked"])
def test_without_box2d_a_preset_of_lunar_lander_names_what_to_install_in_one_line(
    run, folder, capsys, monkeypatch, preset
):
    monkeypatch.setitem(sys.modules, "Box2D", None)
    for module in [name for name in sys.modules if name.startswith("gymnasium.envs.box2d")]:
        monkeypatch.delitem(sys.modules, module)
    assert run("train", "--preset", preset, "--quiet") == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert 'pip install "gymnasium[box2d]"' in said.err


def test_commands_to_copy_are_quoted_for_the_shell(train, folder, capsys):
    train("--run-dir", "it's a run/$HOME")
    out = capsys.readouterr().out
    for command in (
        """holdfast train --resume 'it'"'"'s a run/$HOME' --total-steps 128""",
        """holdfast eval 'it'"'"'s a run/$HOME'""",
        """holdfast plot 'it'"'"'s a run'/* -o curves.png""",
    ):
        assert command in out


def test_a_resumed_run_that_has_the_steps_already_says_so_in_one_line(run, train, folder, capsys):
    train("--quiet", "--run-dir", "run", steps=128)
    capsys.readouterr()
    for steps in (64, 128):
        assert run("train", "--resume", "run", "--total-steps", steps) == 2
        message = "holdfast train: the run has 128 steps already; to continue training, pass more, such as --total-steps 256\n"
        assert capsys.readouterr() == ("", message)


def test_a_finished_run_that_is_resumed_is_measured_again_and_says_that_nothing_was_trained(run, train, folder, capsys):
    train("--quiet", "--run-dir", "run", steps=128)
    capsys.readouterr()
    assert run("train", "--resume", "run", "--quiet") == 0
    result, where = capsys.readouterr().out.splitlines()
    already = "the run has 128 steps already; to continue training, pass more, such as --total-steps 256"
    assert result.startswith("return ") and result.endswith(f" over 2 fresh episodes, nothing trained: {already}")
    assert where == "run  run"


@pytest.mark.parametrize("device", ["gpu", "mps", "meta", "cuda:x", "cuda", "cuda:7"])
def test_a_device_that_is_not_there_is_refused_by_every_command(run, train, folder, capsys, monkeypatch, device):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    train("--quiet", "--run-dir", "run")
    capsys.readouterr()
    for command in ("train", "train --seeds 1 2", "train --resume run --total-steps 256", "eval run"):
        assert run(*command.split(), "--device", device) == 2
        words = "but torch sees no GPU" if device in ("cuda", "cuda:7") else "Holdfast runs on CPUs and NVIDIA GPUs"
        name = command.split()[0]
        assert capsys.readouterr().err.startswith(
            f"holdfast {name}: device '{device}'{':' if 'runs' in words else ','} "
        )
    with pytest.raises(ValueError, match=f"device '{device}'"):
        hf.load("run", device=device)


def test_large_numbers_may_be_written_short(train, folder):
    train("--run-dir", "run", "--quiet", "--num-steps=0.4e1", steps="1.6e1")
    config = json.loads((folder / "run/config.json").read_text())
    assert (config["total_steps"], config["num_steps"]) == (16, 4)


OWN_CORE = """
import holdfast as hf
from holdfast.cli import main

class Mine(hf.GRU):
    def __init__(self, input_size, hidden_size):
        super().__init__(input_size, hidden_size)

class NoCore:
    def __init__(self, input_size, hidden_size): ...

something = 3
"""


def test_a_core_of_the_users_own_is_trained_saved_and_loaded(run, train, folder, capsys, monkeypatch):
    (folder / "core_of_mine.py").write_text(OWN_CORE)
    train("--quiet", "--core", "core_of_mine:Mine")
    where = folder / "runs/RepeatPreviousEasy-v0/Mine-h8-seed1"
    assert json.loads((where / "config.json").read_text())["core"] == "core_of_mine:Mine"
    from core_of_mine import Mine

    assert isinstance(hf.load(where).core, Mine)
    assert run("eval", where, "--episodes", 2) == 0
    assert run("train", "--resume", where, "--total-steps", 128, "--quiet") == 0
    assert hf.TrainConfig(core=Mine).core == "core_of_mine:Mine"
    capsys.readouterr()
    for flags, words in (
        ("--core core_of_mine:Mne", "core 'core_of_mine:Mne': core_of_mine has no Mne; did you mean Mine?"),
        ("--core core_of_mine:NoCore", "core core_of_mine:NoCore: the class NoCore is no hf.Core"),
        ("--core core_of_mine:something", "core core_of_mine:something: expected a class, got a int"),
        (
            "--core core_of_mine:Mine --num-layers 2",
            "core core_of_mine:Mine takes no num_layers, so num_layers=2 has no effect",
        ),
        (
            "--core core_of_mine:Mine --reset never",
            "core core_of_mine:Mine takes no reset, so reset='never' has no effect",
        ),
    ):
        assert run("train", *flags.split()) == 2
        assert capsys.readouterr().err.startswith(f"holdfast train: {words}")


def test_a_preset_gives_defaults_and_flags_override_them(train, folder):
    train("--preset", "t-maze-200", "--quiet", "--env-args", "length=5")
    config = json.loads((folder / "runs/TMaze-v0/lstm-h8-length5-envs4-steps8-etc-seed1/config.json").read_text())
    assert config["env"] == "holdfast/TMaze-v0" and config["entropy_coef"] == PRESETS["t-maze-200"]["entropy_coef"]
    assert config["hidden_size"] == 8 and config["env_kwargs"] == {"length": 5}


def test_a_run_folder_is_never_overwritten(run, train, tiny, folder, capsys):
    for _ in range(3):
        train("--quiet")
    names = sorted(path.name for path in (folder / "runs/RepeatPreviousEasy-v0").iterdir())
    assert names == ["lstm-h8-seed1", "lstm-h8-seed1-2", "lstm-h8-seed1-3"]
    assert run("train", *tiny, "--name", "lstm-h8-seed1", "--total-steps", 64) == 2
    assert "already holds a run" in capsys.readouterr().err


def test_a_config_reruns_a_run_exactly(run, train, folder):
    train("--quiet", "--run-dir", "first", "--gamma", "0.9")
    assert run("train", "--config", "first/config.json", "--run-dir", "second") == 0
    first, second = (read_progress(folder / name) for name in ("first", "second"))
    assert _without_time(first) == _without_time(second)
    assert json.loads((folder / "second/config.json").read_text())["gamma"] == 0.9


def test_a_config_file_is_rerun_under_the_next_free_name(run, train, folder):
    train("--quiet")
    runs = folder / "runs/RepeatPreviousEasy-v0"
    for earlier in ("lstm-h8-seed1", "lstm-h8-seed1-2"):
        assert run("train", "--config", runs / earlier / "config.json", "--quiet") == 0
    assert sorted(path.name for path in runs.iterdir()) == ["lstm-h8-seed1", "lstm-h8-seed1-2", "lstm-h8-seed1-3"]
    config = json.loads((runs / "lstm-h8-seed1-2/config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "name": "lstm-seed1-2"}))  # as 0.1 wrote it
    assert run("train", "--config", "config.json", "--quiet") == 0
    assert (runs / "lstm-h8-seed1-4").exists()


def _without_time(rows):
    return [{name: text for name, text in row.items() if not name.startswith("time/")} for row in rows]


def test_a_run_continues_where_it_is_now_with_more_steps(run, train, folder, capsys):
    train("--quiet", "--run-dir", "whole", "--lr-schedule", "constant", steps=128)
    train("--quiet", "--run-dir", "part", "--lr-schedule", "constant")
    os.rename(folder / "part", folder / "moved")
    assert run("train", "--resume", "moved", "--total-steps", 128, "--quiet") == 0
    assert not (folder / "part").exists()
    assert _without_time(read_progress(folder / "moved")) == _without_time(read_progress(folder / "whole"))
    assert run("train", "--resume", "moved", "--hidden-size", 16) == 2
    assert "--hidden-size 16 cannot change" in capsys.readouterr().err


def test_a_resumed_run_keeps_the_arguments_of_its_environment(run, train, folder, capsys):
    train("--quiet", "--run-dir", "run", "--env", "holdfast/TMaze-v0", "--env-args", "length=5")
    assert run("train", "--resume", "run", "--total-steps", 128, "--quiet") == 0
    assert json.loads((folder / "run/config.json").read_text())["env_kwargs"] == {"length": 5}
    assert run("train", "--resume", "run", "--env-args", "length=6") == 2
    assert "--env-kwargs {'length': 6} cannot change" in capsys.readouterr().err


def test_a_checkpoint_of_another_program_and_a_damaged_one_are_mistakes(run, train, folder, capsys):
    from holdfast.runs import checkpoint

    checkpoint.save(folder / "other.pt", {"weights": [1.0]})
    train("--quiet", "--run-dir", "run")
    (file,) = (folder / "run/checkpoints").glob("*.pt")
    file.write_bytes(file.read_bytes()[:-1])
    capsys.readouterr()
    for command in ("eval", "train --resume"):
        assert run(*command.split(), "other.pt") == 2
        assert "it has no collector, config, own_policy, policy" in capsys.readouterr().err
        assert run(*command.split(), "run") == 2
        assert "damaged or cut short" in capsys.readouterr().err


def test_a_replay_error_is_a_message_and_no_traceback(run, tiny, folder, capsys, monkeypatch):
    from holdfast.training import replay_check

    def fail(*arguments, **options):
        raise replay_check.ReplayError("the training leg differs\nat t = 3")

    monkeypatch.setattr(replay_check, "check", fail)
    assert run("train", *tiny, "--total-steps", 64, "--quiet") == 2
    assert capsys.readouterr().err == "holdfast train: the training leg differs at t = 3\n"


def test_ctrl_c_saves_and_says_how_to_continue(tiny, folder):
    argv = [sys.executable, "-m", "holdfast", "train", *tiny, "--total-steps", "100000000", "--run-dir", "run"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while not read_progress(folder / "run") and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    assert "continue with   holdfast train --resume run" in out
    assert len(list((folder / "run/checkpoints").glob("update_*.pt"))) == 1


def test_environments_per_rank_are_multiplied_by_the_ranks_and_exclude_the_number_in_all(
    train, folder, capsys, monkeypatch
):
    from holdfast.cli.train import _envs_of_all_ranks

    for name, value in (("RANK", "3"), ("WORLD_SIZE", "8"), ("MASTER_ADDR", "here")):
        monkeypatch.setenv(name, value)
    assert _envs_of_all_ranks([], 4) == 32
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name)
    assert _envs_of_all_ranks([], 4) == 4, "without torchrun there is one rank"
    flags = ["train", "--env", "holdfast/TMaze-v0"]
    for more, said in (
        (["--num-envs-per-rank", "4", "--num-envs", "8"], "--num-envs is the total"),
        (["--num-envs-per-rank", "0"], "--num-envs-per-rank 0: expected at least 1"),
        (
            ["--resume", "run", "--num-envs-per-rank", "4"],
            "distributes them over its ranks; leave out --num-envs-per-rank",
        ),
    ):
        assert main([*(flags if "--resume" not in more else ["train"]), *more]) != 0
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--resume", "--preset", "--config"])
def test_an_empty_variable_of_the_shell_does_not_start_another_run(run, folder, capsys, flag):
    assert run("train", flag, "") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert flag in line and "empty" in line and list(folder.iterdir()) == []


def test_seeds_outside_their_range_are_refused_in_one_line(run, folder, capsys):
    assert run("train", "--seeds", "-1", "2") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--seed -1 must be between 0 and" in line


def test_a_file_cannot_send_commands_to_the_terminal(run, folder, capsys):
    (folder / "preset.json").write_text('{"env": "\\u001b]0;title\\u0007\\u001b[2J"}')
    assert run("train", "--preset", "preset.json") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.isprintable()


@pytest.mark.parametrize("changed", [["--actor-obs", "a"], ["--critic-obs", "a"], ["--initial-std", "2.0"]])
def test_what_the_weights_depend_on_cannot_change_when_a_run_is_resumed(run, folder, train, capsys, changed):
    train("--run-dir", "run")
    capsys.readouterr()
    assert run("train", "--resume", "run", "--total-steps", 128, *changed) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{' '.join(changed)} cannot change when a run is resumed" in line


def test_a_run_writes_through_no_link_in_its_folder(run, train, folder, capsys):
    """An unpacked folder may have links to anywhere under the names that a run writes."""
    names = ("config.json", "meta.json", "progress.csv", "result.json", "curve.png", "checkpoints/best.pt")
    (folder / "run/checkpoints").mkdir(parents=True)
    precious = folder / "precious"
    precious.write_text("kept")
    for name in names:
        (folder / "run" / name).symlink_to(precious)
    train("--env", "CartPole-v1", "--run-dir", "run", "--eval-every", 1, "--seed", 3, steps=256)
    assert precious.read_text() == "kept"
    assert [name for name in names if (folder / "run" / name).is_symlink()] == []
    (folder / "other").mkdir()
    (folder / "other/run.lock").symlink_to(precious)
    assert run("train", "--env", "CartPole-v1", "--run-dir", "other", "--total-steps", 64) == 2
    assert "this is a link" in capsys.readouterr().err and precious.read_text() == "kept"
