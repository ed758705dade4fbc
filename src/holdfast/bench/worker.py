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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from holdfast.bench.jobs import Job
from holdfast.bench.one_run import train
from holdfast.bench.results import Row
from holdfast.runs.lock import FolderInUseError

SECONDS_BETWEEN_ANSWERS = 0.25
PATIENCE = 60.0  # seconds for a worker of an earlier command to save its run and end


def main(argv: list[str]) -> int:
    (folder,) = argv
    # Whatever else prints to standard output goes to standard error, so that answers are lines of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    parent, last_answer = os.getppid(), 0.0

    def send(**answer: Any) -> None:
        with contextlib.suppress(OSError):  # the command has died
            print(json.dumps(answer), file=answers, flush=True)

    def look(steps: int) -> bool:
        nonlocal last_answer
        if time.monotonic() - last_answer > SECONDS_BETWEEN_ANSWERS:
            last_answer = time.monotonic()
            send(steps=steps)
        return os.getppid() == parent

    with contextlib.suppress(KeyboardInterrupt):
        for line in sys.stdin:
            job = Job(**json.loads(line))
            try:
                row = _train(job, Path(folder, job.id), look)
            except Exception as error:  # one run that fails must not stop the others
                send(error=f"{type(error).__name__}: {' '.join(str(error).split())}"[:1000])
            else:
                if row is None:
                    break
                send(result=row)
            _free_memory()
    return 0


def _train(job: Job, folder: Path, look: Callable[[int], bool]) -> Row | None:
    give_up = time.monotonic() + PATIENCE
    while True:
        try:
            return train(job, folder, look)
        except FolderInUseError:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.5)


def _free_memory() -> None:
    """A finished run is a cycle of references, which holds CUDA graphs and their memory until it is collected."""
    if torch.cuda.is_initialized():
        with contextlib.suppress(RuntimeError):  # a run that failed may have left a graph running
            torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
