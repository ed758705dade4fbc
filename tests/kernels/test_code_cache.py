"""The cache of compiled code: where it is, and whose code is trusted."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest

from holdfast.kernels import code_cache
from holdfast.kernels.code_cache import UntrustedCacheError
from holdfast.kernels.cuda import nvrtc


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "a" / "cache"))
    return tmp_path / "a" / "cache"


def test_what_is_stored_is_found_and_the_folders_are_the_users_alone(cache: Path):
    assert code_cache.find("kernel.cubin") is None
    code_cache.store("kernel.cubin", b"code")
    assert code_cache.find("kernel.cubin") == cache / "kernel.cubin" and nvrtc._cached("kernel.cubin") == b"code"
    assert [path.stat().st_mode & 0o777 for path in (cache, cache.parent)] == [0o700] * 2
    assert sorted(path.name for path in cache.iterdir()) == ["kernel.cubin", "kernel.cubin.sha256"]


@pytest.mark.parametrize("change", ["truncated", "other content", "others may write", "a link", "of another user"])
def test_a_file_that_is_damaged_or_of_somebody_else_is_not_used(cache: Path, change: str):
    code_cache.store("kernel.cubin", b"code")
    path = cache / "kernel.cubin"
    if change == "others may write":
        path.chmod(0o706)
    elif change == "a link":
        path.rename(cache / "elsewhere")
        path.symlink_to(cache / "elsewhere")
    elif change == "of another user":
        if os.getuid() != 0:
            pytest.skip("only root can give files away")
        os.chown(path, 12345, -1)
    else:
        path.write_bytes(b"cod" if change == "truncated" else b"evil")
    assert code_cache.find("kernel.cubin") is None
    code_cache.store("kernel.cubin", b"code")
    assert code_cache.find("kernel.cubin") == path


@pytest.mark.parametrize("mode", [0o707, 0o777, 0o770])
@pytest.mark.parametrize("which", ["cache", "parent"])
def test_a_folder_that_others_may_write_is_refused_with_what_to_do(cache: Path, mode: int, which: str):
    code_cache.store("kernel.cubin", b"code")
    folder = cache if which == "cache" else cache.parent
    os.chown(folder, -1, 12345) if os.getuid() == 0 else None
    folder.chmod(mode)
    if mode == 0o770 and os.getuid() != 0:
        pytest.skip("the group may be the user's own")
    with pytest.raises(UntrustedCacheError, match=f"others may write {folder}, .*set HOLDFAST_CACHE.*chmod go-w"):
        code_cache.find("kernel.cubin")
    with pytest.raises(UntrustedCacheError):
        code_cache.store("other", b"code")
    if which == "parent":
        folder.chmod(0o1777)  # as /tmp is: nobody can replace what is the user's there
        assert code_cache.find("kernel.cubin") is not None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_a_folder_of_another_user_is_refused(cache: Path):
    code_cache.store("kernel.cubin", b"code")
    os.chown(cache, 12345, -1)
    with pytest.raises(UntrustedCacheError, match=r"belongs to another user \(uid 12345\)"):
        code_cache.find("kernel.cubin")


WHERE: list[tuple[dict[str, str], str]] = [
    ({"HOLDFAST_CACHE": "/x", "XDG_CACHE_HOME": "/y", "HOME": "/h"}, "/x"),
    ({"HOLDFAST_CACHE": "", "XDG_CACHE_HOME": "/y", "HOME": "/h"}, "/y/holdfast"),
    ({"XDG_CACHE_HOME": "", "HOME": "/h"}, "/h/.cache/holdfast"),
    ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "/h/.cache/holdfast"),
]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other folders")
@pytest.mark.parametrize("variables, expected", WHERE)
def test_the_environment_says_where(variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch):
    for name in ("HOLDFAST_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(code_cache.folder()) == expected


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other folders")
@pytest.mark.parametrize("home", [None, ""])
def test_a_user_without_a_home_or_a_name_has_a_cache_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str | None
):
    for name in ("HOLDFAST_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    if home is not None:
        monkeypatch.setenv("HOME", home)
    monkeypatch.setattr(os, "getuid", lambda: 54321)  # in no table of users, as in a container that is given a number
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert code_cache.folder() == tmp_path / "holdfast-54321"
