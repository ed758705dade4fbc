"""Whole training on one GPU with and without the fused layers around the core, in one run on one machine.

    python benchmarks/gpu_engines.py                     # benchmarks/results/gpu_engines.json
    python benchmarks/gpu_engines.py --seconds 1 --only lstm

Two settings of PPO with T = 64 and hidden 128, resets, bootstrap and replay check included: 4 epochs x 4 minibatches, as in
gpu_training.py, and one epoch in minibatches of 65,536 steps, as in PufferLib v4. "fused" is what the trainer chooses;
"autograd" has the layers around the core and the loss through autograd, in CUDA graphs too.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
from pathlib import Path
from typing import Any

from gpu_training import holdfast_run

RESULTS = Path(__file__).parent / "results" / "gpu_engines.json"
EASY, CARTPOLE = "RepeatPreviousEasy", "PositionOnlyCartPoleEasy"
CASES = [
    *((EASY, "lstm", n, setting, "fused") for setting in ("4x4", "one epoch") for n in (8192, 32768)),
    *((EASY, "mingru", n, "one epoch", "fused") for n in (8192, 32768)),
    *((EASY, "gru", n, "4x4", "fused") for n in (8192, 32768)),
    (CARTPOLE, "lstm", 8192, "4x4", "fused"),
    *((EASY, "lstm", 8192, setting, "autograd") for setting in ("4x4", "one epoch")),
    (EASY, "mingru", 8192, "one epoch", "autograd"),
    (CARTPOLE, "lstm", 8192, "4x4", "autograd"),
]


def run(env: str, cell: str, n: int, setting: str, engine: str, seconds: float) -> dict[str, Any]:
    from holdfast.engines import fused_policy

    own = {} if setting == "4x4" else {"epochs": 1, "minibatches": n * 64 // 65536}
    chosen = fused_policy.obstacle
    if engine == "autograd":
        fused_policy.obstacle = lambda *_: "switched off"  # type: ignore[assignment]
    try:
        row = holdfast_run(env, cell, n, 128, seconds, **own)
    finally:
        fused_policy.obstacle = chosen
    row.pop("window")
    return row


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--only", default="", help="cases whose words contain this")
    parser.add_argument("--commit", default=None, help="where there is no git")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    import torch

    rows: list[dict[str, Any]] = []
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": args.commit or commit()}
    for case in CASES:
        words = dict(zip(("env", "cell", "num_envs", "setting", "engine"), case))
        if args.only not in " ".join(map(str, case)):
            continue
        gc.collect()
        torch.cuda.empty_cache()
        try:
            row = run(*case, seconds=args.seconds)
        except RuntimeError as error:
            print(f"{' '.join(map(str, case))}: {error}", flush=True)
            rows.append({**words, "error": str(error)})
            continue
        rows.append({**words, **row})
        print(
            f"{' '.join(map(str, case))}: {row['steps_per_second'] / 1e6:.2f}M/s, {row['ms_per_update']:.2f} ms, rollout "
            f"{row['rollout_share']:.0%}, update {row['update_share']:.0%}, replay gap {row['replay_gap']:.1e}, return "
            f"{row['last_return']:.3f}", flush=True,
        )  # fmt: skip
        args.out.parent.mkdir(exist_ok=True, parents=True)
        command = f"python benchmarks/gpu_engines.py --seconds {args.seconds:g}"
        args.out.write_text(json.dumps({**about, "command": command, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
