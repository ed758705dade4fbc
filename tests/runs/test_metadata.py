from holdfast.runs import metadata


def test_git_state_is_none_outside_a_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert metadata.git_state() is None
