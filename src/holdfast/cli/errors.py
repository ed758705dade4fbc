"""Errors that the user can fix: each ends the command with one line on stderr and exit code 2, without a traceback."""

from __future__ import annotations

import contextlib
import json
import traceback
from collections.abc import Iterator
from pathlib import Path

from holdfast.shown_text import OutputError


class UserError(Exception):
    """A mistake in the command line or in a file it names; the message says how to fix it."""


@contextlib.contextmanager
def user_errors(writes: Path | None = None) -> Iterator[None]:
    """Turn errors into `UserError`s. For setup code, where nearly every error is caused by a setting or a file.

    writes: a file that is being written, which a full disk does not name.
    """
    import gymnasium as gym

    from holdfast.runs.checkpoint import CheckpointError

    try:
        yield
    except OutputError:
        raise
    except FileNotFoundError as error:
        raise UserError(f"{error.filename}: there is no such file" if error.filename else str(error)) from error
    except json.JSONDecodeError as error:
        raise UserError(f"not a JSON file: {error}") from error
    except OSError as error:
        file = error.filename or writes
        raise UserError(f"{file}: {error.strerror or error}" if file else str(error)) from error
    except (ValueError, TypeError, ImportError, RuntimeError, CheckpointError, gym.error.Error) as error:
        raise UserError(str(error)) from error


def raised_by_holdfast(error: BaseException) -> bool:
    """Whether Holdfast itself raised it, with a message for the user, and not a library or the user's own code."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(__file__).parent.parent in Path(frames[-1].filename).parents
