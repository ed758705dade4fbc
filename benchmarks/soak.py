"""Does a long run rot? Memory, throughput and the size of what it writes, over millions of steps.

    python benchmarks/soak.py                                     # 20 million steps on the CPU environment
    python benchmarks/soak.py --minutes 3                         # what 3 minutes give
    python benchmarks/soak.py --device cuda --num-envs 8192 --steps 1_000_000_000 --minutes 9 --run-dir runs/soak
    python benchmarks/soak.py --resume runs/soak --minutes 9      # goes on; figures are of the whole run

Everything that a real run does is on: checkpoints, evaluation, replay checks, normalisers, TensorBoard. Figures are
read from the run's own progress.csv, with two columns beside the usual ones: resident memory, and CPU-seconds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import holdfast as hf
from holdfast.run_log import MAX_ROWS, read_progress

RESULTS = Path(__file__).parent / "results"
LARGEST_FILE = 32 * 2**20  # bytes; what no file of a run of this size may exceed


class Gauge(hf.Callback):
    """Adds resident memory, GPU memory and CPU-seconds to each row; stops the run when time is up."""

    def __init__(self, minutes: float | None, cpu_before: float) -> None:
        self.end = None if minutes is None else time.monotonic() + 60 * minutes
        self.cpu_before = cpu_before - time.process_time()

    def on_update_end(self, trainer: hf.Trainer, row: dict[str, float]) -> bool:
        row["soak/rss"] = _resident_bytes()
        row["soak/cpu_seconds"] = self.cpu_before + time.process_time()
        if trainer.device.type == "cuda":
            row["soak/gpu"] = float(torch.cuda.memory_reserved(trainer.device))
        return self.end is None or time.monotonic() < self.end


def _resident_bytes() -> float:
    with open("/proc/self/statm") as file:
        return float(file.read().split()[1]) * resource.getpagesize()


def figures(run: Path) -> dict[str, Any]:
    """Memory and throughput by tenths of the run, and the largest file."""
    rows = read_progress(run)
    table = {name: np.array([float(row[name] or "nan") for row in rows]) for name in rows[0]}
    steps, elapsed, cpu = table["steps"], table["time/elapsed"], table["soak/cpu_seconds"]
    cuts = np.linspace(0, len(rows) - 1, 11).astype(int)

    def per_second(clock: np.ndarray[Any, Any]) -> list[float]:
        return [float((steps[b] - steps[a]) / (clock[b] - clock[a])) for a, b in itertools.pairwise(cuts)]

    def by_tenth(name: str) -> list[float]:
        return [float(table[name][a : b + 1].mean()) for a, b in itertools.pairwise(cuts)]

    largest = max((path for path in run.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    found: dict[str, Any] = {
        "steps": int(steps[-1]),
        "updates": int(table["update"][-1]),
        "seconds": float(elapsed[-1]),
        "cpu_seconds": float(cpu[-1]),
        "steps_per_second": per_second(elapsed),
        "steps_per_cpu_second": per_second(cpu),
        "rss_mb": [round(value / 2**20, 1) for value in by_tenth("soak/rss")],
        "files": sum(1 for path in run.rglob("*") if path.is_file()),
        "bytes_in_all": sum(path.stat().st_size for path in run.rglob("*") if path.is_file()),
        "largest_file": [largest.name, largest.stat().st_size],
        "rows_of_the_record": len(rows),
        "replay_gap": float(np.nanmax(table["memory/replay_gap"])),
        "skipped_steps": float(table["train/skipped_steps"].sum()),
        "mean_return": float(table["rollout/ep_rew_mean"][-1]),
    }
    if "soak/gpu" in table:
        found["gpu_mb"] = [round(value / 2**20, 1) for value in by_tenth("soak/gpu")]
    return found


def verdict(found: dict[str, Any], on_gpu: bool) -> dict[str, bool]:
    """What was asked: memory flat after warm-up, throughput kept, no file beyond what is stated.

    On a CPU throughput is per CPU-second: a machine that others use too says nothing by the clock.
    """
    speed = found["steps_per_second" if on_gpu else "steps_per_cpu_second"]
    kept = {
        "memory_flat": max(found["rss_mb"][2:]) <= 1.01 * found["rss_mb"][1] + 8,
        "throughput_kept": speed[-1] >= 0.95 * speed[0],
        "files_small": found["largest_file"][1] <= LARGEST_FILE and found["rows_of_the_record"] <= MAX_ROWS,
    }
    if "gpu_mb" in found:
        kept["gpu_memory_flat"] = max(found["gpu_mb"][2:]) <= 1.01 * found["gpu_mb"][1]
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=lambda text: int(text.replace("_", "")), default=20_000_000)
    parser.add_argument("--minutes", type=float, default=None, help="stop after so many; resume later")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--run-dir", default="runs/soak")
    parser.add_argument("--resume", default=None, metavar="RUN")
    parser.add_argument("--out", type=Path, default=None, help="default: benchmarks/results/soak_DEVICE.json")
    options = parser.parse_args()
    if options.resume:
        before = read_progress(options.resume)
        gauge = Gauge(options.minutes, float(before[-1]["soak/cpu_seconds"]))
        trainer = hf.Trainer.resume(options.resume, callbacks=[gauge])
    else:
        config = hf.TrainConfig.preset(
            "repeat-previous-easy", num_envs=options.num_envs, hidden_size=options.hidden_size, device=options.device,
            total_steps=options.steps, run_dir=options.run_dir, normalize_reward=True, eval_every=100, eval_episodes=20,
            checkpoint_every=50, lr_schedule="constant", learning_rate=1e-3,
        )  # fmt: skip
        trainer = hf.Trainer(config, callbacks=[Gauge(options.minutes, 0.0)])
    result = trainer.run()
    on_gpu = trainer.device.type == "cuda"
    found = figures(result.run_dir)
    machine = torch.cuda.get_device_name() if on_gpu else f"{platform.machine()}, {os.cpu_count()} cores"
    report = {"machine": machine, "torch": torch.__version__, "num_envs": trainer.config.num_envs,
              "hidden_size": trainer.config.hidden_size, "stopped_by": result.stopped_by,
              **found, **verdict(found, on_gpu)}  # fmt: skip
    out = options.out or RESULTS / f"soak_{trainer.device.type}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
