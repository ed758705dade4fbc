from holdfast.runs import metadata as info


def test_the_report_names_versions_devices_and_the_cpu_kernel():
    report = dict(info.report())
    assert report["torch"].startswith("2.")
    assert "cores" in report["cpu"]
    assert report["cpu kernel"].startswith(("native", "portable"))
    assert report["devices"]


def test_what_is_not_installed_comes_with_the_line_that_installs_it(monkeypatch):
    monkeypatch.setattr(info, "package_versions", lambda names: {})
    report = dict(info.report())
    assert report["matplotlib"] == "not installed (plots; pip install 'holdfast[plot]')"
    assert report["torch"] == "missing"


def test_git_state_is_none_outside_a_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert info.git_state() is None
