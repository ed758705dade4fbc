"""The database of a study: opened, and spoken of without its password."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ATTEMPTS_TO_OPEN = 5
NEEDS_OPTUNA = "sweeps need Optuna: pip install 'holdfast[sweep]'"
# The password of a user, up to the last @, or one among the options of an address.
_PASSWORDS = (re.compile(r"(://[^:/?@\s]*:)(\S*)(?=@)"), re.compile(r"(?i)([?&](?:password|passwd|pwd)=)([^&\s]*)"))


def require_optuna() -> Any:
    try:
        import optuna
    except ImportError as missing:
        raise ModuleNotFoundError(NEEDS_OPTUNA) from missing
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def open_database(url: str) -> Any:
    """Optuna's storage. Processes that start at the same time may get in each other's way when they make its tables."""
    optuna = require_optuna()
    if url.startswith("sqlite:///"):
        Path(url.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
    options = {"connect_args": {"timeout": 60}} if url.startswith("sqlite") else {"pool_pre_ping": True}
    for attempt in range(ATTEMPTS_TO_OPEN):
        try:
            return optuna.storages.RDBStorage(url, engine_kwargs=options)
        except Exception as error:  # SQLAlchemy's, or the database driver's
            if attempt == ATTEMPTS_TO_OPEN - 1:
                reason = database_reason(error, _secrets(url))
                raise ValueError(f"--storage {without_password(url)} cannot be opened: {reason}") from error
            time.sleep(0.2 * (attempt + 1))
    raise AssertionError


def is_in_memory(url: str) -> bool:
    """Whether a database is in the memory of one process.

    >>> [is_in_memory(url) for url in ("sqlite://", "sqlite:///:memory:", "sqlite:///study.db", "postgresql://host/db")]
    [True, True, False, False]
    """
    kind, _, place = url.partition("://")
    return kind.partition("+")[0] == "sqlite" and (place.strip("/") in ("", ":memory:") or "mode=memory" in place)


def require_shared(url: str | None, workers: int) -> None:
    """Refuse a database in memory for several processes; None is the sweep's own file."""
    if url is not None and is_in_memory(url) and workers > 1:
        raise ValueError(
            f"--storage {url} is in the memory of one process, so {workers} workers cannot share it; give it a file "
            "(sqlite:///study.db), or use --workers 1"
        )


def without_password(text: str) -> str:
    """A text with addresses of databases, to be shown.

    >>> without_password("--storage postgresql://me:secret@host/db?x=1")
    '--storage postgresql://me:***@host/db?x=1'
    """
    for password in _PASSWORDS:
        text = password.sub(r"\1***", text)
    return text


def _secrets(url: str) -> list[str]:
    return [found for password in _PASSWORDS for _, found in password.findall(url) if found]


def database_reason(error: BaseException, secrets: Iterable[str] = ()) -> str:
    """What the database said: Optuna wraps SQLAlchemy's errors, and these add the statement. secrets: not to be shown."""
    while (cause := getattr(error, "orig", None) or error.__cause__) is not None:
        error = cause
    text = without_password(str(error))
    for secret in secrets:
        text = text.replace(secret, "***")
    return f"{type(error).__name__}: {' '.join(text.split())[:200]}"
