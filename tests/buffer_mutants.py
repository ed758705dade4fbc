"""Mutants of buffers on disk: bytes of their files, and their manifests. Each is loaded; some are resumed by a run.

    python tests/buffer_mutants.py --count 1000 --seed 1

A third are *tampered*: files are changed and the manifest is not; none may load other rows than were saved. The others are *forged*:
the manifest is changed, and for every second one its digests are made again. A mutant must be refused with a ValueError of one
line (a run: a CheckpointError) that leaves buffer and files as they were, or load as a buffer that can be sampled, added to and
saved. Anything else is a failure: another error, several lines, a hang, memory without measure. Mutant n of a seed is always the same.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

import holdfast as hf
from checkpoint_mutants import mutate
from holdfast.rollout import buffer_files
from holdfast.runs import checkpoint
from holdfast.runs.checkpoint import CheckpointError
from holdfast.state import leaves
from holdfast.training.nonfinite import NonFiniteError
from holdfast.training.replay_check import ReplayError
from pretrained_mutants import mutated_bytes
from rollout.streams import segment, streams

SECONDS_PER_MUTANT = 20
EXTRA_MEMORY = 2 * 2**30
EVERY = 10
"""One of so many is also resumed by a run."""
RUN: dict[str, Any] = dict(
    env="holdfast/RepeatPreviousEasy-v0", hidden_size=4, head_sizes=(4,), num_envs=2, num_steps=4, batch_size=2, train_length=4,
    burn_in=0, warmup_steps=0, buffer_size=100, total_steps=160, checkpoint_every=5, device="cpu", threads=1, tensorboard=False,
    quiet=True, final_eval_episodes=1, replay_check_every=0,
)  # fmt: skip
SIZES = dict(capacity=120, num_envs=2, prioritized=True)


def saved_buffer(folder: Path) -> dict[str, Any]:
    """Files of a buffer that has wrapped around, and their manifest."""
    envs = streams(2, 5, obs="dict", actions="heads", masked=True, odd=0.02)
    buffer = hf.SequenceBuffer(**SIZES, seed=1)  # type: ignore[arg-type]
    smallest, buffer_files._SMALLEST_FILE = buffer_files._SMALLEST_FILE, 4000
    try:
        for _ in range(14):
            buffer.add(segment(envs, 10, 2))
            buffer.sample(2, 5)
            manifest = buffer.save_files(folder)
            buffer.prune_files(folder)
        return manifest
    finally:
        buffer_files._SMALLEST_FILE = smallest


def content(buffer: hf.SequenceBuffer) -> list[Any]:
    """Everything in a buffer; tensors as lists, so that they compare."""
    return [x.tolist() if isinstance(x, torch.Tensor) else x for x in leaves(buffer.state_dict())]


def on_the_disk(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def tamper(files: dict[str, bytes], draw: random.Random) -> None:
    name = draw.choice(list(files))
    change = draw.random()
    if change < 0.1:
        del files[name]
    elif change < 0.25:
        other = draw.choice(list(files))
        files[name], files[other] = files[other], files[name]
    else:
        files[name] = mutated_bytes(files[name], draw, list(files.values()))


def forge(manifest: dict[str, Any], files: dict[str, bytes], draw: random.Random, honest: bool) -> dict[str, Any]:
    """A changed manifest, changed files, or both. honest: whether the digests are those of the files."""
    if draw.random() < 0.3:
        tamper(files, draw)
    else:
        with suppress(RuntimeError):  # torch cannot make every tensor
            manifest = mutate(manifest, draw)[0]
    entries = manifest.get("files") if isinstance(manifest, dict) else None
    for entry in entries if honest and isinstance(entries, list) else ():
        data = files.get(entry.get("name")) if isinstance(entry, dict) and isinstance(entry.get("name"), str) else None
        if data is not None:
            length = entry.get("bytes")
            wanted = length if draw.random() < 0.5 and type(length) is int and 0 < length <= len(data) else len(data)
            entry["bytes"], entry["sha256"] = wanted, hashlib.sha256(data[:wanted]).hexdigest()
    return manifest


def attempt(folder: Path, manifest: Any, tampered: bool, original: list[Any]) -> tuple[str, str]:
    """(outcome, "" or what was not as promised)."""
    buffer = hf.SequenceBuffer(**SIZES, seed=2)  # type: ignore[arg-type]
    before, on_disk = content(buffer), on_the_disk(folder)
    try:
        buffer.load_files(folder, manifest)
    except ValueError as error:
        if "\n" in str(error) or len(str(error)) > 1000 or "begin with an empty one" not in str(error):
            return "refused", f"not one line that says what to do: {str(error)[:300]}"
        if content(buffer) != before or on_the_disk(folder) != on_disk:
            return "refused", "it changed the buffer or its files"
        return "refused", ""
    if tampered:
        return "loaded", "" if content(buffer) == original else "other rows than were saved"
    try:
        for length in (3, 5):
            if buffer.ready(length):
                buffer.sample(3, length)
        buffer.add(segment(streams(2, 6, obs="dict", actions="heads", masked=True), 10, 2))
        buffer.save_files(folder)
    except ValueError as error:  # its rows, or the last one, are those of other environments
        fits = "this segment's" in str(error) or "its final observation is missing" in str(error)
        return "loaded", "" if fits and "\n" not in str(error) else f"{error}"
    return "loaded", ""


def resumed(run: Path, folder: Path, draw: random.Random) -> tuple[str, str]:
    """A run's newest checkpoint with a changed manifest, resumed for an update."""
    shutil.copytree(run, folder)
    path = checkpoint.rolling(folder)[-1]
    saved = checkpoint.load(path)
    try:
        saved["files"] = mutate(saved["files"], draw)[0]
        checkpoint.save(path, saved)
    except Exception:  # torch cannot make, nor write, every tensor
        return "resume refused", ""
    try:
        hf.Trainer.resume(path, total_steps=176).run()
    except CheckpointError as error:
        return "resume refused", "" if "\n" not in str(error) else f"several lines: {error}"
    except (NonFiniteError, ReplayError):
        return "resume ended", ""
    except ValueError as error:
        words = ("this segment's", "its final observation is missing", "nothing can be sampled")
        fits = any(text in str(error) for text in words)
        return "resume ended", "" if fits and "\n" not in str(error) else f"ValueError: {error}"
    return "resumed", ""


def hunt(seed: int, numbers: Iterable[int]) -> Iterator[tuple[str, str]]:
    """(outcome, "" or what was not as promised) of each mutant."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as text:
        top = Path(text)
        manifest = saved_buffer(top / "buffer")
        originals = {path.name: path.read_bytes() for path in (top / "buffer").iterdir()}
        buffer = hf.SequenceBuffer(**SIZES)  # type: ignore[arg-type]
        buffer.load_files(top / "buffer", manifest)
        right = content(buffer)
        hf.Trainer(hf.R2D2Config(**RUN, run_dir=str(top / "run"))).run()
        with _limits():
            for number in numbers:
                draw = random.Random(f"{seed}/{number}")
                files, changed, tampered = dict(originals), copy.deepcopy(manifest), number % 3 == 0
                if tampered:
                    tamper(files, draw)
                else:
                    changed = forge(changed, files, draw, honest=number % 2 == 0)
                folder = top / f"mutant{number}"
                folder.mkdir()
                for name, data in files.items():
                    (folder / name).write_bytes(data)
                kind = "tampered" if tampered else "forged"
                yield _in_time(lambda: attempt(folder, changed, tampered, right), kind, number, seed)  # noqa: B023
                shutil.rmtree(folder)
                if number % EVERY == 0:
                    yield _in_time(lambda: resumed(top / "run", folder, draw), "run", number, seed)  # noqa: B023
                    shutil.rmtree(folder, ignore_errors=True)


def _in_time(work: Any, kind: str, number: int, seed: int) -> tuple[str, str]:
    signal.alarm(SECONDS_PER_MUTANT)
    try:
        outcome, problem = work()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        outcome, problem = "failed", f"{type(error).__name__}: {error}"
    finally:
        signal.alarm(0)
    return f"{kind}, {outcome}", problem and f"mutant {number} of seed {seed}: {problem}"


@contextmanager
def _limits() -> Iterator[None]:
    """Of memory, and a handler for the limit of time."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + EXTRA_MEMORY, before[1]))
    handler = signal.signal(signal.SIGALRM, _too_long)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


def _too_long(*_: Any) -> None:
    raise TimeoutError(f"longer than {SECONDS_PER_MUTANT} seconds")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="mutants to try")
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--seed", type=int, default=1, help="which mutants")
    options = parser.parse_args()
    torch.set_num_threads(1)
    outcomes: Counter[str] = Counter()
    failures = []
    for outcome, problem in hunt(options.seed, range(options.first, options.first + options.count)):
        outcomes[outcome] += 1
        failures += [problem] if problem else []
    for outcome, times in sorted(outcomes.items()):
        print(f"{times:7}  {outcome}")
    print(f"{len(failures):7}  not as promised")
    print("\n".join(failures[:20]))
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
