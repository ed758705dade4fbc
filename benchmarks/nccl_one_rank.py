"""One rank with NCCL compared with a run without ranks: the same numbers, and what the process group costs.

    python benchmarks/nccl_one_rank.py        # on a machine with a GPU; writes benchmarks/results/nccl_one_rank.json

The same run three times: twice without ranks (is it reproducible?) and once under `torchrun --nproc-per-node 1`, where every
sum, gather and gradient goes through NCCL's process group. In a fourth, short run NCCL logs its collectives. With a process
group a minibatch is two CUDA graphs, and gradients are exchanged between them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.runs.log import read_progress

OUT = Path(__file__).parent / "results" / "nccl_one_rank.json"


def train(
    folder: Path, options: argparse.Namespace, updates: int, ranks: bool, log_collectives: bool = False
) -> dict[str, Any]:
    """A run from the command line: its record, and the collectives that NCCL logged."""
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m", "holdfast"]
        if ranks
        else ["-m", "holdfast"]
    )
    steps = updates * options.num_envs * 64
    command = f"""train --env holdfast/RepeatPreviousEasy-v0 --core {options.core} --hidden-size 128 --num-envs {options.num_envs}
        --num-steps 64 --minibatches 4 --total-steps {steps} --gamma 0.6 --gae-lambda 0.9 --lr-schedule constant --learning-rate 3e-3
        --checkpoint-every 0 --no-tensorboard --quiet --device {options.device} --run-dir {folder}"""
    environment = {
        **os.environ,
        **({"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,COLL"} if log_collectives else {}),
    }
    done = subprocess.run(
        [sys.executable, *launcher, *command.split()], capture_output=True, text=True, env=environment
    )
    if done.returncode:
        raise SystemExit(f"{'torchrun' if ranks else 'the run'} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    said = done.stdout + done.stderr
    version = re.search(r"NCCL version ([\w.+]+)", said)
    return {
        "record": read_progress(folder),
        "collectives": dict(
            Counter(re.findall(r"NCCL INFO (AllReduce|AllGather|Broadcast|Gather|Reduce|ReduceScatter):", said))
        ),
        "nccl": version[1] if version else None,
        "initialized": "Init COMPLETE" in said,
    }


def difference(a: list[dict[str, str]], b: list[dict[str, str]]) -> dict[str, Any]:
    """The first update in which two records differ, and the largest relative difference up to update 5 and overall."""
    names = [name for name in a[0] if not name.startswith("time/")]
    relative = np.array(
        [[_relative(float(x[name] or "nan"), float(y[name] or "nan")) for name in names] for x, y in zip(a, b)]
    )
    unequal = np.flatnonzero(relative.max(1) > 0)
    return {
        "updates": len(a),
        "first_update_that_differs": int(unequal[0]) + 1 if len(unequal) else None,
        "largest_relative_difference": float(relative.max()),
        "up_to_update_5": float(relative[:5].max()),
    }


def _relative(x: float, y: float) -> float:
    return 0.0 if x == y or (math.isnan(x) and math.isnan(y)) else abs(x - y) / max(abs(x), abs(y), 1e-12)


def speed(record: list[dict[str, str]]) -> float:
    """Steps per second: the median over the updates after the tenth."""
    return float(np.median([float(row["time/fps"]) for row in record[10:]]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--num-envs", type=int, default=8192)
    parser.add_argument("--core", default="lstm")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        alone = train(folder / "alone", options, options.updates, ranks=False)
        again = train(folder / "again", options, options.updates, ranks=False)
        joined = train(folder / "joined", options, options.updates, ranks=True)
        logged = train(folder / "logged", options, 3, ranks=True, log_collectives=True)
    report = {
        "num_envs": options.num_envs,
        "core": options.core,
        "nccl": logged["nccl"],
        "nccl_initialised": logged["initialized"],
        "collectives_of_3_updates": logged["collectives"],
        "alone_against_alone": difference(alone["record"], again["record"]),
        "alone_against_one_rank": difference(alone["record"], joined["record"]),
        "return_alone": float(alone["record"][-1]["rollout/ep_rew_mean"]),
        "return_one_rank": float(joined["record"][-1]["rollout/ep_rew_mean"]),
        "steps_per_second_alone": speed(alone["record"]),
        "steps_per_second_one_rank": speed(joined["record"]),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
