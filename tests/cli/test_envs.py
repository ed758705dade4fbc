from holdfast.config import PRESETS


def test_envs_lists_ours_and_the_presets(run, capsys):
    assert run("envs") == 0
    out = capsys.readouterr().out
    assert "holdfast/TMaze-v0" in out and "popgym:" in out
    assert "The documentation describes them, in docs/environments.md." in out
    assert all(preset in out for preset in PRESETS)
