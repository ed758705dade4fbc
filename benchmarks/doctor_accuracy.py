"""How often the doctor names the right cause, and how often it alarms without one.

Every broken policy of tests/broken and of the gallery, every healthy twin, and healthy memories that see only some of the past, with random weights, random sizes (of
observations, memory, actions and the number of environments) and another script of episodes for each seed. Counted:

- right first cause: the first finding of a broken policy is its mistake;
- false alarm: an error in a healthy policy.

    python benchmarks/doctor_accuracy.py --seeds 100 --jobs 2     # writes results/doctor_accuracy.json and .md
    python benchmarks/doctor_accuracy.py --seeds 5 --only own-    # a part, printed, not written

`--rows FILE` keeps each examination; a second call with the same file does only what is missing, also on another machine. `--seconds N`
stops in time and writes what there is; so do Ctrl-C and `timeout`. Policies of frameworks that are not installed are left out and named. An examination that
raises counts as wrong; one that kills its process or does not end counts as wrong too.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import random
import signal
import statistics
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from this_commit import this_commit

if TYPE_CHECKING:
    from doctor.gallery.base import Exhibit

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT / "tests"))

HEALTHY = "nothing"
FAILED = "(crash)"
LOST = "(no answer)"
PATIENCE = 120.0  # seconds without any answer from any process


@dataclass
class Row:
    """One examination. `first`: the cause of the first finding that counts; `errors`: all errors."""

    patient: str
    seed: int
    sizes: dict[str, int]
    expected: str
    first: str
    errors: list[str]
    seconds: float

    @property
    def right(self) -> bool:
        return self.first == self.expected


def patients() -> dict[str, tuple[str, object]]:
    """Name of each patient and twin: what must be said first, and how it is made."""
    from broken import ALL
    from broken.sparse_memories import HEALTHY as SPARSE
    from doctor.gallery import GALLERY

    sick = [*ALL, *GALLERY, *in_jax()]
    found: dict[str, tuple[str, object]] = {p.name: (p.doctor, p.subject) for p in sick if p.doctor is not None}
    twins = {p.healthy: f"twin of {p.name}" for p in reversed(sick)}
    found.update({name: (HEALTHY, make) for make, name in twins.items()})
    found.update({name: (HEALTHY, make) for name, make in SPARSE.items()})
    return found


def in_jax() -> list[Exhibit]:
    try:
        from doctor.gallery.jax_pairs import EXHIBITS
    except ImportError:
        return []
    return EXHIBITS


def draw_sizes(name: str, seed: int) -> dict[str, int]:
    draw = random.Random(f"{name} {seed}")
    return {
        "obs": draw.randint(2, 12),
        "hidden": draw.randint(6, 48),
        "actions": draw.randint(2, 6),
        "envs": draw.randint(3, 8),
    }


def examine_one(job: tuple[str, int]) -> Row:
    import torch

    from broken.base import ENVS, size
    from holdfast import doctor

    name, seed = job
    torch.set_num_threads(1)
    expected, make = patients()[name]
    sizes = draw_sizes(name, seed)
    vars(size).update(sizes)
    torch.manual_seed(1_000_003 * seed + sum(map(ord, name)))
    started = time.perf_counter()
    try:
        subject = make()
        if subject.num_envs == ENVS:
            subject.num_envs = size.envs
        report = doctor.examine(subject, seed=seed)
    except (Exception, SystemExit):
        traceback.print_exc()
        return Row(name, seed, sizes, expected, FAILED, [FAILED], time.perf_counter() - started)
    errors = [f.cause for f in report.findings if f.severity == "error"]
    warnings = [f.cause for f in report.findings if f.severity == "warning"]
    counted = errors if expected == HEALTHY else [*errors, *warnings]
    first = counted[0] if counted else HEALTHY
    return Row(name, seed, sizes, expected, first, errors, round(time.perf_counter() - started, 3))


def summary(rows: list[Row]) -> dict[str, object]:
    sick = [row for row in rows if row.expected != HEALTHY]
    twins = [row for row in rows if row.expected == HEALTHY]
    alone = [row for row in sick if row.right and len(row.errors) <= 1]
    return {
        "patients": len({row.patient for row in sick}),
        "examinations_of_patients": len(sick),
        "right_first_cause": sum(row.right for row in sick) / max(1, len(sick)),
        "right_and_nothing_else": len(alone) / max(1, len(sick)),
        "twins": len({row.patient for row in twins}),
        "examinations_of_twins": len(twins),
        "false_alarms": sum(not row.right for row in twins) / max(1, len(twins)),
        "seconds_median": round(statistics.median(row.seconds for row in rows), 3),
        "seconds_max": max(row.seconds for row in rows),
    }


def confusion(rows: list[Row]) -> list[dict[str, object]]:
    """For each mistake, how often each word was said first."""
    table: dict[str, Counter[str]] = {}
    for row in rows:
        table.setdefault(row.expected, Counter())[row.first] += 1
    return [
        {"mistake": key, "examined": sum(said.values()), "said": dict(said.most_common())}
        for key, said in sorted(table.items())
    ]


def markdown(figures: dict[str, object], table: list[dict[str, object]], header: dict[str, object]) -> str:
    lines = [
        "# Accuracy of the doctor",
        "",
        f"`{header['command']}`, commit {header['commit']}, {header['machine']}, torch {header['torch']}, {header['minutes']} minutes.",
        "",
        "| | |",
        "|---|---|",
        f"| right first cause | {figures['right_first_cause']:.2%} of {figures['examinations_of_patients']} examinations of {figures['patients']} broken policies |",
        f"| right, and no other error | {figures['right_and_nothing_else']:.2%} |",
        f"| false alarms | {figures['false_alarms']:.2%} of {figures['examinations_of_twins']} examinations of {figures['twins']} healthy policies |",
        f"| seconds per examination | median {figures['seconds_median']}, longest {figures['seconds_max']} |",
        "",
        "| mistake | examined | said first |",
        "|---|---|---|",
    ]
    for entry in table:
        said = ", ".join(f"`{word}` {count}" for word, count in entry["said"].items())
        lines.append(f"| `{entry['mistake']}` | {entry['examined']} | {said} |")
    if header["left_out"]:
        lines += ["", f"Left out, because their packages are not installed: {', '.join(sorted(header['left_out']))}."]
    return "\n".join(lines) + "\n"


def missing_packages(names: list[str]) -> dict[str, str]:
    """Patients that cannot be built here, with the package that each needs."""
    made = patients()
    missing = {}
    for name in names:
        try:
            made[name][1]()
        except ModuleNotFoundError as error:
            missing[name] = str(error.name)
        except (Exception, SystemExit):
            continue  # counted as a crash when it is examined
    return missing


def examine_all(jobs: list[tuple[str, int]], processes: int, seconds: float) -> Iterator[Row]:
    """Rows as they come, until all are done or time is up. A process that died or hangs costs its own examination only."""
    deadline = time.monotonic() + seconds
    waiting = set(jobs)
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        answers = pool.imap_unordered(examine_one, jobs)
        while waiting:
            left = deadline - time.monotonic()
            try:
                row = answers.next(timeout=max(0.0, min(left, PATIENCE)))
            except multiprocessing.TimeoutError:
                if left <= PATIENCE:
                    print(f"time is up: {len(waiting)} of {len(jobs)} examinations were not made", flush=True)
                    return
                break
            waiting.discard((row.patient, row.seed))
            yield row
    for name, seed in sorted(waiting):
        yield Row(name, seed, draw_sizes(name, seed), patients()[name][0], LOST, [LOST], PATIENCE)


def kept_rows(path: Path | None) -> list[Row]:
    if path is None or not path.exists():
        return []
    return [Row(**json.loads(line)) for line in path.read_text().splitlines()]


def examine_and_keep(jobs: list[tuple[str, int]], rows: list[Row], flags: argparse.Namespace, started: float) -> None:
    """Adds to `rows`, and to the file of rows, as examinations end."""
    total = len(rows) + len(jobs)
    with open(flags.rows or os.devnull, "a") as keep:
        for row in examine_all(jobs, flags.jobs, flags.seconds - (time.perf_counter() - started)):
            rows.append(row)
            keep.write(json.dumps(asdict(row)) + "\n")
            keep.flush()
            if not row.right:
                print(
                    f"{row.patient} seed {row.seed} {row.sizes}: {row.first}, not {row.expected}; all errors {row.errors}",
                    flush=True,
                )
            if len(rows) % 500 == 0:
                print(
                    f"{len(rows)} of {total} examinations, {time.perf_counter() - started:.0f} s",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=100, help="examinations of each policy")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes, one thread each")
    parser.add_argument("--only", default="", help="patients whose name contains this; nothing is written")
    parser.add_argument("--seconds", type=float, default=86400.0, help="stop after this time and write what there is")
    parser.add_argument("--rows", type=Path, help="one line of JSON per examination; those in it are not repeated")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of doctor_accuracy.json and .md")
    flags = parser.parse_args()

    started = time.perf_counter()
    os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", JAX_PLATFORMS="cpu")
    names = [name for name in patients() if flags.only in name]
    if not names:
        parser.error(f"no patient's name contains {flags.only!r}")
    missing = missing_packages(names)
    if not in_jax():
        missing["gallery-jax"] = "jax"
    for package in sorted(set(missing.values())):
        without = sorted(name for name, needs in missing.items() if needs == package)
        print(f"{package} is not installed: without {', '.join(without)}", flush=True)

    rows = [row for row in kept_rows(flags.rows) if row.patient in names]
    done = {(row.patient, row.seed) for row in rows}
    seeds = range(flags.first_seed, flags.first_seed + flags.seeds)
    jobs = [(name, seed) for seed in seeds for name in names if name not in missing and (name, seed) not in done]
    if flags.rows:
        flags.rows.parent.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        examine_and_keep(jobs, rows, flags, started)
    except KeyboardInterrupt:
        print("stopped", flush=True)
    if not rows:
        parser.error("no examination was made: give more --seconds")
    rows.sort(key=lambda row: (row.patient, row.seed))
    figures, table = summary(rows), confusion(rows)
    print(json.dumps(figures, indent=2))
    if flags.only:
        return
    import torch

    examined = {row.patient for row in rows}
    header = {
        "command": f"python benchmarks/doctor_accuracy.py --seeds {flags.seeds} --jobs {flags.jobs}",
        "commit": this_commit(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "minutes": round((time.perf_counter() - started) / 60, 1),
        "left_out": {name: package for name, package in missing.items() if name not in examined},
    }
    by_patient = {
        name: round(statistics.median(row.seconds for row in rows if row.patient == name), 3)
        for name in sorted(examined)
    }
    wrong = [asdict(row) for row in rows if not row.right]
    data = {**header, **figures, "confusion": table, "wrong": wrong, "seconds_by_patient": by_patient}
    flags.out.mkdir(parents=True, exist_ok=True)
    (flags.out / "doctor_accuracy.json").write_text(json.dumps(data, indent=1) + "\n")
    (flags.out / "doctor_accuracy.md").write_text(markdown(figures, table, header))


if __name__ == "__main__":
    main()
