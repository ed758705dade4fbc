"""Does a long run degrade? Memory, throughput and the size of its files, over millions of steps.

    python benchmarks/soak.py                                     # 20 million steps on the CPU environment
    python benchmarks/soak.py --minutes 3                         # as far as 3 minutes go
    python benchmarks/soak.py --device cuda --num-envs 8192 --steps 1_000_000_000 --minutes 9 --run-dir runs/soak
    python benchmarks/soak.py --resume runs/soak --minutes 9      # continues; figures are for the whole run

Everything that a real run does is on: checkpoints, evaluation, replay checks, normalizers, TensorBoard. Figures are read
from the run's progress.csv, which has a few additional columns: resident memory, CPU-seconds, GPU memory (reserved by
torch, and used on the whole device), and how often the run was resumed. The first updates of every process (imports,
compilation, CUDA graphs) are warm-up and left out; the rest is split into tenths.
"""

from __future__ import annotations

import argparse
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
from holdfast.runs.log import MAX_ROWS, read_progress

RESULTS = Path(__file__).parent / "results"
LARGEST_FILE = 32 * 2**20  # bytes; no file of the run may be larger
WARM_UP = 20  # updates of each process that are not counted
LEAK_MB = 8.0  # resident memory may vary by this much, in addition to 1%


class Gauge(hf.Callback):
    """Adds memory, CPU-seconds and the number of the process to each row. Stops the run when time is up."""

    def __init__(self, minutes: float | None, earlier: list[dict[str, str]]) -> None:
        self.end = None if minutes is None else time.monotonic() + 60 * minutes
        last = earlier[-1] if earlier else {"soak/cpu_seconds": "0", "soak/part": "0"}
        self.cpu_before = float(last["soak/cpu_seconds"]) - time.process_time()
        self.part = float(last["soak/part"]) + 1

    def on_update_end(self, trainer: hf.Trainer, row: dict[str, float]) -> bool:
        row["soak/part"] = self.part
        row["soak/rss"] = _resident_bytes()
        row["soak/cpu_seconds"] = self.cpu_before + time.process_time()
        if trainer.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(trainer.device)
            row["soak/gpu"], row["soak/gpu_device"] = float(torch.cuda.memory_reserved(trainer.device)), total - free
        return self.end is None or time.monotonic() < self.end


def _resident_bytes() -> float:
    with open("/proc/self/statm") as file:
        return float(file.read().split()[1]) * resource.getpagesize()


def figures(run: Path) -> dict[str, Any]:
    """Memory and throughput by tenths of the run, warm-up left out, and the largest file."""
    rows = read_progress(run)
    table = {name: np.array([float(row[name] or "nan") for row in rows]) for name in rows[0]}
    part = table["soak/part"]
    in_part = np.concatenate([np.arange((part == number).sum()) for number in np.unique(part)])
    counted = np.flatnonzero(in_part >= WARM_UP)
    if len(counted) < 20:
        raise SystemExit(f"only {len(counted)} updates after warm-up: too few for tenths; let it run longer")
    tenths = np.array_split(counted, 10)
    gained = {name: np.diff(table[name], prepend=0.0) for name in ("steps", "time/elapsed", "soak/cpu_seconds")}

    def per_second(clock: str) -> list[float]:
        return [float(gained["steps"][rows].sum() / gained[clock][rows].sum()) for rows in tenths]

    def megabytes(name: str) -> list[float]:
        return [round(float(table[name][rows].mean()) / 2**20, 1) for rows in tenths]

    def growth(name: str) -> float:
        """In MB, of the process that grew most: its largest fifth compared with its first."""
        found = []
        for number in np.unique(part):
            fifths = [
                table[name][rows].mean() for rows in np.array_split(counted[part[counted] == number], 5) if len(rows)
            ]
            found += [max(fifths[1:]) - fifths[0]] if len(fifths) > 1 else []
        return round(float(max(found)) / 2**20, 1)

    files = [path for path in run.rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    found: dict[str, Any] = {
        "steps": int(table["steps"][-1]),
        "updates": int(table["update"][-1]),
        "processes": int(part[-1]),
        "seconds": float(table["time/elapsed"][-1]),
        "cpu_seconds": float(table["soak/cpu_seconds"][-1]),
        "steps_per_second": per_second("time/elapsed"),
        "steps_per_cpu_second": per_second("soak/cpu_seconds"),
        "rss_mb": megabytes("soak/rss"),
        "rss_growth_mb": growth("soak/rss"),
        "files": len(files),
        "bytes_in_all": sum(path.stat().st_size for path in files),
        "largest_file": [largest.name, largest.stat().st_size],
        "rows_of_the_record": len(rows),
        "replay_gap": float(np.nanmax(table["memory/replay_gap"])),
        "skipped_steps": float(table["train/skipped_steps"].sum()),
        "mean_return": float(table["rollout/ep_rew_mean"][-1]),
    }
    if "soak/gpu" in table:
        found |= {"gpu_torch_mb": megabytes("soak/gpu"), "gpu_torch_growth_mb": growth("soak/gpu")}
        found |= {"gpu_device_mb": megabytes("soak/gpu_device"), "gpu_device_growth_mb": growth("soak/gpu_device")}
    return found


def verdict(found: dict[str, Any], on_gpu: bool) -> dict[str, Any]:
    """Whether memory stays flat after warm-up, throughput stays, and no file is too large.

    On a CPU throughput is per CPU-second, because wall-clock time depends on what else the machine does.
    """
    speed = found["steps_per_second" if on_gpu else "steps_per_cpu_second"]
    kept: dict[str, Any] = {
        "last_tenth_over_first": speed[-1] / speed[0],
        "throughput_kept": speed[-1] >= 0.95 * speed[0],
        "memory_flat": found["rss_growth_mb"] <= 0.01 * found["rss_mb"][0] + LEAK_MB,
        "largest_file_stated": LARGEST_FILE,
        "files_small": found["largest_file"][1] <= LARGEST_FILE and found["rows_of_the_record"] <= MAX_ROWS,
    }
    if "gpu_torch_mb" in found:
        grown = (found[f"gpu_{what}_growth_mb"] <= 0.01 * found[f"gpu_{what}_mb"][0] for what in ("torch", "device"))
        kept["gpu_memory_flat"] = all(grown)
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=lambda text: int(text.replace("_", "")), default=20_000_000)
    parser.add_argument("--minutes", type=float, default=None, help="stop after this many minutes; resume later")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--run-dir", default="runs/soak")
    parser.add_argument("--resume", default=None, metavar="RUN")
    parser.add_argument("--out", type=Path, default=None, help="default: benchmarks/results/soak_DEVICE.json")
    options = parser.parse_args()
    if options.resume:
        gauge = Gauge(options.minutes, read_progress(options.resume))
        trainer = hf.Trainer.resume(options.resume, callbacks=[gauge])
    else:
        config = hf.TrainConfig.preset(
            "repeat-previous-easy", num_envs=options.num_envs, hidden_size=options.hidden_size, device=options.device,
            total_steps=options.steps, run_dir=options.run_dir, normalize_reward=True, eval_every=100, eval_episodes=20,
            checkpoint_every=50, lr_schedule="constant", learning_rate=1e-3,
        )  # fmt: skip
        trainer = hf.Trainer(config, callbacks=[Gauge(options.minutes, [])])
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
