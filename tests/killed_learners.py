"""SIGKILL inside runs of SAC and R2D2, whose buffers are on disk; what they write after a resume is what they would have written.

    nice python tests/killed_learners.py --count 60 --seed 1

Each run is killed once or twice, at random moments: while it plays, learns, writes rows of its buffer, a checkpoint or its record, or
deletes files. Buffers are small and in many small files, so that they wrap around and files are deleted. Run n of a seed is
always of the same settings; the moments are those of the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import holdfast as hf
from holdfast.rollout import buffer_files
from holdfast.runs import checkpoint
from whole_runs import record

SHARED: dict[str, Any] = dict(
    hidden_size=4, head_sizes=(8,), num_envs=3, num_steps=4, batch_size=2, train_length=4, warmup_steps=24, update_ratio=0.2,
    total_steps=12 * 60, checkpoint_every=2, final_eval_episodes=1, device="cpu", threads=1, tensorboard=False, quiet=True,
    replay_check_every=4,
)  # fmt: skip
MEMORY, CARTPOLE = "holdfast/RepeatPreviousEasy-v0", "holdfast/PositionOnlyCartPoleEasy-v0"
KINDS: list[tuple[type, dict[str, Any]]] = [
    (hf.SACConfig, dict(env=MEMORY, core="gru", buffer_size=200)),
    (hf.R2D2Config, dict(env=CARTPOLE, core="lstm", buffer_size=150, burn_in=2)),
    (hf.SACConfig, dict(env=CARTPOLE, core="lru", critic_core="shared", buffer_size=3000, normalize_reward=True)),
    (hf.R2D2Config, dict(env=MEMORY, core="window", memory_span=4, buffer_size=300, burn_in=3)),
]
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["holdfast.training.trainer", "holdfast.algorithms.sac", "holdfast.algorithms.r2d2"])


def train(kind: int, folder: str, began: Any = None) -> None:
    """A run from its beginning, or from its newest checkpoint."""
    torch.set_num_threads(1)
    buffer_files._SMALLEST_FILE = 1000
    config, settings = KINDS[kind]
    if began is not None:
        began.set()
    if checkpoint.rolling(folder):
        hf.Trainer.resume(folder).run()
    else:
        hf.Trainer(config(**SHARED, **settings, run_dir=folder)).run()


def killed(kind: int, run: Path, seconds: float) -> bool:
    """Train until so many seconds after it began; whether it was killed."""
    began = _context.Event()
    process = _context.Process(target=train, args=(kind, str(run), began))
    process.start()
    began.wait(120)
    process.join(seconds)
    died = process.is_alive()
    process.kill()
    process.join()
    return died


def hunt(folder: Path, draw: random.Random, count: int, until: float = float("inf")) -> Iterator[str]:
    """Kill so many times: for each kill "", or what was not as promised."""
    seconds: dict[int, float] = {}
    kills, number = 0, 0
    while kills < count and time.monotonic() < until:
        kind = number % len(KINDS)
        whole, run = folder / f"whole{kind}", folder / f"run{number}"
        if kind not in seconds:
            before = time.monotonic()
            killed(kind, whole, 600.0)
            seconds[kind] = time.monotonic() - before
        wanted = record(whole)
        before = kills
        for _ in range(draw.choice((1, 2)) if count - kills > 1 else 1):
            kills += killed(kind, run, draw.uniform(0.05, 0.8) * seconds[kind])
        problem = "" if len(wanted) == 60 else f"the unbroken run has {len(wanted)} rows"
        try:
            with contextlib.redirect_stdout(None):
                train(kind, str(run))
        except FileExistsError:  # it was finished before it could be killed
            pass
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if not problem and record(run) != wanted:
            problem = f"the record of {KINDS[kind]} differs from one that was never stopped"
        yield from [problem] * (kills - before)
        shutil.rmtree(run)
        number += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60, help="kills")
    parser.add_argument("--seed", type=int, default=1, help="of settings and moments")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="holdfast-killed-") as folder:
        outcomes = list(hunt(Path(folder), random.Random(options.seed), options.count))
    failures = [outcome for outcome in outcomes if outcome]
    print(f"{len(outcomes)} kills of SAC and R2D2, {len(failures)} failed ({time.monotonic() - began:.0f} s)")
    print("\n".join(failures[:10]))
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
