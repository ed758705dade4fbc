"""A process that trains runs one after another: `python -m holdfast.bench.worker FOLDER`. `pool.py` starts it.

Starting Python, torch and CUDA takes seconds, so a worker is used for many runs. It reads jobs from standard input, a line
of JSON each, and answers in lines of JSON: {"steps": n} while a run trains, then {"result": ...} or {"error": ...}. If the
command that started it dies, it saves its run and ends.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import IO, Any

from holdfast.bench.jobs import Job
from holdfast.bench.one_run import train
from holdfast.runs.lock import FolderInUseError

SECONDS_BETWEEN_ANSWERS = 0.25
PATIENCE = 60.0  # seconds for a worker of an earlier command to save its run and end


class Worker:
    """Trains jobs in folders below `folder`. answers: where the lines go."""

    def __init__(self, folder: Path, answers: IO[str]) -> None:
        self.folder, self.answers = folder, answers
        self._parent = os.getppid()
        self._last_answer = 0.0
        self._stop = False

    def run(self, job: Job) -> bool:
        """Train a job and answer; False if this process is to end."""
        try:
            row = self._train(job, self.folder / job.id)
        except Exception as error:  # one run that fails must not stop the others
            self._send({"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:1000]})
            return True
        finally:
            _free_memory()
        if row is None:
            return False
        self._send({"result": row})
        return not self._stop

    def _train(self, job: Job, folder: Path) -> dict[str, Any] | None:
        give_up = time.monotonic() + PATIENCE
        while True:
            try:
                return train(job, folder, self._look)
            except FolderInUseError:
                if time.monotonic() > give_up:
                    raise
                time.sleep(0.5)

    def _look(self, steps: int) -> bool:
        now = time.monotonic()
        if now - self._last_answer > SECONDS_BETWEEN_ANSWERS:
            self._last_answer = now
            self._send({"steps": steps})
        return not self._stop and os.getppid() == self._parent

    def _send(self, answer: dict[str, Any]) -> None:
        try:
            self.answers.write(json.dumps(answer) + "\n")
            self.answers.flush()
        except OSError:  # nobody listens any more
            self._stop = True


def _free_memory() -> None:
    """A finished run is a cycle of references, which holds CUDA graphs and their memory until it is collected."""
    torch = sys.modules.get("torch")
    cuda = torch.cuda if torch is not None and torch.cuda.is_initialized() else None
    if cuda is not None:  # a run that failed may have left a graph running
        with contextlib.suppress(RuntimeError):
            cuda.synchronize()
    gc.collect()
    if cuda is not None:
        cuda.empty_cache()


def main(argv: list[str]) -> int:
    (folder,) = argv
    # Whatever else prints to standard output goes to standard error, so that answers are lines of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = Worker(Path(folder), answers)
    with contextlib.suppress(KeyboardInterrupt):
        for line in sys.stdin:
            if not worker.run(Job(**json.loads(line))):
                break
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
