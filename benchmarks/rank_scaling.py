"""What a rank costs: rollout, update and all-reduce with gloo ranks on this machine's CPUs, against model size.

    python benchmarks/rank_scaling.py            # 1, 2 and 4 ranks; writes benchmarks/results/rank_scaling.json

Per rank: 64 environments x 64 steps, 4 epochs x 4 minibatches. Rollout and update are in CPU-seconds of a rank, which do not
depend on what else the machine does. The all-reduce is the fastest of 30 by wall-clock time, with no other work. With more
ranks than cores it includes waiting for a core.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import holdfast as hf

RESULTS = Path(__file__).parent / "results" / "rank_scaling.json"
ENVS_PER_RANK, STEPS, EPOCHS, MINIBATCHES, UPDATES = 64, 64, 4, 4, 6


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
        trainer.ppo.update(segment, 0.0, all_valid=True)
        rollout.append(middle - began)
        update.append(time.process_time() - middle)
    gradients = torch.zeros(sum(p.numel() for p in trainer.policy.parameters()))
    seconds = []
    for _ in range(30):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(gradients)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--hidden-sizes", type=int, nargs="+", default=[64, 128, 256])
    options = parser.parse_args()
    if "RANK" in os.environ:  # started by torchrun, below
        folder = os.environ["RANK_SCALING_FOLDER"]
        found = [measure(hidden_size, folder) for hidden_size in options.hidden_sizes]
        if dist.get_rank() == 0:
            Path(folder, "found.json").write_text(json.dumps(found))
        return
    cells: list[dict[str, Any]] = []
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            environment = {**os.environ, "RANK_SCALING_FOLDER": folder, "OMP_NUM_THREADS": "1"}
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            sizes = ["--hidden-sizes", *map(str, options.hidden_sizes)]
            subprocess.run([*launcher, __file__, *sizes], env=environment, check=True)
            cells += json.loads(Path(folder, "found.json").read_text())
    report = {"machine": f"{platform.machine()}, {os.cpu_count()} cores", "torch": torch.__version__,
              "envs_per_rank": ENVS_PER_RANK, "steps": STEPS, "cells": cells}  # fmt: skip
    RESULTS.write_text(json.dumps(report, indent=2) + "\n")
    for cell in cells:
        parts = ("rollout_cpu", "update_cpu", "all_reduce")
        rollout, update, exchange = (f"{1e3 * cell[f'{name}_seconds']:.2f} ms" for name in parts)
        size = f"{cell['gradient_bytes'] / 1e6:.2f} MB"
        print(f"{cell['ranks']} ranks, hidden {cell['hidden_size']}: rollout {rollout}, update {update}, ", end="")
        print(f"gradient {size}, all-reduce {exchange}")


if __name__ == "__main__":
    main()
