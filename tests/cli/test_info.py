import json

from holdfast.cli import info
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
