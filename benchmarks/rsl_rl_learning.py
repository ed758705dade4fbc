"""Does a robot learn inside rsl_rl's runner with our classes as well as with rsl_rl's own?

    python benchmarks/rsl_rl_learning.py --processes 8      # benchmarks/results/rsl_rl_learning.jsonl
    python benchmarks/rsl_rl_learning.py --verdict          # only reads that file

The robot of `examples/rsl_rl_robot.py` is told once where to go. 128 environments x 24 steps, LSTM of 32 units in actor and critic, 70
iterations; both bootstrap timeouts with V(s_t). Measured is the mean reward per step of the most likely actions in 200 new
environments: 1 is perfect, 0.33 is standing still.

The criterion was written down before the runs, with seeds that nobody had looked at: as well means that the one-sided 95% bound
(Welch) of the difference of the means, ours less theirs, is above -2% of the range from standing still to perfect (-0.0134).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import redirect_stdout
from math import sqrt
from multiprocessing import get_context
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "rsl_rl_learning.jsonl"
FIRST_SEED, SEEDS, ITERATIONS = 101, 40, 70
STANDING_STILL, PERFECT = 0.33, 1.0
MARGIN = 0.02 * (PERFECT - STANDING_STILL)


def robot() -> Any:
    path = Path(__file__).parents[1] / "examples" / "rsl_rl_robot.py"
    spec = importlib.util.spec_from_file_location("rsl_rl_robot", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def final_reward(ours: bool, seed: int, iterations: int = ITERATIONS) -> float:
    """Mean reward per step after training."""
    import torch
    from rsl_rl.runners import OnPolicyRunner

    example = robot()
    torch.manual_seed(seed)
    config = example.train_cfg(ours, "lstm", units=32)
    for name in ("actor", "critic"):
        config[name]["hidden_dims"] = [32]
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        runner = OnPolicyRunner(example.Arm(128, seed=seed, final_obs=False), config, log_dir=None, device="cpu")
        runner.learn(iterations)
    return float(example.mean_reward(runner.get_inference_policy(), example.Arm(200, seed=1_000_000 + seed)))


def lower_bound(ours: list[float], theirs: list[float], confidence: float = 0.95) -> float:
    """One-sided bound of the difference of the means by Welch's test."""
    parts = [statistics.variance(sample) / len(sample) for sample in (ours, theirs)]
    degrees = sum(parts) ** 2 / sum(part**2 / (len(s) - 1) for part, s in zip(parts, (ours, theirs)))
    z = statistics.NormalDist().inv_cdf(confidence)
    t = (
        z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
    )  # Student's, from the normal
    return statistics.mean(ours) - statistics.mean(theirs) - t * sqrt(sum(parts))


def verdict(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Over the seeds that are done with both classes."""
    found = {(row["ours"], row["seed"]): row["reward"] for row in rows}
    seeds = sorted(seed for mine, seed in found if mine and (False, seed) in found)
    if len(seeds) < 2:
        raise SystemExit("fewer than two seeds are done with both classes; run without --verdict, or longer")
    ours, theirs = ([found[who, seed] for seed in seeds] for who in (True, False))
    bound = lower_bound(ours, theirs)
    about = [{"mean": statistics.mean(s), "deviation": statistics.stdev(s), "lowest": min(s)} for s in (ours, theirs)]
    return {"seeds": len(seeds), "ours": about[0], "rsl_rl": about[1], "bound": bound, "as_well": bound > -MARGIN}


def _job(ours: bool, seed: int, until: float) -> dict[str, Any] | None:
    import torch

    torch.set_num_threads(1)
    if time.time() > until:
        return None
    began = time.time()
    reward = final_reward(ours, seed)
    return {"ours": ours, "seed": seed, "reward": reward, "seconds": round(time.time() - began, 1)}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1e6, help="after these no run is started")
    parser.add_argument("--verdict", action="store_true", help="only read the results")
    parser.add_argument("--output", type=Path, default=RESULTS)
    flags = parser.parse_args(arguments)
    until = time.time() + flags.seconds
    lines = flags.output.read_text().splitlines() if flags.output.exists() else []
    rows = [json.loads(line) for line in lines]
    if not flags.verdict:
        done = {(row["ours"], row["seed"]) for row in rows}
        runs = [(who, FIRST_SEED + i) for i in range(flags.seeds) for who in (True, False)]
        with ProcessPoolExecutor(flags.processes, get_context("spawn")) as pool:
            jobs = [pool.submit(_job, *run, until) for run in runs if run not in done]
            for job in as_completed(jobs):
                row = job.result()
                if row is not None:
                    rows.append(row)
                    with flags.output.open("a") as file:
                        print(json.dumps(row), file=file)
                    print(row, flush=True)
    return verdict(rows)


if __name__ == "__main__":
    print(json.dumps(main(), indent=1))
