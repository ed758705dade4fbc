"""Text that comes from a file, a database or a server, as it may be shown: no commands to a terminal, no passwords."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

# The password of a user, up to the last @, or one among the options of an address.
_PASSWORDS = (re.compile(r"(://[^:/?@\s]*:)(\S*)(?=@)"), re.compile(r"(?i)([?&](?:password|passwd|pwd)=)([^&\s]*)"))

_COLOR = re.compile(r"\x1b\[[\d;]*m")


class OutputError(OSError):
    """Standard output cannot be written."""


def printable(text: object) -> str:
    r"""A text as one line in which every character is shown and none obeyed: escapes, bells, marks that reverse a line.
    Colors are left out.

    >>> print(printable("\x1b]0;owned\x07 gr\u00fcn \u202e"))
    \x1b]0;owned\x07 grün \u202e
    """
    plain = _COLOR.sub("", str(text))
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in plain)


def markdown(text: object) -> str:
    """A text as one line that Markdown shows as it is: no link, picture, tag or cell of a table."""
    line = printable(" ".join(str(text).split()))
    return line.replace("|", "\\|").replace("<", "&lt;").replace("[", "\\[").replace("`", "'")


def show(*lines: object, file: TextIO | None = None) -> None:
    """Print lines that may hold something from a file. Commands print with this, and with nothing else."""
    with output_errors():
        print("\n".join(map(printable, lines)), file=file or sys.stdout, flush=True)


@contextmanager
def output_errors() -> Iterator[None]:
    """Tell a disk that refuses the output from one that refuses a file: neither error names a file."""
    try:
        yield
    except BrokenPipeError:  # the reader has left, which is no error
        raise
    except OSError as error:
        raise OutputError(error.errno, error.strerror) from error


def without_password(text: str) -> str:
    """A text with addresses of databases, to be shown.

    >>> without_password("--storage postgresql://me:secret@host/db?x=1")
    '--storage postgresql://me:***@host/db?x=1'
    """
    for password in _PASSWORDS:
        text = password.sub(r"\1***", text)
    return text


def passwords_in(address: str) -> list[str]:
    """The passwords that `without_password` hides."""
    return [found for password in _PASSWORDS for _, found in password.findall(address) if found]
