from holdfast.config import PRESETS

MODULE = """
import holdfast.envs

class Broken(holdfast.envs.TMaze):
    can_truncate = False
"""


def test_envs_lists_ours_and_the_presets(run, capsys):
    assert run("envs") == 0
    out = capsys.readouterr().out
    assert "holdfast/TMaze-v0" in out and "popgym:" in out
    assert "The documentation describes them, in docs/environments.md." in out
    assert all(preset in out for preset in PRESETS)


def test_envs_checks_one_of_your_own(run, capsys, tmp_path, monkeypatch):
    (tmp_path / "checked_by_a_command.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    assert run("envs", "--check", "holdfast/TMaze-v0", "--env-args", "length=3") == 0
    assert capsys.readouterr().out == "holdfast/TMaze-v0: no fault found\n"
    assert run("envs", "--check", "checked_by_a_command:Broken", "--env-args", "length=3") == 1
    assert capsys.readouterr().out == (
        "Broken breaks what holdfast.envs.TorchVectorEnv promises:\n"
        "- an episode was truncated, but the class says can_truncate = False\n"
    )
    assert run("envs", "--check", "CartPole-v1") == 2
    assert "check takes a TorchVectorEnv" in capsys.readouterr().err
