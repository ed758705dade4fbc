"""How often the doctor names the right cause, and how often it alarms without one.

Every broken policy of tests/broken and of the gallery, and every healthy twin, with random weights, random sizes (of
observations, memory, actions and the number of environments) and another script of episodes for each seed. Counted:

- right first cause: the first finding of a broken policy is its mistake;
- false alarm: an error in a healthy twin.

    python benchmarks/doctor_accuracy.py --seeds 100 --jobs 2     # writes results/doctor_accuracy.json and .md
    python benchmarks/doctor_accuracy.py --seeds 5 --only own-    # a part, printed, not written
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import random
import statistics
import subprocess
import sys
import time
import traceback
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT / "tests"))

HEALTHY = "nothing"
FAILED = "(crash)"


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
    from doctor.gallery import GALLERY

    sick = [*ALL, *GALLERY]
    found: dict[str, tuple[str, object]] = {p.name: (p.doctor, p.subject) for p in sick if p.doctor is not None}
    twins = {p.healthy: f"twin of {p.name}" for p in reversed(sick)}
    found.update({name: (HEALTHY, make) for make, name in twins.items()})
    return found


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
    except Exception:
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
        f"| false alarms | {figures['false_alarms']:.2%} of {figures['examinations_of_twins']} examinations of {figures['twins']} healthy twins |",
        f"| seconds per examination | median {figures['seconds_median']}, longest {figures['seconds_max']} |",
        "",
        "| mistake | examined | said first |",
        "|---|---|---|",
    ]
    for entry in table:
        said = ", ".join(f"`{word}` {count}" for word, count in entry["said"].items())
        lines.append(f"| `{entry['mistake']}` | {entry['examined']} | {said} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=100, help="examinations of each policy")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes, one thread each")
    parser.add_argument("--only", default="", help="patients whose name contains this; nothing is written")
    flags = parser.parse_args()

    names = [name for name in patients() if flags.only in name]
    jobs = [(name, seed) for seed in range(flags.first_seed, flags.first_seed + flags.seeds) for name in names]
    started, rows = time.perf_counter(), []
    context = multiprocessing.get_context("spawn")
    with context.Pool(flags.jobs) as pool:
        for row in pool.imap_unordered(examine_one, jobs, chunksize=8):
            rows.append(row)
            if not row.right:
                print(
                    f"{row.patient} seed {row.seed} {row.sizes}: {row.first}, not {row.expected}; all errors {row.errors}",
                    flush=True,
                )
            if len(rows) % 500 == 0:
                print(f"{len(rows)} of {len(jobs)} examinations, {time.perf_counter() - started:.0f} s", flush=True)
    rows.sort(key=lambda row: (row.patient, row.seed))
    figures, table = summary(rows), confusion(rows)
    print(json.dumps(figures, indent=2))
    if flags.only:
        return
    import torch

    header = {
        "command": f"python benchmarks/doctor_accuracy.py --seeds {flags.seeds} --jobs {flags.jobs}",
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
        ).stdout.strip(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "minutes": round((time.perf_counter() - started) / 60, 1),
    }
    wrong = [asdict(row) for row in rows if not row.right]
    by_patient = {
        name: round(statistics.median(row.seconds for row in rows if row.patient == name), 3) for name in names
    }
    data = {**header, **figures, "confusion": table, "wrong": wrong, "seconds_by_patient": by_patient}
    (RESULTS / "doctor_accuracy.json").write_text(json.dumps(data, indent=1) + "\n")
    (RESULTS / "doctor_accuracy.md").write_text(markdown(figures, table, header))


if __name__ == "__main__":
    main()
