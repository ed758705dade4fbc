"""Objects named as `module:Name`: found in the current folder, and refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.cores import LSTM
from holdfast.named_objects import import_named, is_import_name, name_of


def test_a_module_in_the_current_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in __import__("sys").path if path])
    (tmp_path / "named_here.py").write_text("class Outer:\n    class Inner: pass\n")
    found = import_named("named_here:Outer.Inner", kind="core")
    assert found.__qualname__ == "Outer.Inner" and name_of(found) == "named_here:Outer.Inner"


@pytest.mark.parametrize(
    "name, message",
    [
        ("no_such_module_here:X", "core 'no_such_module_here:X': there is no module no_such_module_here, neither in "),
        ("holdfast.nothing:X", "core 'holdfast.nothing:X': there is no module holdfast.nothing, neither in "),
        ("holdfast.cores:LSTN", "core 'holdfast.cores:LSTN': holdfast.cores has no LSTN; did you mean LSTM?"),
        ("failing_module:X", "core 'failing_module:X': importing failing_module raised ZeroDivisionError: division by"),
        ("lacking_module:X", "core 'lacking_module:X': importing lacking_module raised ModuleNotFoundError: No module"),
        ("not a name:X", "core 'not a name:X': expected module:Name"),
        ("lstm", "core 'lstm': expected module:Name"),
    ],
)
def test_a_name_that_cannot_be_imported_is_refused_in_one_line(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "failing_module.py").write_text("1 / 0\n")
    (tmp_path / "lacking_module.py").write_text("import a_package_that_is_not_installed\n")
    with pytest.raises(ValueError) as refusal:
        import_named(name, kind="core")
    assert str(refusal.value).startswith(message) and "\n" not in str(refusal.value)


def test_only_module_and_name_count_as_an_import_name():
    assert is_import_name("package.module:Name")
    assert not any(map(is_import_name, ("lstm", ":X", "m:", "a b:C", "holdfast/TMaze-v0", "m:N-v0", "m:f()")))


def test_a_class_that_cannot_be_found_again_has_no_name():
    class Local: ...

    assert name_of(LSTM) == "holdfast.cores.lstm:LSTM"
    with pytest.raises(ValueError, match="top level of a module"):
        name_of(Local)
