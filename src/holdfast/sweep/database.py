"""The database of a study: opened, and spoken of without its password."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from holdfast.shown_text import passwords_in, printable, without_password

ATTEMPTS_TO_OPEN = 5
NEEDS_OPTUNA = "sweeps need Optuna: pip install 'holdfast[sweep]'"


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
                reason = database_reason(error, passwords_in(url))
                raise ValueError(f"--storage {without_password(url)} cannot be opened: {reason}") from error
            time.sleep(0.2 * (attempt + 1))
    raise AssertionError


def require_no_links(folder: Path) -> None:
    """Refuse a sweep's folder with links in it: a database, its journal or a trial would be written where they lead."""
    for path in (*folder.glob("study.db*"), folder / "trials", *folder.glob("trials/*")):
        if path.is_symlink():
            raise ValueError(f"{path} is a link, and a sweep writes only into its own folder; remove it")


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
            f"--storage {without_password(url)} is in the memory of one process, so {workers} workers cannot share it; give it a file "
            "(sqlite:///study.db), or use --workers 1"
        )


def database_reason(error: BaseException, secrets: Iterable[str] = ()) -> str:
    """What the database said: Optuna wraps SQLAlchemy's errors, and these add the statement. secrets: not to be shown."""
    while (cause := getattr(error, "orig", None) or error.__cause__) is not None:
        error = cause
    text = without_password(str(error))
    for secret in secrets:
        text = text.replace(secret, "***")
    return f"{type(error).__name__}: {printable(' '.join(text.split()))[:200]}"
