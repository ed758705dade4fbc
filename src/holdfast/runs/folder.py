"""`RunFolder`: where a run is kept. It prepares the folder and saves checkpoints; a disk that refuses does not end the run."""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from holdfast.config import TrainConfig
from holdfast.distributed.ranks import Ranks
from holdfast.runs import checkpoint
from holdfast.runs.log import RunFolderError, write_json, write_metadata
from holdfast.runs.retry_schedule import RetrySchedule
from holdfast.spans import span


class RunFolder:
    """save: writes a checkpoint to a path; every rank calls it. notify: shows the user a line."""

    def __init__(
        self, config: TrainConfig, ranks: Ranks, save: Callable[[Path], None], notify: Callable[[str], None]
    ) -> None:
        self.path, self._keep, self._ranks = config.folder, config.keep_checkpoints, ranks
        self._save, self._notify = save, notify
        self._retry, self._retry_best = RetrySchedule(notify), RetrySchedule(notify)
        self.saved_elsewhere: Path | None = None
        """The last checkpoint, if the folder did not take it."""

    def prepare(self, config: Mapping[str, Any], engines: Mapping[str, str], resumed_at: int | None) -> None:
        """Write the metadata. A new run needs a folder without checkpoints; a resumed run drops later ones. Rank 0 only."""
        if resumed_at is None and checkpoint.rolling(self.path):
            raise FileExistsError(
                f"{self.path} already holds a run; resume it (holdfast train --resume {shlex.quote(str(self.path))}), remove it, or "
                "choose another name or run_dir"
            )
        try:
            if resumed_at is not None:
                checkpoint.drop_after(self.path, resumed_at)  # the resumed run repeats that part
            write_metadata(self.path, config, engines)
        except OSError as error:
            raise RunFolderError(
                f"{self.path} cannot be written: {error}; choose another run_dir, or make room"
            ) from error

    def record_engines(self, engines: Mapping[str, str]) -> None:
        """Correct the metadata when a run uses other engines than expected."""
        with suppress(OSError, ValueError):
            path = self.path / "meta.json"
            write_json(path, {**json.loads(path.read_text()), "engines": dict(engines)})

    def recorded_engines(self) -> dict[str, str]:
        """The engines of the run so far, from its metadata; {} if there is none."""
        try:
            return dict(json.loads((self.path / "meta.json").read_text()).get("engines", {}))
        except (OSError, ValueError):
            return {}

    def save(self, update: int) -> bool:
        """Save the checkpoint of this update. Returns False if the write fails; `should_retry` says when to try again."""
        return self._try(checkpoint.path_for(self.path, update), update, self._retry)

    def save_best(self, update: int) -> bool:
        """As `save`, into best.pt."""
        return self._try(checkpoint.folder_of(self.path) / "best.pt", update, self._retry_best)

    def should_retry(self, update: int) -> bool:
        """Whether a save failed and it is time for another attempt."""
        return self._retry.should_retry(update)

    def save_at_the_end(self, update: int) -> None:
        """The last checkpoint; in the system's temporary folder if the run's own cannot be written."""
        if self.save(update):
            return
        instead = Path(tempfile.gettempdir()) / f"holdfast-{self.path.name}-update_{update:08d}.pt"
        self._save(instead)
        self.saved_elsewhere = instead
        self._notify(f"the run's folder could not be written to the end; the last checkpoint is {instead}")

    def last_checkpoint(self) -> Path | None:
        return next(iter(checkpoint.rolling(self.path)[::-1]), None)

    def has_checkpoint_of(self, update: int) -> bool:
        return checkpoint.path_for(self.path, update).exists()

    def _try(self, path: Path, update: int, retry: RetrySchedule) -> bool:
        problem = None
        with span("checkpoint"):
            try:
                self._save(path)
                if self._ranks.leads:
                    checkpoint.prune(self.path, self._keep)
            except OSError as error:
                problem = str(error)
            return retry.record(self._ranks.from_leader(problem), update)
