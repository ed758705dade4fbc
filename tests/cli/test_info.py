import json

import pytest

import holdfast as hf
from holdfast.cli import info
from holdfast.cores.named import CORES
from holdfast.runs import metadata


def test_info_prints_versions(run, capsys):
    assert run("info") == 0
    out = capsys.readouterr().out
    assert "\ntorch " in out and "\ncpu kernel " in out


def test_the_rows_name_versions_devices_and_the_cpu_kernel():
    rows = dict(info.machine_rows())
    assert rows["torch"].startswith("2.")
    assert "cores" in rows["cpu"]
    assert rows["cpu kernel"].startswith(("native", "portable"))
    assert rows["devices"]


def test_what_is_not_installed_comes_with_the_line_that_installs_it(monkeypatch):
    monkeypatch.setattr(metadata, "package_versions", lambda names: {})
    rows = dict(info.machine_rows())
    assert rows["matplotlib"] == "not installed (plots; pip install 'holdfast[plot]')"
    assert rows["torch"] == "missing"


def test_info_of_a_run_says_what_it_was_made_with(run, train, folder, capsys):
    train("--quiet", "--run-dir", "run", "--core", "gru")
    file = folder / "run/meta.json"
    engines = {"rollout": "step by step", "update": "autograd, because MyPolicy overrides decode"}
    file.write_text(json.dumps({**json.loads(file.read_text()), "engines": engines}))
    (checkpoint,) = (folder / "run/checkpoints").glob("*.pt")
    for name in ("run", checkpoint):
        capsys.readouterr()
        assert run("info", name) == 0
        out = capsys.readouterr().out
        assert "task      holdfast/RepeatPreviousEasy-v0, gru 8, seed 1\n" in out
        assert "rollout   step by step\nupdate    autograd, because MyPolicy overrides decode\n" in out


def test_info_of_a_run_from_before_engines_were_recorded(run, train, folder, capsys):
    train("--quiet", "--run-dir", "run")
    file = folder / "run/meta.json"
    meta = json.loads(file.read_text())
    meta.pop("engines", None)
    file.write_text(json.dumps(meta))
    assert run("info", "run") == 0
    assert "\nupdate " not in capsys.readouterr().out


def test_info_of_a_checkpoint_that_was_copied_elsewhere_says_what_is_in_it(run, train, folder, capsys):
    train("--quiet", "--run-dir", "run", "--core", "gru", steps=64)
    (checkpoint,) = (folder / "run/checkpoints").glob("*.pt")
    (folder / "copied.pt").write_bytes(checkpoint.read_bytes())
    capsys.readouterr()
    assert run("info", "copied.pt") == 0
    out = capsys.readouterr().out
    assert out.startswith("checkpoint  copied.pt, without the meta.json of its run\n")
    assert "task        holdfast/RepeatPreviousEasy-v0, gru 8, seed 1\n" in out
    assert "trained     64 of 64 steps, 2 of 2 updates\n" in out


def test_info_of_another_file_of_a_run_names_the_run(run, train, folder, capsys):
    train("--quiet", "--run-dir", "runs/x")
    capsys.readouterr()
    assert run("info", "runs/x/config.json") == 2
    assert capsys.readouterr().err.endswith("It lies in a run: name the run's folder, runs/x\n")


def test_info_of_a_shared_policy_says_how_to_read_it(run, train, folder, capsys):
    pytest.importorskip("safetensors")
    train("--quiet", "--run-dir", "run", "--core", "gru")
    hf.save_pretrained(hf.load("run"), "shared")
    capsys.readouterr()
    assert run("info", "shared") == 0
    out = capsys.readouterr().out
    assert "class    ActorCritic\ntask     holdfast/RepeatPreviousEasy-v0, gru 8, seed 1\n" in out
    assert out.endswith("read it  hf.load('shared')\n")
    (folder / "shared/model.safetensors").write_bytes(b"junk")
    assert run("info", "shared") == 2
    assert "damaged, cut short or changed" in capsys.readouterr().err


@pytest.mark.parametrize("core", CORES)
def test_info_of_a_core_says_what_it_costs(run, capsys, core):
    assert run("info", "--core", core, "--hidden-size", "16") == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert rows["core"] == f"{core}, 16 units"
    assert int(rows["parameters"].replace(",", "")) > 0 and " per environment: " in rows["state"]


def test_the_figures_of_a_core_are_those_worked_out_by_hand(run, capsys):
    run("info", "--core", "mingru", "--hidden-size", "16")
    out = capsys.readouterr().out
    assert f"parameters  {2 * 16 * 16 + 2 * 16:,}\n" in out  # gate and candidate, with biases
    assert "state       64 bytes per environment: h [1, 16] float32\n" in out
    run("info", "--core", "gru", "--hidden-size", "16", "--num-layers", "2")
    out = capsys.readouterr().out
    assert f"parameters  {2 * 2 * (3 * 16 * 16 + 3 * 16):,}\n" in out
    assert "state       128 bytes per environment: h [2, 16] float32\n" in out


def test_info_refuses_an_unknown_core_and_a_run_together_with_a_core(run, capsys):
    assert run("info", "--core", "tape") != 0
    assert "unknown core 'tape'; one of lstm, gru" in capsys.readouterr().err
    assert run("info", "some-run", "--core", "gru") != 0
    assert "give a run or --core, not both" in capsys.readouterr().err


@pytest.mark.parametrize(
    "missing", ["changed", "git", "packages", "command", "devices", "engines", "cpu", "python", "threads"]
)
def test_info_of_a_run_whose_metadata_lacks_an_entry_says_the_rest(missing, run, folder, capsys):
    meta = {**metadata.describe_process(), "git": {"commit": "a" * 40, "changed": None}, "engines": {}}
    meta.pop(missing, meta["git"].pop(missing, None))
    (folder / "meta.json").write_text(json.dumps(meta))
    (folder / "config.json").write_text(json.dumps({"env": "CartPole-v1"}))
    assert run("info", folder) == 0
    assert "task      CartPole-v1" in capsys.readouterr().out


@pytest.mark.parametrize("meta", ["[]", '{"git": 7, "packages": [], "command": "x", "devices": {}, "engines": 3}'])
def test_info_of_metadata_of_another_kind_is_no_traceback(meta, run, folder, capsys):
    (folder / "meta.json").write_text(meta)
    (folder / "config.json").write_text("{}")
    assert run("info", folder) in (0, 2) and "Traceback" not in "".join(capsys.readouterr())


ESCAPE = "\x1b]0;owned\x07\u202e\nfake"


@pytest.mark.parametrize("command", ["run", "checkpoint", "shared", "export", "eval", "doctor", "plot"])
def test_what_a_file_names_reaches_the_terminal_as_text(command, run, train, folder, capsys):
    from holdfast.runs import checkpoint

    train("--quiet", "--run-dir", "run", "--core", "gru", "--env", "CartPole-v1")
    (file,) = (folder / "run/checkpoints").glob("*.pt")
    saved = checkpoint.load(file)
    saved["config"]["env"] = ESCAPE
    if command == "shared":
        pytest.importorskip("safetensors")
        hf.save_pretrained(hf.load(folder / "run"), folder / "shared")
        manifest = json.loads((folder / "shared/manifest.json").read_text())
        config = json.loads((folder / "shared/config.json").read_text())
        config["training"]["env"] = config["policy"]["class"] = ESCAPE
        (folder / "shared/config.json").write_text(json.dumps(config))
        from holdfast.runs import pretrained

        files = {name: (folder / "shared" / name).read_bytes() for name in manifest["files"]}
        (folder / "shared/manifest.json").write_bytes(pretrained.manifest_of(files))
    checkpoint.save(file, saved)
    (folder / "run/config.json").write_text(json.dumps({**saved["config"], "core": ESCAPE, "policy": ESCAPE}))
    argv = {
        "run": ["info", "run"],
        "checkpoint": ["info", file.rename(folder / "copied.pt") if command == "checkpoint" else file],
        "shared": ["info", "shared"],
        "export": ["export", "run", "--format", "pt2"],
        "eval": ["eval", "run", "--env", "CartPole-v1", "--episodes", "1"],
        "doctor": ["doctor", "run:run", "--quiet"],
        "plot": ["plot", "run", "--metric", ESCAPE],
    }[command]
    capsys.readouterr()
    run(*argv)
    said = "".join(capsys.readouterr())
    assert said and not any(sign in said for sign in ("\x1b", "\x07", "\u202e")) and "\nfake" not in said
    assert command in ("eval", "doctor") or r"\x1b]0;owned\x07\u202e" in said
