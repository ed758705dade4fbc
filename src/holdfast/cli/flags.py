"""Reading the flags of a command, and turning what a user got wrong into one line."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Iterator
from typing import Any, TypeVar

Flags = TypeVar("Flags")


class UserError(Exception):
    """Something the user can put right; the message says how."""


def parse(kind: type[Flags], argv: list[str], name: str, default: Flags | None = None) -> Flags:
    """Flags of a command by tyro, whose several-line complaints become one line."""
    import tyro

    complaint = io.StringIO()
    options: dict[str, Any] = {} if default is None else {"default": default}
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(
                kind,
                args=argv,
                prog=f"holdfast {name}",
                config=(tyro.conf.OmitArgPrefixes, tyro.conf.PositionalRequiredArgs),
                **options,
            )
    except SystemExit as end:
        if not end.code:
            raise
        raise UserError(one_line(complaint.getvalue(), name)) from end


def one_line(complaint: str, name: str) -> str:
    """The first part of a complaint (a box: title, parts with rules between them) and the flag it suggests."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", complaint)
    lines = [line.strip("│╭╮╰╯ ") for line in text.splitlines()] or [""]
    ruled = ["\n" if set(line) <= set("─-") else line for line in lines[1:]]
    title, *parts = [lines[0].strip("─ "), *(" ".join(part.split()) for part in " ".join(ruled).split("\n"))]
    parts = [part for part in parts if part]
    what = parts[0] if parts else title
    what = re.sub(r"^Error parsing (\w+: )?", "", what)  # a flag's name helps, a class's does not
    what = re.sub(r"^Missing from [\w ]+: \S+ (.+?)\.? \(required\)", r"missing: \1", what)
    what = re.sub(r"invalid literal for int\(\) with base 10: (.+)", r"\1 is not an integer", what)
    what = re.sub(r"could not convert string to float: (.+)", r"\1 is not a number", what)
    likely = re.search(r"Perhaps you meant:\s+(--[\w-]+)", " ".join(parts[1:]))
    hint = f"; did you mean {likely[1]}?" if likely else f"; see holdfast {name} --help"
    return what.rstrip(".") + hint


def value_of(argv: list[str], flag: str) -> str | None:
    """The value of a flag that decides how the others are read."""
    for i, argument in enumerate(argv):
        if argument == flag and i + 1 < len(argv):
            return argv[i + 1]
        if argument.startswith(flag + "="):
            return argument[len(flag) + 1 :]
    return None


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """What goes wrong while things are set up is nearly always the user's to put right."""
    import gymnasium as gym

    from holdfast.runs.checkpoint import CheckpointError

    try:
        yield
    except FileNotFoundError as error:
        raise UserError(f"{error.filename}: there is no such file" if error.filename else str(error)) from error
    except json.JSONDecodeError as error:
        raise UserError(f"this is no JSON file: {error}") from error
    except (ValueError, TypeError, OSError, ImportError, RuntimeError, CheckpointError, gym.error.Error) as error:
        raise UserError(str(error)) from error
