"""What comes from a file, a database or a server reaches a terminal and a page as text."""

from __future__ import annotations

import ast
import errno
import io
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import holdfast
from holdfast.cli import commands
from holdfast.shown_text import OutputError, markdown, printable, show, without_password

SIGNS = [chr(number) for number in (*range(32), 127, *range(0x80, 0xA0), 0x200E, 0x202E, 0x2028, 0xDC80)]


@pytest.mark.parametrize("sign", SIGNS)
def test_a_sign_that_a_terminal_obeys_is_written_out(sign: str, capsys: pytest.CaptureFixture):
    show(f"a{sign}b", "c")
    said = capsys.readouterr().out
    first, second, end = said.split("\n")
    assert first.isprintable() and first.startswith("a\\") and first.endswith("b") and (second, end) == ("c", "")
    assert printable("grün 漢字 🙂") == "grün 漢字 🙂"


def test_rich_writes_its_own_styles_and_no_others():
    from rich.table import Table

    from holdfast.display.terminal import Terminal

    out = io.StringIO()
    console = Terminal(file=out, force_terminal=True, width=60)
    table = Table("\x1b[2Jhead")
    table.add_row("[bold]\x1b]0;owned\x07[/] :boom:")
    console.print(table, "two\nlines \x1b[31m", style="green", markup=True)
    text = out.getvalue()
    assert "\x1b[32m" in text and "\x07" not in text and "\x1b]0" not in text and "\x1b[2J" not in text
    assert (
        r"\x1b]0;owned" in text and "two" in text and "\nlines" in text.replace("\x1b[32m", "").replace("\x1b[0m", "")
    )


def test_commands_print_with_show_alone():
    """`print` and a plain rich console do not clean what they are given."""
    root = Path(holdfast.__file__).parent
    for path in [
        *root.glob("cli/*.py"),
        *root.glob("training/*.py"),
        *root.glob("display/*.py"),
        *root.glob("sweep/*.py"),
    ]:
        called = {
            ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
        }
        assert not called & {"print", "Console", "sys.stdout.write", "sys.stderr.write"}, path


def test_output_without_room_is_told_from_a_file_without_room():
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OutputError, match="No space left"):
        show("text", file=Full())


def test_a_warning_that_quotes_a_file_is_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    assert commands.main(["--version"]) == 0
    text = warnings.formatwarning("\x1b[33mWARN\x1b[0m \x1b[2J", UserWarning, "file.py", 3)
    assert text == "file.py:3: UserWarning: WARN \\x1b[2J\n"


def test_markdown_shows_a_name_as_it_is():
    assert markdown("a|b `c` <i>\n![x](http://y)") == "a\\|b 'c' &lt;i> !\\[x](http://y)"


@pytest.mark.parametrize(
    "address",
    ["mysql://me:se@cr:et@host/db", "postgresql://host/db?user=me&password=se@cr:et", "x://h/?PWD=se@cr:et&a=1"],
)
def test_a_password_is_not_shown(address: str):
    assert "cr:et" not in without_password(f"--storage {address}") and without_password("a:b@c /x:y") == "a:b@c /x:y"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="python -P")
def test_children_of_a_command_do_not_import_from_the_current_folder(tmp_path: Path):
    """As the command `holdfast` itself; `python -m` does, and its children do as well."""
    (tmp_path / "json.py").write_text("print('owned')")
    program = """
from holdfast.distributed.processes import Processes
with Processes() as processes:
    print(processes.start(["-c", "import json"]).reap())
"""
    found = subprocess.run(
        [sys.executable, "-P", "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "('exit code 0', '', '')", found
