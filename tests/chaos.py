"""Things that go wrong, on purpose, for a few minutes: `make chaos`.

    python tests/chaos.py --minutes 5 --seed 3

The rounds share the time: runs killed at random moments and resumed, also those with a buffer; faults of disks and folders
during a run; whole runs with random settings; mutants of checkpoints and of buffers; hostile files; files for the commands;
wrong arguments; threads that want one folder. Each prints how often it was tried and how often the promise in
docs/reliability.md did not hold. The exit code is 1 if that is more than never.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import holdfast as hf
from buffer_mutants import hunt as hunt_buffers
from checkpoint_mutants import hunt
from file_mutants import hunt as hunt_files
from holdfast.cores.named import CORES
from holdfast.distributed.ranks import ALONE
from holdfast.runs import checkpoint
from holdfast.runs.folder import FolderInUseError, RunFolder
from holdfast.runs.record import read_progress
from killed_learners import hunt as hunt_learners
from whole_runs import hunt as hunt_runs
from whole_runs import record

SETTINGS: dict[str, Any] = dict(
    env="holdfast/TMaze-v0", env_kwargs={"length": 3}, hidden_size=8, num_envs=4, num_steps=8, minibatches=2, epochs=2,
    total_steps=32 * 60, checkpoint_every=5, final_eval_episodes=1, tensorboard=False, quiet=True, device="cpu", threads=1,
)  # fmt: skip
CHILD = "import json, sys; import holdfast as hf; hf.Trainer(hf.TrainConfig(**json.loads(sys.argv[1]))).run()"
Round = Callable[[Path, random.Random, float], Iterator[str]]
"""Yields "" for each try that went as promised, otherwise what happened."""


def kills(folder: Path, draw: random.Random, until: float) -> Iterator[str]:
    """A killed run, resumed, writes the record of a run that was never stopped, whatever its memory."""
    cores = draw.sample(list(CORES), len(CORES))
    for number in range(10**6):
        settings = {**SETTINGS, "core": cores[number % len(cores)]}
        unbroken = folder / f"whole-{settings['core']}"
        if not unbroken.exists():
            hf.Trainer(hf.TrainConfig(**settings, run_dir=str(unbroken))).run()
        whole = record(unbroken)
        run = folder / f"killed{number}"
        child = subprocess.Popen([sys.executable, "-c", CHILD, json.dumps({**settings, "run_dir": str(run)})])
        while len(checkpoint.rolling(run)) < 1 and child.poll() is None:
            time.sleep(0.005)
        time.sleep(draw.random() * 0.5)
        child.send_signal(signal.SIGKILL)
        child.wait()
        hf.Trainer.resume(run).run()
        yield "" if record(run) == whole else f"the record of {run} differs"
        shutil.rmtree(run)
        if time.monotonic() > until:
            return


def buffer_kills(folder: Path, draw: random.Random, until: float) -> Iterator[str]:
    """The same of SAC and R2D2, which go on with the buffer that is on disk."""
    yield from hunt_learners(folder, draw, 10**6, until)


def buffer_mutants(folder: Path, draw: random.Random, until: float) -> Iterator[str]:
    """Changed files and manifests of a buffer are refused in one line, or are a buffer."""
    for _, problem in hunt_buffers(draw.randrange(10**9), itertools.count()):
        yield problem
        if time.monotonic() > until:
            return


class Harm(hf.Callback):
    """Does something to a run's folder after the rollout of an update."""

    def __init__(self, update: int, what: Callable[[], None]) -> None:
        self.update, self.what = update, what

    def on_rollout_end(self, trainer: hf.Trainer, segment: hf.Segment) -> None:
        if trainer.update == self.update:
            self.what()


def faults(folder: Path, draw: random.Random, until: float) -> Iterator[str]:
    """Whatever happens to its folder, a run goes on. The last checkpoint and the rows from then on are somewhere at the
    end; after a full disk, all rows."""
    for number in range(10**6):
        (folder / f"rescue{number}").mkdir()
        yield _fault(folder / f"run{number}", folder / f"rescue{number}", draw)
        if time.monotonic() > until:
            return


def _fault(run: Path, rescue: Path, draw: random.Random) -> str:
    csv, limit, update = run / "progress.csv", resource.getrlimit(resource.RLIMIT_FSIZE), draw.randrange(1, 11)
    other = RunFolder(hf.TrainConfig(run_dir=str(run), seed=9), ALONE, lambda path: None, lambda text: None)

    def take_folder() -> None:
        shutil.rmtree(run)
        other.prepare({})

    harms: dict[str, Callable[[], Any]] = {
        "the record is removed": csv.unlink,
        "the folder is removed": lambda: shutil.rmtree(run),
        "another run takes the folder": take_folder,
        "the disk is full": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (300, limit[1])),
    }
    name = draw.choice(list(harms))
    relief = Harm(11, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit))
    config = hf.TrainConfig(**{**SETTINGS, "total_steps": 32 * 12, "run_dir": str(run)})
    trainer = hf.Trainer(config, callbacks=[Harm(update, harms[name]), relief])
    tempfile.tempdir = str(rescue)
    try:
        trainer.run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        tempfile.tempdir = None
        other.release()
    found = [row["update"] for place in (run, *rescue.iterdir()) for row in read_progress(place)]
    first = 1 if name == "the disk is full" else update + 1
    whole = sorted(map(int, found)) == list(range(first, 13)) and hf.load(trainer.saved_elsewhere or run) is not None
    return "" if whole else f"{name} in update {update + 1}: rows {found}"


def mutants(folder: Path, draw: random.Random, until: float) -> Iterator[str]:
    """A checkpoint with changed contents is refused in one line, or trains on."""
    while True:
        outcomes, failures = hunt(100, draw.randrange(10**9))
        yield from failures
        yield from [""] * (sum(outcomes.values()) // 2 - len(failures))
        if time.monotonic() > until:
            return


class _Harmful:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (exec, (f"open({str(self.mark)!r}, 'w')",))


def hostile_files(folder: Path, draw: random.Random, until: float) -> Iterator[str]:
    """Damaged files are refused, files with code run nothing, and a file never says which folder is written."""
    victim = folder / "victim"
    hf.Trainer(hf.TrainConfig(**{**SETTINGS, "total_steps": 32 * 6, "run_dir": str(victim)})).run()
    before = {p: p.read_bytes() for p in victim.rglob("*") if p.is_file()}
    good, mark = checkpoint.rolling(victim)[0].read_bytes(), folder / "mark"
    path = folder / "hostile.pt"
    for _ in range(10**6):
        kind = draw.choice(["flip", "cut", "pickle", "aimed"])
        if kind == "flip":
            data = bytearray(good)
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            path.write_bytes(data)
        elif kind == "cut":
            path.write_bytes(good[: draw.randrange(len(good))])
        elif kind == "pickle":
            path.write_bytes(pickle.dumps(_Harmful(mark)))
        else:
            path.write_bytes(good)
        shutil.rmtree(folder / "hostile", ignore_errors=True)
        refused = False
        try:
            trainer = hf.Trainer.resume(path)
            trainer.config.total_steps = 32 * 6
            trainer.run()
        except checkpoint.CheckpointError:
            refused = True
        untouched = {p: p.read_bytes() for p in victim.rglob("*") if p.is_file()} == before
        yield "" if refused == (kind != "aimed") and untouched and not mark.exists() else f"{kind}: refused {refused}"
        if time.monotonic() > until:
            return


def wrong_inputs(folder: Path, draw: random.Random, until: float) -> Iterator[str]:
    """A core called with another rank, size, dtype or device raises ValueError or TypeError; the process lives."""
    T, B, I, H = 5, 3, 4, 6
    while time.monotonic() < until:
        core = draw.choice([hf.LSTM, hf.GRU])(I, H)
        x, state = torch.randn(T, B, I), core.initial_state(B)
        resets = torch.zeros(T, B, dtype=torch.bool)
        changes: list[Callable[[torch.Tensor], Any]] = [
            lambda t: t[..., :-1], lambda t: torch.cat([t, t]), lambda t: t.unsqueeze(0), lambda t: t.to(torch.int32),
            lambda t: t.to("meta"), lambda t: t.reshape(-1), lambda t: t.tolist(), lambda t: "x",
        ]  # fmt: skip
        change, which = draw.choice(changes), draw.choice(["x", "state", "resets"])
        arguments: dict[str, Any] = {"x": x, "state": state, "resets": resets}
        if which == "state":
            leaf = draw.choice(list(state))
            arguments["state"] = {**state, leaf: change(state[leaf])}
        else:
            arguments[which] = change(arguments[which])
        try:
            core(arguments["x"], arguments["state"], arguments["resets"])
            yield f"{which} was accepted"
        except (ValueError, TypeError):
            yield ""


def whole_runs(folder: Path, draw: random.Random, until: float) -> Iterator[str]:
    """Short trainings with random settings keep law 1, continue as if never stopped, and deploy what they trained."""
    yield from hunt_runs(draw.randrange(10**9), itertools.count(), until)


def command_files(folder: Path, draw: random.Random, until: float) -> Iterator[str]:
    """Suites, results, presets and search spaces: one line or success, no import, no markup of theirs in a page."""
    yield from hunt_files(draw.randrange(10**9), itertools.count(), until)


def threads(folder: Path, draw: random.Random, until: float) -> Iterator[str]:
    """Of 32 threads that start a run in one folder, one gets it."""
    for number in range(10**6):
        won: list[RunFolder] = []
        start = threading.Barrier(32)

        def claim(seed: int, path: Path, won: list[RunFolder] = won, start: threading.Barrier = start) -> None:
            run = RunFolder(hf.TrainConfig(run_dir=str(path), seed=seed), ALONE, lambda p: None, lambda text: None)
            start.wait()
            with contextlib.suppress(FolderInUseError):
                run.prepare({})
                won.append(run)

        workers = [threading.Thread(target=claim, args=(seed, folder / str(number))) for seed in range(32)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        yield "" if len(won) == 1 else f"{len(won)} of 32 threads got the folder"
        for run in won:
            run.release()
        if time.monotonic() > until:
            return


ROUNDS: dict[str, tuple[Round, float]] = {  # with its share of the time
    "kills": (kills, 0.15),
    "buffer kills": (buffer_kills, 0.15),
    "buffer mutants": (buffer_mutants, 0.05),
    "faults": (faults, 0.15),
    "mutants": (mutants, 0.15),
    "whole runs": (whole_runs, 0.15),
    "hostile files": (hostile_files, 0.05),
    "command files": (command_files, 0.05),
    "wrong inputs": (wrong_inputs, 0.03),
    "threads": (threads, 0.07),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0, help="time for all rounds")
    parser.add_argument("--seed", type=int, default=1, help="of everything random")
    parser.add_argument("--only", choices=list(ROUNDS), help="one round, with all the time")
    options = parser.parse_args()
    failed = 0
    for name, (play, share) in ROUNDS.items():
        if options.only not in (None, name):
            continue
        began, tries, failures = time.monotonic(), 0, []
        seconds = 60 * options.minutes * (1.0 if options.only else share)
        with tempfile.TemporaryDirectory() as folder:
            try:
                for outcome in play(Path(folder), random.Random(f"{options.seed}/{name}"), began + seconds):
                    tries += 1
                    failures += [outcome] if outcome else []
            except Exception:
                failures.append(traceback.format_exc())
        spent = time.monotonic() - began
        print(f"{name:14} {tries:6} tried, {len(failures)} failed ({spent:.0f} s)", flush=True)
        print("".join(f"    {failure}\n" for failure in failures[:5]), end="", flush=True)
        failed += len(failures)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
