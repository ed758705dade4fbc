"""Whole training on one GPU: Holdfast compared with a whole-loop JAX program (jax_ppo.py), in one run on one machine.

    python benchmarks/gpu_training.py                     # comparison and growth; benchmarks/results/gpu_training.json
    python benchmarks/gpu_training.py --part compare --seconds 3
    python benchmarks/gpu_training.py --part growth       # steps per second and memory against environments and hidden size
    python benchmarks/gpu_training_report.py              # tables (results/gpu_training.md) and plot (gpu_training.png next to them)

PPO, T = 64, 4 epochs x 4 minibatches of whole environments, hidden 128. JAX multiplies in TF32, its default. Holdfast's encoder and
heads run in fp32, its recurrence in fp16 with fp32 sums and an fp32 state. Holdfast's runs include resets, truncation bootstrap and
the replay check, whose gap is in the table. "Solved" is the time from the start of the process that trains to a mean return of 0.95,
including compilation and graph capture, without imports for both. GPU load is read from nvidia-smi during the measured seconds, for
both programs (gpu_load.py).
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gpu_load import GpuLoad

RESULTS = Path(__file__).parent / "results" / "gpu_training.json"
SETTINGS = dict(
    num_steps=64, epochs=4, minibatches=4, learning_rate=3e-3, gamma=0.6, gae_lambda=0.9, lr_schedule="constant"
)
CARTPOLE = dict(gamma=0.99, gae_lambda=0.95, learning_rate=1e-3)
WARM_UP = 5  # updates in which kernels are chosen and graphs captured
GROWTH = [(2**k, 128) for k in range(8, 17)] + [(8192, hidden) for hidden in (64, 256, 512)]


def holdfast_run(
    env: str, cell: str, n: int, hidden: int, seconds: float, threshold: float = 0.95, *, rounds: int = 1,
    between: Callable[[Any], None] = lambda trainer: None, callbacks: Sequence[Any] = (), **own: Any,
) -> dict[str, Any]:  # fmt: skip
    """Train for `rounds` times `seconds` after warm-up. own: settings that differ from `SETTINGS`.

    between: called before each round, for something else to take its turn on the GPU.
    """
    import torch

    import holdfast as hf

    began = time.perf_counter()
    torch.cuda.reset_peak_memory_stats()
    settings = {**SETTINGS, **(CARTPOLE if "CartPole" in env else {}), **own}
    solved: list[float] = []
    windows: list[tuple[int, int, float]] = []  # updates, steps, seconds of each finished round
    clock: dict[str, float] = {"rollout": 0.0, "update": 0.0, "gap": 0.0}

    def start_round(trainer: Any) -> None:
        torch.cuda.synchronize()
        between(trainer)
        clock.update(t=time.perf_counter(), steps=trainer.steps, updates=trainer.update)
        clock.setdefault("wall", time.time())

    class Watch(hf.Callback):
        only_watches = True

        def on_update_end(self, trainer: Any, row: dict[str, float]) -> bool | None:
            if not solved and row["rollout/ep_rew_mean"] >= threshold and row["rollout/episodes"] > 0:
                solved.append(time.perf_counter() - began)
            gap = row["memory/replay_gap"]
            clock["gap"] = max(clock["gap"], gap) if gap == gap else clock["gap"]
            clock["last"] = row["rollout/ep_rew_mean"]
            if "t" in clock:
                clock["rollout"] += row["time/env"] + row["time/policy"]
                clock["update"] += row["time/update"]
                if time.perf_counter() - clock["t"] > seconds:
                    torch.cuda.synchronize()
                    passed = time.perf_counter() - clock["t"]
                    windows.append(
                        (trainer.update - int(clock["updates"]), trainer.steps - int(clock["steps"]), passed)
                    )
                    if len(windows) == rounds:
                        clock["wall_end"] = time.time()
                        return False
                    start_round(trainer)
            elif trainer.update == WARM_UP:
                start_round(trainer)
            return None

    with tempfile.TemporaryDirectory() as folder:
        config = hf.TrainConfig(
            env=f"holdfast/{env}-v0", core=cell, hidden_size=hidden, num_envs=n, total_steps=10**12, device="cuda", quiet=True,
            run_dir=f"{folder}/run", checkpoint_every=0, tensorboard=False, final_eval_episodes=1, **settings,
        )  # fmt: skip
        trainer = hf.Trainer(config, callbacks=[Watch(), *callbacks])
        trainer.run()
    if len(windows) < rounds:
        raise RuntimeError(f"the run ended after {trainer.update} updates, before it was measured")
    updates, steps, elapsed = (sum(parts) for parts in zip(*windows))
    return {
        "steps_per_second": steps / elapsed, "rounds": [steps / taken for _, steps, taken in windows],
        "updates": updates, "ms_per_update": 1e3 * elapsed / updates,
        "solved_after_seconds": solved[0] if solved else None, "last_return": clock["last"], "replay_gap": clock["gap"],
        "rollout_share": clock["rollout"] / elapsed, "update_share": clock["update"] / elapsed,
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30,
        "peak_reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
        "engines": trainer.engines, "window": [clock["wall"], clock["wall_end"]],
    }  # fmt: skip


def in_process(kind: str, *args: Any) -> dict[str, Any]:
    """Each run has its own process, so memory and compilation start fresh."""
    began = time.perf_counter()
    command = [sys.executable, __file__, "--one", json.dumps([kind, *args])]
    with GpuLoad() as load:
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "failed"}
    result = json.loads(done.stdout.strip().splitlines()[-1])
    result["process_seconds"] = time.perf_counter() - began
    return {**result, **load.between(*result.pop("window"))}


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
            f"rollout {ours['rollout_share']:.0%}, update {ours['update_share']:.0%}; busy {ours['gpu_busy']}, JAX {jax_row['gpu_busy']}; "
            f"watts {ours['watts']}, JAX {jax_row['watts']}", flush=True,
        )  # fmt: skip
    return rows


def growth(cells: list[str], seconds: float) -> list[dict[str, Any]]:
    """All sizes one after another in this process. Each one's memory is freed before the next starts."""
    import torch

    rows = []
    with GpuLoad() as load:
        for cell in cells:
            for n, hidden in GROWTH:
                gc.collect()
                torch.cuda.empty_cache()
                held = torch.cuda.memory_reserved() / 2**30
                row: dict[str, Any] = {"cell": cell, "num_envs": n, "hidden": hidden, "held_before_gib": held}
                try:
                    row |= holdfast_run("RepeatPreviousEasy", cell, n, hidden, seconds)
                    row |= load.between(*row.pop("window"))
                    row["memory_gib"] = row["peak_reserved_gib"] - held  # workspaces of earlier streams stay
                    shown = (
                        f"{row['steps_per_second'] / 1e6:.2f}M/s, {row['memory_gib']:.2f} GiB, busy {row['gpu_busy']}"
                    )
                except RuntimeError as error:
                    row["error"] = shown = str(error).splitlines()[0]
                rows.append(row)
                print(f"{cell}, {n} envs, hidden {hidden}: {shown}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["all", "compare", "growth"], default="all")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--cells", nargs="+", default=["lstm", "gru"], help="of the growth")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one(*json.loads(args.one))))
        return
    results = json.loads(args.out.read_text()) if args.out.exists() else {}
    if args.part in ("all", "compare"):
        results["compare"] = compare(args.seconds)
        _write(args.out, results)
    if args.part in ("all", "growth"):
        results["growth"] = growth(args.cells, min(1.5, args.seconds))
        _write(args.out, results)


def _write(path: Path, results: dict[str, Any]) -> None:
    import torch

    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    results = {**machine, **{name: rows for name, rows in results.items() if name not in machine}}
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
