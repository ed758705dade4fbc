"""Files from a model repository on the Hugging Face Hub, by `hub:user/name` or `hub:user/name@revision`.

huggingface_hub downloads, resumes and caches; HF_ENDPOINT and HF_TOKEN are its settings. All files come from one commit. This
module does not look inside files, and it uploads nothing.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holdfast.runs.checkpoint import CheckpointError
from holdfast.shown_text import printable

PREFIX = "hub:"
NEEDS_HUB = "hub:... needs huggingface_hub: pip install 'holdfast[hub]'"
_OF_THE_DISK = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)
_NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")


class HubRepository:
    """A repository at one revision; the first file that is fetched fixes the commit."""

    def __init__(self, name: str) -> None:
        match = _NAME.fullmatch(name.removeprefix(PREFIX))
        if match is None:
            raise ValueError(
                f"{name!r} is not the name of a policy on the hub; expected hub:user/name or hub:user/name@revision"
            )
        self.name, self.repo, self.revision = name, match["repo"], match["revision"]
        if self.revision is not None and (self.revision.startswith("/") or ".." in self.revision.split("/")):
            raise ValueError(  # huggingface_hub would take it for a path out of its cache
                f"{name!r} has the revision {self.revision!r}, expected a branch, a tag or a commit: no .. part and no "
                "leading /"
            )

    def fetch(self, file: str, again: bool = False) -> Path:
        """A file of the repository, in the cache of huggingface_hub. again: even if the cache has it already."""
        hub = open_hub()
        with one_line_errors(f"{PREFIX}{self.repo}: {file}"), quiet():
            path = Path(hub.hf_hub_download(self.repo, file, revision=self.revision, force_download=again))
        self.revision = path.parent.name  # snapshots/<commit>/<file>
        return path


def open_hub() -> Any:
    """huggingface_hub's client, for the hub at HF_ENDPOINT."""
    try:
        from huggingface_hub import HfApi
    except ImportError as missing:
        raise ModuleNotFoundError(NEEDS_HUB) from missing
    return HfApi(endpoint=os.environ.get("HF_ENDPOINT"), library_name="holdfast")


@contextlib.contextmanager
def one_line_errors(what: str) -> Iterator[None]:
    """Turn the errors of huggingface_hub, some of which have many lines, into a CheckpointError of one line."""
    from huggingface_hub import errors

    try:
        yield
    except errors.EntryNotFoundError as error:
        if isinstance(error, errors.LocalEntryNotFoundError):
            raise CheckpointError(
                f"{what} is not in the cache, and the hub cannot be reached; is this machine online?"
            ) from error
        raise CheckpointError(f"{what} is not in this repository; is it a policy of Holdfast?") from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(f"{what}: the repository has no such revision") from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{what}: there is no such repository, or it is private; log in with `hf auth login`, or set HF_TOKEN"
        ) from error
    except Exception as error:  # httpx's, requests', the operating system's
        if isinstance(error, OSError) and error.errno in _OF_THE_DISK:
            raise CheckpointError(
                f"{what}: the cache cannot be written ({error.strerror}); free space, or set HF_HOME to another folder"
            ) from error
        text = printable(" ".join(str(error).split()))
        raise CheckpointError(
            f"{what}: the hub refused or the transfer failed ({type(error).__name__}: {text[:200]})"
        ) from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without progress bars and warnings about retries, which are for downloads of gigabytes."""
    import huggingface_hub.utils

    bars: Any = huggingface_hub.utils
    log, shown = logging.getLogger("huggingface_hub"), not bars.are_progress_bars_disabled()
    level = log.level
    bars.disable_progress_bars()
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
        if shown:
            bars.enable_progress_bars()
