"""Child processes: what they say, how they ended, and that none outlives its block."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast.distributed import processes as module
from holdfast.distributed.processes import Child, Processes, Terminated

SAVES = """
import pathlib, signal, sys, time
def stop(*_):
    time.sleep(0.2)
    pathlib.Path(sys.argv[1]).write_text("saved")
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
while True:
    time.sleep(0.01)
"""
REFUSES = SAVES.replace("sys.exit(143)", "return")
PIPES: dict[str, Any] = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def python(code: str, *arguments: Any) -> list[str]:
    return ["-c", code, *map(str, arguments)]


def ready(processes: Processes, code: str, file: Path) -> Child:
    """A child that has said a first line."""
    child = processes.start(python(code, file), stdout=subprocess.PIPE)
    assert processes.next(timeout=60) == (child, "ready\n")
    return child


def test_lines_come_as_they_are_written_and_then_the_end():
    with Processes() as processes:
        child = processes.start(python("for line in open(0): print(2 * int(line), flush=True)"), **PIPES)
        for number in (3, 4):
            child.send(str(number))
            assert processes.next(timeout=60) == (child, f"{2 * number}\n")
        assert processes.next(timeout=0.01) == (None, None)
        child.end_input()
        assert processes.next(timeout=60) == (child, None)
        assert child.reap() == ("exit code 0", "", "")


def test_a_line_that_was_cut_off_is_left_out_and_bytes_that_are_no_text_do_no_harm():
    code = "import os; os.write(1, b'\\xff\\n{\"result\": 1'); os.kill(os.getpid(), 9)"
    with Processes() as processes:
        child = processes.start(python(code), stdout=subprocess.PIPE)
        assert processes.next(timeout=60) == (child, "\N{REPLACEMENT CHARACTER}\n")
        assert processes.next(timeout=60) == (child, None)


@pytest.mark.parametrize(
    ("code", "ended", "error"),
    [
        ("raise SystemExit(3)", "exit code 3", ""),
        ("import os; os.kill(os.getpid(), 9)", "signal SIGKILL", ""),
        ("raise ValueError('no luck')", "exit code 1", "ValueError: no luck"),
        ("import sys; sys.exit('a warning:\\n    a line of code\\n')", "exit code 1", "a warning:"),
    ],
)
def test_the_end_of_a_child_is_told_in_words(code: str, ended: str, error: str):
    with Processes() as processes:
        child = processes.start(python(f"print('said')\nprint('more', flush=True)\n{code}"))
        assert processes.next(timeout=60) == (child, None)
        assert child.reap() == (ended, "said\nmore\n", error)


def test_more_than_a_pipe_holds_does_not_stop_a_child_that_nobody_reads():
    with Processes() as processes:
        child = processes.start(python("print('x' * 10**6); import sys; sys.exit('y' * 10**6)"))
        assert processes.next(timeout=60) == (child, None)
        assert [len(text) for text in child.reap()[1:]] == [10**6 + 1, 10**6]


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, SystemExit, ValueError])
def test_however_a_block_ends_its_children_save_and_end_first(tmp_path: Path, error: Any):
    try:
        with Processes() as processes:
            children = [ready(processes, SAVES, tmp_path / str(number)) for number in range(2)]
            if error is not None:
                raise error
    except (KeyboardInterrupt, SystemExit, ValueError) as raised:
        assert type(raised) is error
    assert [child.returncode for child in children] == [143, 143]
    assert [(tmp_path / str(number)).read_text() for number in range(2)] == ["saved", "saved"]


def test_a_child_that_takes_too_long_to_stop_is_killed(tmp_path: Path):
    with Processes(seconds_to_stop=0.5) as processes:
        child = ready(processes, REFUSES, tmp_path / "file")
        began = time.monotonic()
    assert child.returncode == -signal.SIGKILL and 0.5 <= time.monotonic() - began < 20


def test_a_child_whose_input_has_ended_may_finish_what_it_does(tmp_path: Path):
    code = "import sys, time, pathlib; sys.stdin.read(); time.sleep(0.3); pathlib.Path(sys.argv[1]).write_text('done')"
    with Processes() as processes:
        child = processes.start(python(code, tmp_path / "file"), **PIPES)
        child.end_input()
    assert child.returncode == 0 and (tmp_path / "file").read_text() == "done"


def test_sigterm_ends_the_block_and_its_children_and_the_handler_is_put_back(tmp_path: Path):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated) as raised, Processes() as processes:
        child = ready(processes, SAVES, tmp_path / "file")
        os.kill(os.getpid(), signal.SIGTERM)
        processes.next(timeout=60)
    assert raised.value.code == 143 and child.returncode == 143 and (tmp_path / "file").read_text() == "saved"
    assert signal.getsignal(signal.SIGTERM) is before


def test_sigterm_in_the_middle_of_a_start_leaves_no_child(monkeypatch: pytest.MonkeyPatch):
    started: list[Child] = []

    class Slow(Child):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)

    monkeypatch.setattr(module, "Child", Slow)
    with pytest.raises(Terminated), Processes() as processes:
        processes.start(python("import time; time.sleep(60)"))
        pytest.fail("the block goes on")
    assert [child.returncode for child in started] == [-signal.SIGTERM]


def test_a_child_that_is_gone_when_it_is_written_to_is_reported_by_its_end():
    with Processes() as processes:
        child = processes.start(python("pass"), **PIPES)
        child.wait()
        child.send("more")
        assert processes.next(timeout=60) == (child, None)
        assert child.reap()[0] == "exit code 0"


def test_children_can_be_started_from_another_thread():
    seen: list[Any] = []

    def work() -> None:
        with Processes() as processes:
            processes.start(python("print(1)"), stdout=subprocess.PIPE)
            seen.extend(processes.next(timeout=60)[1] for _ in range(2))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert seen == ["1\n", None]
