"""What a rank costs: rollout, update and all-reduce with gloo ranks on this machine's CPUs, against model size.

    python benchmarks/rank_scaling.py            # 1, 2 and 4 ranks; writes benchmarks/results/rank_scaling.json
    python benchmarks/rank_scaling.py --part throughput    # steps per second of two ranks against one process

Per rank: 64 environments x 64 steps, 4 epochs x 4 minibatches. Rollout and update are in CPU-seconds of a rank, which do not
depend on what else the machine does. The all-reduce is the fastest of 30 by wall-clock time, with no other work. With more
ranks than cores it includes waiting for a core.
Throughput: whole training (rollout, update, statistics, metrics, log) by wall-clock time. One process alone, two ranks, and two
processes that know nothing of each other take turns of a few updates each, so that what else the machine does hits all; one
thread per process, as many environments per rank as alone. Two strangers are the upper limit: they share caches and
memory, and never wait for each other. The median over turns, and the machine's load while it ran. On a busy machine ranks
wait for each other's turn on a core; the ratio per CPU-second of a rank leaves the waiting out in which a rank sleeps.
HOLDFAST_SHARED_MEMORY=0 measures ranks that exchange everything through gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import holdfast as hf
from holdfast.algorithms.base import Progress
from holdfast.distributed.ranks import ALONE, Ranks, join

RESULTS = Path(__file__).parent / "results" / "rank_scaling.json"
ENVS_PER_RANK, STEPS, EPOCHS, MINIBATCHES, UPDATES, TURN = 64, 64, 4, 4, 6, 8


def measure(hidden_size: int, folder: str) -> dict[str, Any]:
    """One run of a few updates on this rank."""
    size = int(os.environ["WORLD_SIZE"])
    config = hf.TrainConfig(
        hidden_size=hidden_size, num_envs=ENVS_PER_RANK * size, num_steps=STEPS, epochs=EPOCHS, threads=1,
        minibatches=MINIBATCHES, total_steps=10**9, device="cpu", run_dir=f"{folder}/{size}-{hidden_size}", quiet=True,
        tensorboard=False,
    )  # fmt: skip
    trainer = hf.Trainer(config)
    rollout, update = [], []
    for _ in range(UPDATES):
        began = time.process_time()
        segment = trainer.collector.rollout()
        middle = time.process_time()
        trainer.algorithm.prepare(segment)
        trainer.algorithm.start_update(segment, Progress(0, 1, 0, 1, 0.0))()
        rollout.append(middle - began)
        update.append(time.process_time() - middle)
    gradients = torch.zeros(sum(p.numel() for p in trainer.policy.parameters()))
    seconds = []
    for _ in range(30):
        dist.barrier()
        began = time.perf_counter()
        trainer.ranks.sum_(gradients)
        seconds.append(time.perf_counter() - began)
    return {
        "ranks": size,
        "hidden_size": hidden_size,
        "gradient_bytes": 4 * gradients.numel(),
        "all_reduced_bytes_per_update": 4 * gradients.numel() * EPOCHS * MINIBATCHES,
        "rollout_cpu_seconds": min(rollout[1:]),
        "update_cpu_seconds": min(update[1:]),
        "all_reduce_seconds": min(seconds),
    }


class Clock(hf.Callback):
    """Wall-clock and CPU-seconds at the end of each update."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, float, int]] = []

    def on_update_end(self, trainer: hf.Trainer, row: dict[str, float]) -> None:
        self.ends.append((time.perf_counter(), time.process_time(), trainer.steps))


def speed(hidden_size: int, folder: str, ranks: Ranks) -> dict[str, float]:
    """Of a short run: steps per second, and CPU-seconds of this process per second."""
    config = hf.TrainConfig(
        hidden_size=hidden_size, num_envs=ENVS_PER_RANK * ranks.size, num_steps=STEPS, epochs=EPOCHS, threads=1,
        minibatches=MINIBATCHES, total_steps=ENVS_PER_RANK * ranks.size * STEPS * TURN, device="cpu", run_dir=folder, quiet=True,
        tensorboard=False, checkpoint_every=0, final_eval_episodes=1,
    )  # fmt: skip
    clock = Clock()
    with mock.patch("holdfast.distributed.ranks.join", lambda device: (ranks, torch.device("cpu"))):
        trainer = hf.Trainer(config, callbacks=[clock])
        trainer.run()
    (began, cpu_began, steps_before), (ended, cpu_ended, steps) = clock.ends[1], clock.ends[-1]
    per_second = (steps - steps_before) / (ended - began)
    return {"steps_per_second": per_second, "busy": (cpu_ended - cpu_began) / (ended - began)}


def throughput(hidden_size: int, folder: str, turns: int) -> dict[str, Any]:
    """Turns of rank 0 alone, while the others wait, of all ranks as strangers, and of all together."""
    everybody, _ = join("cpu")
    torch.set_num_threads(1)
    alone, strangers, together, loads = [], [], [], []
    for turn in range(turns):
        name = f"{hidden_size}-{turn}"
        dist.barrier()
        if everybody.leads:
            alone.append(speed(hidden_size, f"{folder}/alone-{name}", ALONE))
        dist.barrier()
        mine = speed(hidden_size, f"{folder}/stranger-{name}-{everybody.rank}", ALONE)
        of_all = everybody.all_gather([mine["steps_per_second"], mine["busy"]], torch.device("cpu"))
        strangers.append(
            {"steps_per_second": sum(s for s, _ in of_all), "busy": sum(b for _, b in of_all) / len(of_all)}
        )
        dist.barrier()
        together.append(speed(hidden_size, f"{folder}/together-{name}", everybody))
        loads.append(os.getloadavg()[0])
    if not everybody.leads:
        return {}
    return {
        "ranks": everybody.size,
        "hidden_size": hidden_size,
        "shared_memory": everybody.shared is not None,
        "alone": statistics.median(run["steps_per_second"] for run in alone),
        **compare("together", together, alone),
        **compare("strangers", strangers, alone),
        "core_share_alone": statistics.median(run["busy"] for run in alone),
        "load": statistics.median(loads),
    }


def compare(name: str, runs: list[dict[str, float]], alone: list[dict[str, float]]) -> dict[str, Any]:
    """Two processes against one."""
    ratios = [run["steps_per_second"] / one["steps_per_second"] for run, one in zip(runs, alone)]
    per_cpu_second = [ratio * one["busy"] / run["busy"] for ratio, run, one in zip(ratios, runs, alone)]
    suffix = "" if name == "together" else f"_{name}"
    return {
        name: statistics.median(run["steps_per_second"] for run in runs),
        f"ratio{suffix}": statistics.median(ratios),
        f"ratios{suffix}": [round(ratio, 3) for ratio in ratios],
        f"ratio_per_cpu_second{suffix}": statistics.median(per_cpu_second),
        f"core_share_{name}": statistics.median(run["busy"] for run in runs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["all", "costs", "throughput"], default="all")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--hidden-sizes", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--turns", type=int, default=7, help="of throughput")
    options = parser.parse_args()
    if "RANK" in os.environ:  # started by torchrun, below
        folder = os.environ["RANK_SCALING_FOLDER"]
        if options.part == "throughput":
            found = [throughput(hidden_size, folder, options.turns) for hidden_size in options.hidden_sizes]
        else:
            found = [measure(hidden_size, folder) for hidden_size in options.hidden_sizes]
        if dist.get_rank() == 0:
            Path(folder, "found.json").write_text(json.dumps(found))
        return
    report = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    report.update(machine=f"{platform.machine()}, {os.cpu_count()} cores", torch=torch.__version__,
                  envs_per_rank=ENVS_PER_RANK, steps=STEPS)  # fmt: skip
    if options.part in ("all", "costs"):
        report["cells"] = [cell for ranks in options.ranks for cell in launch("costs", ranks, options)]
        for cell in report["cells"]:
            parts = ("rollout_cpu", "update_cpu", "all_reduce")
            rollout, update, exchange = (f"{1e3 * cell[f'{name}_seconds']:.2f} ms" for name in parts)
            size = f"{cell['gradient_bytes'] / 1e6:.2f} MB"
            print(f"{cell['ranks']} ranks, hidden {cell['hidden_size']}: rollout {rollout}, update {update}, ", end="")
            print(f"gradient {size}, all-reduce {exchange}")
    if options.part in ("all", "throughput"):
        report["throughput"] = launch("throughput", 2, options)
        for cell in report["throughput"]:
            print(
                f"hidden {cell['hidden_size']}: alone {cell['alone']:,.0f}, two ranks {cell['together']:,.0f} steps/s, "
                f"{cell['ratio']:.2f}x (turns {min(cell['ratios']):.2f} to {max(cell['ratios']):.2f}); of a core "
                f"{cell['core_share_alone']:.0%} and {cell['core_share_together']:.0%} each, "
                f"{cell['ratio_per_cpu_second']:.2f}x per CPU-second of a rank; two strangers {cell['ratio_strangers']:.2f}x, "
                f"{cell['ratio_per_cpu_second_strangers']:.2f}x per CPU-second; load {cell['load']:.1f}"
            )
    RESULTS.write_text(json.dumps(report, indent=2) + "\n")


def launch(part: str, ranks: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """What so many gloo ranks of this program found."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "RANK_SCALING_FOLDER": folder, "OMP_NUM_THREADS": "1"}
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        chosen = ["--part", part, "--turns", str(options.turns), "--hidden-sizes", *map(str, options.hidden_sizes)]
        subprocess.run([*launcher, __file__, *chosen], env=environment, check=True)
        found: list[dict[str, Any]] = json.loads(Path(folder, "found.json").read_text())
        return found


if __name__ == "__main__":
    main()
