import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gymnasium import spaces

import holdfast as hf
from holdfast.cli import commands
from holdfast.runs import checkpoint


def test_help_names_every_command(run, capsys):
    for argv in ([], ["--help"], ["-h"]):
        assert run(*argv) == 0
        text = capsys.readouterr().out
        assert all(f"\n  {command} " in text for command in commands.COMMANDS)


@pytest.mark.parametrize("command", commands.COMMANDS)
def test_every_command_has_help(command, run, capsys):
    assert run(command, "--help") == 0
    assert f"usage: holdfast {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("trian", "no command 'trian'; did you mean train?"),
        ("train --hiden-size 3", "unknown option --hiden-size; did you mean --hidden-size?"),
        ("train --core rnn", "--core rnn must be one of lstm, gru"),
        ("train --hidden-size big", "--hidden-size: 'big' is not an integer"),
        ("train --gamma big", "--gamma: 'big' is not a number"),
        ("train --num-envs -1", "--num-envs -1 must be at least 0"),
        ("train --bptt 7 --num-steps 64", "--bptt 7 must divide --num-steps 64"),
        ("train --preset nothing", "unknown preset 'nothing'; one of repeat-previous-easy"),
        ("train --preset t-maze --resume runs/x", "--preset and --resume cannot be combined"),
        ("train --resume runs/x --seeds 1 2", "--resume continues one run"),
        ("train --seeds 1 2 --run-dir x", "--run-dir is one folder"),
        ("train --resume nowhere", "nowhere: there is no such file or run folder"),
        ("train --config nowhere.json", "nowhere.json: there is no such file"),
        ("train --env CartPoll-v1", "no environment 'CartPoll-v1'; did you mean CartPole-v1"),
        ("train CartPole-v1", "unexpected argument 'CartPole-v1'; did you mean --env CartPole-v1?"),
        ("train --core gru lstm", "unexpected argument 'lstm'; see holdfast train --help"),
        ("train --preset t-maz", "unknown preset 't-maz'; did you mean t-maze?"),
        ("train --env ./my_envs.py:MyEnv", "'./my_envs.py:MyEnv': ./my_envs.py is a file; name its module, my_envs"),
        ("train --policy nets/my.py:Net", "policy 'nets/my.py:Net': nets/my.py is a file; name its module, nets.my"),
        ("train --env ../my_envs.py:MyEnv", "../my_envs.py is a file; name its module, my_envs and start in .."),
        ("train --policy my.py:Net", "policy 'my.py:Net': my.py is a file; name its module, my"),
        ("train --env-args length", "expected name=value"),
        ("train --env holdfast/TMaze-v0 --env-args size=4", "there is no argument 'size'; it takes length"),
        ("train --device cuda:x", "device 'cuda:x': Holdfast runs on CPUs"),
        ("eval", "RUN is missing; see holdfast eval --help"),
        ("eval somewhere", "somewhere: this folder holds runs (2); name one of them, such as somewhere/CartPole/a"),
        (
            "eval somewhere/CartPole",
            "CartPole: this folder holds runs (2); name one of them, such as somewhere/CartPole/a",
        ),
        ("eval nowhere", "nowhere: there is no such file or run folder"),
        ("plot nowhere", "nowhere is not a run folder"),
        ("info nowhere", "nowhere: there is no such file or run folder"),
        ("info somewhere", "somewhere: this folder holds runs (2); name one of them, such as somewhere/CartPole/a"),
    ],
)
def test_a_mistake_ends_in_one_line_and_exit_code_2(argv, words, run, folder, capsys):
    for name in ("a", "b"):
        (folder / "somewhere/CartPole" / name / "checkpoints").mkdir(parents=True)
        (folder / "somewhere/CartPole" / name / "checkpoints/update_00000001.pt").touch()
    assert run(*argv.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1 and err.startswith("holdfast")
    assert words in err


@pytest.mark.parametrize("command", ["eval", "doctor", "doctor run:", "export", "train --resume", "plot"])
def test_a_shared_policy_is_told_apart_from_a_run(command, run, folder, capsys):
    pytest.importorskip("safetensors")
    hf.save_pretrained(hf.ActorCritic(spaces.Box(-1, 1, (3,)), spaces.Discrete(2), "gru", 8), "shared")
    argv = f"{command}shared" if command.endswith(":") else f"{command} shared"
    assert run(*argv.split()) == 2
    out, err = capsys.readouterr()
    said = "this folder holds a policy that hf.save_pretrained wrote, not a run; it is read in Python, with"
    assert out == "" and err.count("\n") == 1 and err.endswith(f"shared: {said} hf.load('shared')\n")


def test_a_policy_on_the_hub_is_told_apart_from_a_run(run, folder, capsys):
    assert run("eval", "hub:user/name") == 2
    said = "this is a policy on the hub, not a run; it is read in Python, with hf.load('hub:user/name')"
    assert capsys.readouterr().err == f"holdfast eval: hub:user/name: {said}\n"


def test_a_traceback_is_shown_on_request(run, folder, monkeypatch):
    monkeypatch.setenv("HOLDFAST_TRACEBACK", "1")
    with pytest.raises(commands.UserError, match="RUN is missing"):
        run("eval")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_run_whose_output_has_no_room_trains_to_its_end(run, tiny, folder, capsys, monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert run("train", "--env", "CartPole-v1", *tiny, "--total-steps", 96, "--run-dir", "run") == 1
    monkeypatch.undo()
    assert checkpoint.find(folder / "run").name == "update_00000003.pt" and (folder / "run/result.json").exists()
    assert capsys.readouterr().err == "holdfast train: the output cannot be written: No space left on device\n"


def test_a_terminal_that_knows_ascii_alone_gets_question_marks(run, monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(raw, encoding="ascii"))
    assert run("tra\u00efn") == 2
    sys.stderr.flush()
    assert raw.getvalue().startswith(b"holdfast: no command 'tra?n'")


def test_ctrl_c_while_torch_is_imported_ends_the_command_and_stays_an_exception_elsewhere(folder):
    (folder / "torch.py").write_text("raise KeyboardInterrupt\n")
    (folder / "holdfast").write_text("import sys\nfrom holdfast.cli import main\nsys.exit(main())\n")
    (folder / "mine.py").write_text("import holdfast\n")
    paths = os.pathsep.join([str(folder), str(Path(hf.__file__).parent.parent)])

    def python(*argv):
        command = [sys.executable, *argv]
        return subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True)

    for argv in (["-m", "holdfast", "info"], ["holdfast", "info"]):
        done = python(*argv)
        assert (done.returncode, done.stderr) == (130, "stopped\n")
    for argv in (["mine.py"], ["-m", "mine"], ["-c", "import holdfast"]):
        done = python(*argv)
        assert done.returncode != 130 and "KeyboardInterrupt" in done.stderr
