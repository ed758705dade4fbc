"""Small random trainings on a GPU, one after another in each of several processes, in guarded memory (guarded_memory.py) or with
`--plain` in torch's own. Not part of `make test`.

    python tests/kernels/guard/random_runs.py --seconds 240 --jobs 11

Prints how many trainings began, and what failed.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

CORES = ("lstm", "gru", "mingru", "lru", "ffm", "mlstm", "window")


def settings(chance: random.Random) -> dict[str, Any]:
    """Of one training: any of our tasks, any core, sizes that fit no tile, or sizes that fill the GPU's units."""
    from holdfast.envs.catalog import CATALOG

    sequences, minibatches = chance.choice([1, 2, 3, 5, 16, 64]), chance.choice([1, 2, 4])
    return {
        "env": chance.choice([row.id for row in CATALOG]),
        "core": chance.choice(CORES),
        "hidden_size": chance.choice([8, 16, 20, 24, 32, 72, 128, 256]),
        "num_layers": chance.choice([1, 1, 2]),
        "critic_core": chance.choice(["shared", "shared", "separate"]),
        "reset": chance.choice(["zero", "zero", "zero", "never"]),
        "num_envs": sequences * minibatches,
        "num_steps": (steps := chance.choice([8, 16, 64])),
        "bptt": chance.choice([steps, steps // 4]),
        "minibatches": minibatches,
        "epochs": chance.choice([1, 2]),
        "total_steps": sequences * minibatches * steps * chance.choice([2, 4]),
        "seed": chance.randrange(1000),
    }


def turn_off(parts: list[str]) -> None:
    """Run without a part of the engine, to see whether a fault needs it."""
    import torch

    from holdfast.engines import choose, graph_rollout
    from holdfast.kernels.cuda import tiles

    if "clusters" in parts:
        tile_for = tiles.tile_for
        tiles.tile_for = lambda *args: (tile := tile_for(*args)) and tile._replace(cluster=False)
    if "reader" in parts:  # episodes are read on the stream that everything else runs on
        capture = graph_rollout.GraphCollector._capture

        def and_one_stream(self) -> None:
            capture(self)
            self._reader = torch.cuda.current_stream()

        graph_rollout.GraphCollector._capture = and_one_stream
    if "graphs" in parts:
        for module in (choose.graph_rollout, choose.graph_step, choose.graph_update):
            module.obstacle = lambda *args: "graphs are off"


def train_until(end: float, seed: int, guarded: bool, off: list[str]) -> int:
    """One process. Returns its exit code."""
    turn_off(off)
    if guarded:
        import guarded_memory

        guarded_memory.install()
    import holdfast as hf

    chance, count = random.Random(seed), 0
    while time.time() < end:
        chosen = settings(chance)
        print(f"{count}: {chosen}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            fixed = {
                "device": "cuda",
                "quiet": True,
                "tensorboard": False,
                "final_eval_episodes": 1,
                "checkpoint_every": 0,
            }
            try:
                hf.Trainer(hf.TrainConfig(**chosen, **fixed, run_dir=f"{folder}/run")).run()
            except Exception:
                traceback.print_exc()
                return 1
        count += 1
    print(f"ended {count}", flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--jobs", type=int, default=11, help="processes that share the GPU")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plain", action="store_true", help="torch's own memory")
    parser.add_argument(
        "--off", nargs="*", default=[], choices=["clusters", "reader", "graphs"], help="parts to do without"
    )
    parser.add_argument("--end", type=float, help=argparse.SUPPRESS)  # of a process that this command started
    arguments = parser.parse_args()
    if arguments.end:
        return train_until(arguments.end, arguments.seed, not arguments.plain, arguments.off)
    end = str(time.time() + arguments.seconds)
    command = [sys.executable, "-X", "faulthandler", __file__, "--end", end, "--off", *arguments.off]
    command += ["--plain"] * arguments.plain
    environment = {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "PYTHONPATH": f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}",
    }
    seeds = [str(1000 * arguments.seed + i) for i in range(arguments.jobs)]
    jobs = [
        subprocess.Popen(
            [*command, "--seed", s], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        for s in seeds
    ]
    begun = failed = 0
    for seed, job in zip(seeds, jobs):
        try:
            output = job.communicate(timeout=max(0.0, float(end) + 15 - time.time()))[0]
        except subprocess.TimeoutExpired:  # a long training: it has not failed so far
            job.kill()
            output, job.returncode = job.communicate()[0], 0
        begun += sum(line.split(":")[0].isdigit() for line in output.splitlines())
        if job.returncode:
            failed += 1
            print(f"--- process {seed}, exit code {job.returncode}\n{output[-6000:]}")
    print(f"{arguments.jobs} processes began {begun} trainings; {failed} processes failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
