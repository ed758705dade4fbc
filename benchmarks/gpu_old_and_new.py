"""Training speed of two source trees on one GPU: the cases of `gpu_training.py --part compare`, old and new in turn.

    python benchmarks/gpu_old_and_new.py --old PATH --new PATH     # writes benchmarks/results/gpu_old_and_new.json

Three processes train the same case, one from the new tree and two from the old one. One of them runs at a time, for as
many updates as take about --seconds; then the next takes its turn. Reported: the ratio of new to old time per update,
median and 95% bootstrap interval over the turns, and the ratio of the two old ones, which shows the noise.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu_training import CARTPOLE, SETTINGS

RESULTS = Path(__file__).parent / "results" / "gpu_old_and_new.json"
WARM_UP = 5
CASES = [
    (env, cell, n) for env, cell, n in [("RepeatPreviousEasy", c, n) for n in (8192, 32768) for c in ("lstm", "gru")]
]
CASES.append(("PositionOnlyCartPoleEasy", "lstm", 8192))


def work(env: str, cell: str, n: int) -> None:
    """A run that trains K updates each time a line "K" comes in, and answers with the seconds they took; "0" ends it."""
    import torch

    import holdfast as hf

    left, began = 0, 0.0

    class Turns(hf.Callback):
        def on_update_end(self, trainer: Any, row: dict[str, float]) -> bool | None:
            nonlocal left, began
            if trainer.update < WARM_UP:
                return None
            left -= 1
            if left > 0:
                return None
            torch.cuda.synchronize()
            print(time.perf_counter() - began if began else 0.0, flush=True)
            left = int(sys.stdin.readline() or 0)
            torch.cuda.synchronize()
            began = time.perf_counter()
            return left > 0

    with tempfile.TemporaryDirectory() as folder:
        settings = {**SETTINGS, **(CARTPOLE if "CartPole" in env else {})}
        config = hf.TrainConfig(
            env=f"holdfast/{env}-v0", core=cell, hidden_size=128, num_envs=n, total_steps=10**12, device="cuda", quiet=True,
            run_dir=f"{folder}/run", checkpoint_every=0, tensorboard=False, final_eval_episodes=1, **settings,
        )  # fmt: skip
        hf.Trainer(config, callbacks=[Turns()]).run()


class Worker:
    def __init__(self, tree: Path, case: tuple[str, str, int]) -> None:
        path = os.pathsep.join([str(tree / "src"), os.environ.get("EXTRA_PYTHONPATH", "")])
        command = [sys.executable, __file__, "--worker", json.dumps(case)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
        )
        self._answer()

    def train(self, updates: int) -> float:
        """Seconds."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{updates}\n")
        self.process.stdin.flush()
        return self._answer() if updates else 0.0

    def _answer(self) -> float:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("a worker died; its error is above")
        return float(line)


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """Median, and 95% bootstrap interval of it."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(4000))
    return statistics.median(ratios), medians[100], medians[3899]


def compare(old: Path, new: Path, case: tuple[str, str, int], turns: int, seconds: float) -> dict[str, Any]:
    workers = {"old": Worker(old, case), "new": Worker(new, case), "old again": Worker(old, case)}
    updates = max(3, round(seconds / (workers["old"].train(10) / 10)))
    times: dict[str, list[float]] = {name: [] for name in workers}
    names = list(workers)
    for turn in range(turns):
        for name in names[turn % 3 :] + names[: turn % 3]:
            times[name].append(workers[name].train(updates) / updates)
    for worker in workers.values():
        worker.train(0)
        worker.process.wait(60)
    ratios = {
        "new / old": [n / (0.5 * (a + b)) for n, a, b in zip(times["new"], times["old"], times["old again"])],
        "old / old": [a / b for a, b in zip(times["old again"], times["old"])],
    }
    env, cell, n = case
    return {
        "env": env, "cell": cell, "num_envs": n, "updates_per_turn": updates, "turns": turns,
        "ms_per_update": {name: 1e3 * statistics.median(values) for name, values in times.items()},
        "ratios": {name: dict(zip(("median", "low", "high"), interval(values))) for name, values in ratios.items()},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, help="a source tree (the folder that holds src/)")
    parser.add_argument("--new", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=0.7, help="of each turn")
    parser.add_argument("--commits", nargs=2, metavar=("OLD", "NEW"), help="to be written beside the figures")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(*json.loads(args.worker))
        return
    if args.old is None:
        parser.error("--old PATH is required: the source tree to compare with")
    rows = []
    print("| case | ms per update, old | new | new / old (95%) | old / old (95%) |\n| --- | --- | --- | --- | --- |")
    for case in CASES:
        row = compare(args.old, args.new, case, args.turns, args.seconds)
        rows.append(row)
        ratio, noise = row["ratios"]["new / old"], row["ratios"]["old / old"]
        print(
            f"| {' '.join(map(str, case))} | {row['ms_per_update']['old']:.2f} | {row['ms_per_update']['new']:.2f} | "
            f"{ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f}) | "
            f"{noise['median']:.3f} ({noise['low']:.3f} to {noise['high']:.3f}) |", flush=True,
        )  # fmt: skip
        args.out.parent.mkdir(parents=True, exist_ok=True)
        commits = dict(zip(("old", "new"), args.commits or (None, None)))
        args.out.write_text(json.dumps({"commits": commits, "command": sys.argv, "cases": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
