"""`RunFolder`: where a run is kept. It claims the folder, saves checkpoints, and cuts back what a resumed run repeats.

What a resumed run repeats is not deleted: it is moved to a folder of its own, and only once the first update is finished.
A disk that refuses does not end the run.
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from holdfast.config import RunConfig, names_about, settings_of
from holdfast.config.imports import allow_imports_flag
from holdfast.distributed.ranks import Ranks, launched
from holdfast.runs import checkpoint
from holdfast.runs.lock import LOCK_NAME, FolderInUseError, RunLock
from holdfast.runs.log import RESULT_NAME, RunFolderError, read_progress, removed_folder, write_json, write_metadata
from holdfast.runs.writing import RESCUE_PLACES, RetrySchedule, rescue_folder
from holdfast.spans import span

BEFORE_THE_FIRST_UPDATE = {"config.json", "meta.json", LOCK_NAME}


class RunFolder:
    """save: writes a checkpoint to a path, or to none; every rank calls it. notify: shows the user a line. alert: a line that
    even a quiet run shows."""

    def __init__(
        self,
        config: RunConfig,
        ranks: Ranks,
        save: Callable[[Path | None], None],
        notify: Callable[[str], None],
        alert: Callable[[str], None] | None = None,
    ) -> None:
        self._config, self._keep, self._ranks = config, config.keep_checkpoints, ranks
        self._save, self._notify, self._alert = save, notify, alert or notify
        self._retry, self._retry_best = RetrySchedule(notify), RetrySchedule(notify)
        self._lock: RunLock | None = None
        self._metadata: tuple[Mapping[str, Any], Mapping[str, Any]] = ({}, {})
        self._continues_at: int | None = None  # the update after which this run repeats what the folder holds
        self._removed: Path | None = None
        self.saved_elsewhere: Path | None = None
        """The last checkpoint, if the folder did not take it."""

    @property
    def path(self) -> Path:
        return self._config.folder

    # --- begin and end -----------------------------------------------------------------------------------------------

    def prepare(
        self,
        engines: Mapping[str, str],
        resumed_at: int | None = None,
        resumed_from: Path | None = None,
        **facts: Any,
    ) -> int | None:
        """Claim the folder for a new run, or for one resumed at an update from a file. Rank 0 only. facts: more for meta.json.

        A new run without a name gets the first free one. Returns the update that the folder's record is continued from;
        None if there is nothing to continue.
        """
        try:
            self._claim(resumed_at is None)
            self._refuse_linked_folders()
            settings = self._config.to_dict()
            self._metadata = settings, {"engines": dict(engines), **facts}
            if resumed_at is not None:
                self._require_same_run(settings, resumed_from)
                self._continues_at = resumed_at
            else:
                self._require_no_run(settings)
                self._continues_at = 0 if read_progress(self.path) else None
            if self._continues_at is None:
                write_metadata(self.path, *self._metadata)
            return self._continues_at
        except FileExistsError:
            self.release()
            raise
        except OSError as error:
            self.release()
            raise RunFolderError(
                f"{self.path} cannot be written ({error.strerror}); choose another folder (run_dir), or free space there"
            ) from error

    def _refuse_linked_folders(self) -> None:
        """Checkpoints and rows of a buffer are written, and old ones deleted: in this folder, and in none that a link leads to."""
        inside = checkpoint.folder_of(self.path)
        for path in (inside, *(inside.iterdir() if inside.is_dir() else ())):
            if path.is_symlink() and path.is_dir():
                raise FileExistsError(f"{path} is a link to a folder, and a run writes only into its own; remove it")

    def _claim(self, new: bool) -> None:
        config = self._config
        # All ranks of a job, and the job restarted, must use the same folder.
        if new and config.run_dir is None and config.name is None and self._ranks.size == 1 and not launched():
            self._claim_free()
            return
        if self.path.exists() and not self.path.is_dir():
            raise FileExistsError(f"{self.path} is a file, expected a folder for the run; choose another --run-dir")
        self._lock = RunLock(self.path)
        self._lock.claim()

    def _claim_free(self) -> None:
        """Take the first folder of this name that does not exist, or whose run ended before its first update."""
        first = self._config.folder
        first.parent.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            path = first.with_name(f"{first.name}-{number}") if number > 1 else first
            made = False
            with suppress(FileExistsError):
                path.mkdir()
                made = True
            if made or _never_began(path):
                lock = RunLock(path)
                with suppress(FolderInUseError):
                    lock.claim()
                    if made or _never_began(path):
                        self._config.run_dir, self._lock = str(path), lock
                        return
                    lock.release()

    def _require_no_run(self, settings: Mapping[str, Any]) -> None:
        """The folder of a new run holds no other. A run that died before its first checkpoint may start again."""
        other = "choose another name or run_dir"
        if checkpoint.rolling(self.path):
            resume = f"holdfast train --resume {shlex.quote(str(self.path))}{allow_imports_flag(self._config)}"
            raise FileExistsError(f"{self.path} already holds a run; resume it ({resume}), remove it, or {other}")
        differs = _difference(
            self._recorded_settings(), settings, set(settings) - names_about(type(self._config), "place")
        )
        if differs and (rows := len(read_progress(self.path))):
            raise FileExistsError(
                f"{self.path} already holds {rows} update{'s' * (rows != 1)} of another run ({differs}); remove it, or {other}"
            )

    def _require_same_run(self, settings: Mapping[str, Any], resumed_from: Path | None) -> None:
        """A checkpoint from elsewhere goes on in its own run's folder or in an empty one, nowhere else."""
        if resumed_from is None or resumed_from.absolute().parent == checkpoint.folder_of(self.path).absolute():
            return
        recorded, name = self._recorded_settings(), shlex.quote(str(self.path))
        declared = settings_of(type(self._config)).items()
        other = {name for name, one in declared if one.fixed and one.about != "place"}  # other values make another run
        differs = _difference(recorded, settings, other)
        if differs:
            raise FileExistsError(f"{name} already holds another run ({differs}); choose another --run-dir")
        if not recorded and any(path.name != LOCK_NAME for path in self.path.iterdir()):
            raise FileExistsError(
                f"{name} already exists and holds no run; choose the folder to continue in with --run-dir FOLDER"
            )

    def _recorded_settings(self) -> dict[str, Any]:
        try:
            settings = json.loads((self.path / "config.json").read_text())
        except (OSError, ValueError):
            return {}
        return settings if isinstance(settings, dict) else {}

    def go_on(self) -> None:
        """After the first update of a run that continues: move what it repeats to a folder that is named to the user."""
        update = self._continues_at
        if update is None:
            return
        later = checkpoint.later_than(self.path, update)
        best = checkpoint.folder_of(self.path) / "best.pt"
        outdated = [path for path in (best, self.path / RESULT_NAME) if path.exists() and later]
        for path in [*later, *outdated]:
            os.replace(path, self.removed_folder(update) / path.name)
        write_metadata(self.path, *self._metadata)
        self._continues_at = None

    def removed_folder(self, update: int) -> Path:
        """Where this run moves what came after `update`; made, and named to the user, when it is first needed."""
        if self._removed is None:
            self._removed = removed_folder(self.path, update)
            self._notify(
                f"the updates after {update} are repeated; their old rows and checkpoints are in {self._removed}"
            )
        return self._removed

    def keep(self) -> None:
        """Before a write: if the folder was removed during the run, make it again; OSError if another run took it."""
        if self._lock is not None and not self._lock.keep():
            write_metadata(self.path, *self._metadata)
            self._notify(
                f"{self.path} was removed during the run and has been recreated; earlier rows and checkpoints are lost"
            )

    def release(self) -> None:
        """Let others use the folder."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    # --- metadata ----------------------------------------------------------------------------------------------------

    def record_engines(self, engines: Mapping[str, str]) -> None:
        """Correct the metadata when a run uses other engines than expected."""
        self._metadata = self._metadata[0], {**self._metadata[1], "engines": dict(engines)}
        with suppress(OSError, ValueError):
            path = self.path / "meta.json"
            write_json(path, {**json.loads(path.read_text()), "engines": dict(engines)})

    def recorded_engines(self) -> dict[str, str]:
        """The engines of the run so far, from its metadata; {} if there is none."""
        try:
            return dict(json.loads((self.path / "meta.json").read_text()).get("engines", {}))
        except (OSError, ValueError, AttributeError, TypeError):
            return {}

    # --- checkpoints -------------------------------------------------------------------------------------------------

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
        """The last checkpoint; where there is room if the run's own folder cannot be written."""
        if self.save(update):
            return
        for place in RESCUE_PLACES:
            instead, problem = None, None
            try:
                if self._ranks.leads:
                    instead = rescue_folder(self.path, place) / checkpoint.path_for(self.path, update).name
            except OSError as error:
                problem = str(error)
            try:
                self._save(instead)  # all ranks take part
            except OSError as error:
                problem = str(error)
                if instead is not None:
                    instead.parent.rmdir()
            if self._ranks.from_leader(problem) is None:
                self.saved_elsewhere = instead
                self._notify(f"the run's folder could not be written to the end; the last checkpoint is {instead}")
                return
        last = self.last_checkpoint()
        self._alert(
            f"the checkpoint of update {update} is lost: no disk has room for it; "
            + (f"the last one is {last}" if last else "there is no other")
        )

    def last_checkpoint(self) -> Path | None:
        return next(iter(checkpoint.rolling(self.path)[::-1]), None)

    def has_checkpoint_of(self, update: int) -> bool:
        return checkpoint.path_for(self.path, update).exists()

    def _try(self, path: Path, update: int, retry: RetrySchedule) -> bool:
        target, problem = path if self._ranks.leads else None, None
        with span("checkpoint"):
            try:
                if self._ranks.leads:
                    self.keep()
            except OSError as error:
                target, problem = None, str(error)
            try:
                self._save(target)  # all ranks take part, also if nothing can be written
                if target is not None:
                    checkpoint.prune(self.path, self._keep)
            except OSError as error:
                problem = str(error)
            return retry.record(self._ranks.from_leader(problem), update)


def _difference(old: Mapping[str, Any], new: Mapping[str, Any], names: set[str]) -> str:
    """The first setting in which two runs differ, in words; "" if there is none. Unknown settings do not differ."""
    for name in sorted(names & old.keys() & new.keys()):
        if old[name] != new[name]:
            return f"its {name} is {old[name]!r}, this run's {new[name]!r}"
    return ""


def _never_began(path: Path) -> bool:
    """Whether a folder holds only what a run writes before its first update."""
    names = {file.name for file in path.iterdir()} if path.is_dir() and not path.is_symlink() else set()
    begun = [name for name in names if name not in BEFORE_THE_FIRST_UPDATE and not name.startswith("env_failures-")]
    return "config.json" in names and not begun


__all__ = ["FolderInUseError", "RunFolder"]
