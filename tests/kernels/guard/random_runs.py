"""Small random trainings on a GPU, one after another in each of several processes, in guarded memory (guarded_memory.py) or with
`--plain` in torch's own. Not part of `make test`.

    python tests/kernels/guard/random_runs.py --seconds 240 --jobs 11

Prints how many trainings ended and how many failed, with their settings.
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
        "hidden_size": chance.choice([8, 16, 24, 32, 72, 128, 256]),
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


def train_until(end: float, seed: int, guarded: bool) -> int:
    """One process. Returns its exit code."""
    if guarded:
        import guarded_memory

        guarded_memory.install()
    import holdfast as hf

    chance, count = random.Random(seed), 0
    while time.time() < end:
        chosen = settings(chance)
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
                print(f"FAILED after {count} trainings: {chosen}\n{traceback.format_exc()}", flush=True)
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
    parser.add_argument("--end", type=float, help=argparse.SUPPRESS)  # of a process that this command started
    arguments = parser.parse_args()
    if arguments.end:
        return train_until(arguments.end, arguments.seed, not arguments.plain)
    command = [sys.executable, __file__, "--end", str(time.time() + arguments.seconds), *["--plain"] * arguments.plain]
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
    ended = failed = 0
    for seed, job in zip(seeds, jobs):
        output = job.communicate()[0]
        if job.returncode:
            failed += 1
            print(f"--- process {seed}, exit code {job.returncode}\n{output[-4000:]}")
        ended += sum(int(line.split()[1]) for line in output.splitlines() if line.startswith("ended "))
    print(f"{arguments.jobs} processes, {ended} trainings ended in those that did not fail, {failed} processes failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
