"""Inside Stable-Baselines3: `holdfast.integrations.sb3.RecurrentPPO` and sb3-contrib's, interleaved in one process.

    python benchmarks/vs_sb3_inside.py                   # speed, learning, double, nudged
    python benchmarks/vs_sb3_inside.py --part speed

Velocity-masked CartPole-v1, equal hyperparameters: 8 environments x 128 steps, batch 128, 10 epochs, everything else at
its default, hidden 64 and 256, one thread. Steps per CPU-second of this process (time.process_time), rollout included.
Learning: the mean return of the episodes finished in the last fifth of the steps, same seeds for both. Both make the same
updates up to rounding, so their curves are the same until rounding changes a first action; `alike` is that step.
Double: the same in double precision, where it takes longer until rounding shows.
Nudged: sb3-contrib with one weight changed by 1e-7 at the start; how far rounding alone moves its result.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import gymnasium as gym
import numpy as np
import torch

RESULTS = Path(__file__).parent / "results" / "vs_sb3_inside.json"
HIDDEN = (64, 256)
# Two-sided 95% of Student's t for 2, 3, ... 10 samples.
STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def run(algorithm: Any, hidden: int, steps: int, seed: int, nudge: float = 0.0, **policy_kwargs: Any) -> dict[str, Any]:
    """One training run: steps per CPU-second of `learn` alone, (step, return) of every episode, the late ones' mean."""
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor

    from holdfast.envs import VelocityMask

    class Watch(BaseCallback):
        def __init__(self) -> None:
            super().__init__()
            self.returns: list[tuple[int, float]] = []

        def _on_step(self) -> bool:
            self.returns += [(self.num_timesteps, i["episode"]["r"]) for i in self.locals["infos"] if "episode" in i]
            return True

    watch = Watch()
    env = VecMonitor(DummyVecEnv([lambda: VelocityMask(gym.make("CartPole-v1"))] * 8))
    model = algorithm(
        "MlpLstmPolicy", env, n_steps=128, batch_size=128, n_epochs=10, seed=seed, device="cpu",
        policy_kwargs={"lstm_hidden_size": hidden, **policy_kwargs},
    )  # fmt: skip
    with torch.no_grad():
        next(model.policy.lstm_actor.parameters())[0, 0] += nudge
    began = time.process_time()
    model.learn(steps, callback=watch)
    seconds = time.process_time() - began
    late = [r for n, r in watch.returns if n > 0.8 * steps]
    return {
        "steps_per_second": model.num_timesteps / seconds,
        "returns": watch.returns,
        "late_return": float(np.mean(late)),
        "weights": torch.cat([weight.detach().flatten() for weight in model.policy.parameters()]),
    }


def speed(steps: int, repeats: int) -> list[dict[str, Any]]:
    import sb3_contrib

    from holdfast.integrations.sb3 import RecurrentPPO

    rows = []
    for hidden in HIDDEN:
        ours, theirs = [], []
        for seed in range(1, repeats + 1):
            ours.append(run(RecurrentPPO, hidden, steps, seed)["steps_per_second"])
            theirs.append(run(sb3_contrib.RecurrentPPO, hidden, steps, seed)["steps_per_second"])
        a, b = float(np.median(ours)), float(np.median(theirs))
        rows.append({"hidden": hidden, "holdfast": ours, "sb3_contrib": theirs, "ratio": a / b, "steps": steps})
        print(f"hidden {hidden:3d}: {a:6.0f} steps per CPU-second, sb3-contrib {b:5.0f}: {a / b:.1f}x", flush=True)
    return rows


def learning(steps: int, seeds: int, hidden: int = 64) -> dict[str, Any]:
    import sb3_contrib

    from holdfast.integrations.sb3 import RecurrentPPO

    ours, theirs, alike = [], [], []
    for seed in range(1, seeds + 1):
        a, b = (run(algorithm, hidden, steps, seed) for algorithm in (RecurrentPPO, sb3_contrib.RecurrentPPO))
        ours.append(a["late_return"])
        theirs.append(b["late_return"])
        alike.append(next((x[0] for x, y in zip(a["returns"], b["returns"]) if x != y), steps))
        print(f"seed {seed}: {ours[-1]:.1f}, sb3-contrib {theirs[-1]:.1f}; alike until step {alike[-1]}", flush=True)
    summary = {"holdfast": _mean(ours), "sb3_contrib": _mean(theirs), "difference": _mean(np.subtract(ours, theirs))}
    for name, (mean, half) in summary.items():
        print(f"{name:12s} mean return, last fifth of {steps} steps: {mean:.1f} +- {half:.1f} (95%, {seeds} seeds)")
    return {
        "steps": steps, "hidden": hidden, "holdfast": ours, "sb3_contrib": theirs, "alike": alike,
        "mean_and_95_percent": summary,
    }  # fmt: skip


def learning_in_double(steps: int, seeds: int, hidden: int = 64) -> dict[str, Any]:
    import sb3_contrib
    from sb3_double import double_precision

    from holdfast.integrations.sb3 import RecurrentPPO

    rows = []
    for seed in range(1, seeds + 1):
        with double_precision() as needs:
            a, b = (run(kind, hidden, steps, seed, **needs) for kind in (RecurrentPPO, sb3_contrib.RecurrentPPO))
        alike = next((x[0] for x, y in zip(a["returns"], b["returns"]) if x != y), steps)
        gap = float((a["weights"] - b["weights"]).abs().max())
        rows.append(
            {"seed": seed, "alike": alike, "episodes": len(a["returns"]), "largest_difference_of_a_weight": gap}
            | {"holdfast": a["late_return"], "sb3_contrib": b["late_return"]}
        )
        print(
            f"double precision, seed {seed}: alike until step {alike} of {steps}; weights differ by {gap:.1g}",
            flush=True,
        )
    return {"steps": steps, "hidden": hidden, "runs": rows}


def nudged(steps: int, seeds: int, hidden: int = 64) -> dict[str, Any]:
    import sb3_contrib

    late = []
    for seed in range(1, seeds + 1):
        late.append(run(sb3_contrib.RecurrentPPO, hidden, steps, seed, nudge=1e-7)["late_return"])
        print(f"sb3-contrib, one weight changed by 1e-7, seed {seed}: {late[-1]:.1f}", flush=True)
    return {"steps": steps, "hidden": hidden, "sb3_contrib": late}


def _mean(values: Any) -> tuple[float, float]:
    """Mean, and half the width of its 95% interval."""
    n = len(values)
    return float(np.mean(values)), float(STUDENT_T[n - 2] * np.std(values, ddof=1) / np.sqrt(n))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["all", "speed", "learning", "double", "nudged"], default="all")
    parser.add_argument("--speed-steps", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--learning-steps", type=int, default=51_200)
    parser.add_argument("--few-seeds", type=int, default=3, help="of double and nudged")
    parser.add_argument("--seeds", type=int, default=6, choices=range(2, 11), metavar="2..10")
    args = parser.parse_args()
    torch.set_num_threads(1)
    parts: dict[str, Any] = {}
    if args.part in ("all", "speed"):
        parts["speed"] = speed(args.speed_steps, args.repeats)
    if args.part in ("all", "learning"):
        parts["learning"] = learning(args.learning_steps, args.seeds)
    if args.part in ("all", "double"):
        parts["learning_in_double_precision"] = learning_in_double(args.learning_steps, args.few_seeds)
    if args.part in ("all", "nudged"):
        parts["learning_nudged"] = nudged(args.learning_steps, args.few_seeds)
    machine = {"cpu": platform.processor() or platform.machine(), "torch": torch.__version__, "threads": 1}
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}  # the other part of an earlier run stays
    results |= {"machine": machine, **parts}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(f"written to {RESULTS}")


if __name__ == "__main__":
    main()
