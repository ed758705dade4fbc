"""Whole training on one GPU: Holdfast against a whole-loop JAX program (jax_ppo.py), in one run on one machine.

    python benchmarks/gpu_training.py                     # comparison, growth; writes benchmarks/results/gpu_training.json
    python benchmarks/gpu_training.py --part compare

PPO, T = 64, 4 epochs x 4 minibatches of whole environments, hidden 128, fp32 (JAX with its default TF32 products, Holdfast without).
Holdfast's runs have resets, truncation bootstrap and the replay check; the gap is in the table. "Solved" is from the start
of the process that trains (imports included for neither) to a mean return of 0.95, compilation and graph capture included.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "gpu_training.json"
SETTINGS = dict(
    num_steps=64, epochs=4, minibatches=4, learning_rate=3e-3, gamma=0.6, gae_lambda=0.9, lr_schedule="constant"
)
CARTPOLE = dict(gamma=0.99, gae_lambda=0.95, learning_rate=1e-3)


def holdfast_run(env: str, cell: str, n: int, hidden: int, seconds: float, threshold: float = 0.95) -> dict[str, Any]:
    import torch

    import holdfast as hf

    began = time.perf_counter()
    settings = {**SETTINGS, **(CARTPOLE if "CartPole" in env else {})}
    solved: list[float] = []
    clock: dict[str, float] = {}

    class Watch(hf.Callback):
        def on_update_end(self, trainer: Any, row: dict[str, float]) -> bool | None:
            if trainer.update == 5:
                torch.cuda.synchronize()
                clock.update(t=time.perf_counter(), steps=trainer.steps)
            if not solved and row["rollout/ep_rew_mean"] >= threshold and row["rollout/episodes"] > 0:
                solved.append(time.perf_counter() - began)
            for part in ("env", "policy", "update"):
                clock[part] = clock.get(part, 0.0) + row[f"time/{part}"] * (trainer.update > 5)
            clock["gap"] = max(
                clock.get("gap", 0.0),
                row["memory/replay_gap"] if row["memory/replay_gap"] == row["memory/replay_gap"] else 0.0,
            )
            clock["last"] = row["rollout/ep_rew_mean"]
            return False if trainer.update > 5 and time.perf_counter() - clock["t"] > seconds else None

    with tempfile.TemporaryDirectory() as folder:
        config = hf.TrainConfig(
            env=f"holdfast/{env}-v0", core=cell, hidden_size=hidden, num_envs=n, total_steps=10**12, device="cuda", quiet=True,
            run_dir=f"{folder}/run", checkpoint_every=0, tensorboard=False, final_eval_episodes=1, **settings,
        )  # fmt: skip
        trainer = hf.Trainer(config, callbacks=[Watch()])
        trainer.run()
        torch.cuda.synchronize()
        elapsed = time.perf_counter() - clock["t"]
    total = clock["env"] + clock["policy"] + clock["update"]
    return {
        "steps_per_second": (trainer.steps - clock["steps"]) / elapsed,
        "solved_after_seconds": solved[0] if solved else None, "last_return": clock["last"], "replay_gap": clock["gap"],
        "rollout_share": (clock["env"] + clock["policy"]) / total, "update_share": clock["update"] / total,
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30,
    }  # fmt: skip


def in_process(kind: str, *args: Any) -> dict[str, Any]:
    """Each run in a process of its own: memory and compilation start from nothing."""
    began = time.perf_counter()
    command = [sys.executable, __file__, "--one", json.dumps([kind, *args])]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "failed"}
    result = json.loads(done.stdout.strip().splitlines()[-1])
    result["process_seconds"] = time.perf_counter() - began
    return result


def one(kind: str, env: str, cell: str, n: int, hidden: int, seconds: float) -> dict[str, Any]:
    if kind == "holdfast":
        return holdfast_run(env, cell, n, hidden, seconds)
    import jax_ppo

    options = dict(gamma=0.99, lam=0.95, lr=1e-3) if "CartPole" in env else {}
    return jax_ppo.run(env, cell, n, 64, hidden, seconds=seconds, **options)


def compare(seconds: float) -> list[dict[str, Any]]:
    rows = []
    cases = [("RepeatPreviousEasy", c, n) for n in (8192, 32768) for c in ("lstm", "gru")] + [
        ("PositionOnlyCartPoleEasy", "lstm", 8192)
    ]
    for env, cell, n in cases:
        jax_row = in_process("jax", env, cell, n, 128, seconds)
        ours = in_process("holdfast", env, cell, n, 128, seconds)
        rows.append({"env": env, "cell": cell, "num_envs": n, "jax": jax_row, "holdfast": ours})
        if "error" in jax_row or "error" in ours:
            print(env, cell, n, "jax:", jax_row, "holdfast:", ours, flush=True)
            continue
        a, b = ours["steps_per_second"], jax_row["steps_per_second"]
        print(
            f"{env} {cell} {n}: {a / 1e6:.2f}M/s, JAX {b / 1e6:.2f}M/s ({a / b:.2f}x); solved after {ours['solved_after_seconds']} s, "
            f"JAX {jax_row['solved_after_seconds']} s (compile {jax_row['compile_seconds']:.1f}); gap {ours['replay_gap']:.1e}; "
            f"rollout {ours['rollout_share']:.0%}, update {ours['update_share']:.0%}", flush=True,
        )  # fmt: skip
    return rows


def growth(seconds: float) -> list[dict[str, Any]]:
    cases = [(2**k, 128) for k in range(8, 17)] + [(8192, h) for h in (64, 256, 512)]
    rows = []
    for n, hidden in cases:
        row = in_process("holdfast", "RepeatPreviousEasy", "lstm", n, hidden, seconds)
        rows.append({"num_envs": n, "hidden": hidden, **row})
        shown = row.get("error") or f"{row['steps_per_second'] / 1e6:.2f}M/s, {row['peak_memory_gib']:.1f} GiB"
        print(f"{n} envs, hidden {hidden}: {shown}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["all", "compare", "growth"], default="all")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one(*json.loads(args.one))))
        return
    results = json.loads(args.out.read_text()) if args.out.exists() else {}
    if args.part in ("all", "compare"):
        results["compare"] = compare(args.seconds)
    if args.part in ("all", "growth"):
        results["growth"] = growth(min(3.0, args.seconds))
    args.out.parent.mkdir(exist_ok=True, parents=True)
    args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
