"""The command `holdfast`: finds the subcommand and runs it. Each subcommand is a module of this folder.

A subcommand has a function `main(argv)` that returns the exit code. Its module is imported only when it is called, so
that `holdfast --help` stays fast. A `UserError` ends in one line and exit code 2; HOLDFAST_TRACEBACK=1 shows its origin.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
import warnings
from collections.abc import Sequence
from difflib import get_close_matches

from holdfast.cli.errors import UserError
from holdfast.config.settings import named_as_flags
from holdfast.shown_text import OutputError, output_errors, printable, show

COMMANDS = {
    "train": ("train a policy", "holdfast train --preset repeat-previous-easy"),
    "eval": ("measure a trained one", "holdfast eval RUN --episodes 200"),
    "sweep": ("search for better settings", "holdfast sweep --env ENV --trials 50 --time 2h"),
    "plot": ("draw learning curves", "holdfast plot RUN RUN ... -o curves.png"),
    "bench": ("compare memories on a suite", "holdfast bench popgym --cores gru window"),
    "envs": ("list environments", "holdfast envs"),
    "doctor": ("examine a policy", "holdfast doctor TARGET"),
    "export": ("write a policy to ONNX", "holdfast export RUN -o policy.onnx"),
    "info": ("versions, devices, engines", "holdfast info, holdfast info RUN"),
}
"""Name of each subcommand: what it does, and an example."""


def help_text() -> str:
    rows = (f"  {name:8} {summary:28} {example}" for name, (summary, example) in COMMANDS.items())
    return "\n".join(
        [
            "usage: holdfast COMMAND [OPTIONS]",
            "",
            "Reinforcement-learning policies that remember.",
            "",
            *rows,
            "",
            "RUN is a run folder, such as runs/RepeatPreviousEasy-v0/lstm-seed1, or one of its checkpoints.",
            "`holdfast COMMAND --help` lists the options of a command.",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    name, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    for stream in (sys.stdout, sys.stderr):  # a terminal that knows ASCII only shows ? for other characters
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    warnings.formatwarning = _format_warning
    if name in ("-h", "--help", "help"):
        show(*help_text().splitlines())
        return 0
    if name in ("-V", "--version"):
        from holdfast import __version__

        show(f"holdfast {__version__}")
        return 0
    try:
        if name not in COMMANDS:
            likely = get_close_matches(name, COMMANDS, 1)
            hint = f"did you mean {likely[0]}?" if likely else f"one of {', '.join(COMMANDS)}"
            raise UserError(f"no command {name!r}; {hint}")
        with named_as_flags():
            code: int = importlib.import_module(f"holdfast.cli.{name}").main(rest)
        if sys.stdout is not None:
            with output_errors():
                sys.stdout.flush()  # now, where an error can be said in one line
        return code
    except UserError as error:
        if os.environ.get("HOLDFAST_TRACEBACK"):
            raise
        prefix = f"holdfast {name}" if name in COMMANDS else "holdfast"
        show(f"{prefix}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        show("stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader (head, less) has closed the pipe
        close_output()
        return 0
    except OutputError as error:
        if os.environ.get("HOLDFAST_TRACEBACK"):
            raise
        close_output()
        show(f"holdfast {name}: the output cannot be written: {error.strerror}", file=sys.stderr)
        return 1


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """As Python does, without the line of code; a warning may quote a file, too."""
    return f"{printable(f'{filename}:{lineno}: {category.__name__}: {message}')}\n"


def close_output() -> None:
    """What standard output still holds goes nowhere when the process ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
