"""Every memory on one GPU: whole training in CUDA graphs, steps per second, GPU memory, replay gap.

    python benchmarks/gpu_memories.py                       # benchmarks/results/gpu_memories.json
    python benchmarks/gpu_memories.py --cores lru window --envs 2048 --seconds 2

PPO on RepeatPreviousEasy, hidden 128, T = 64, 4 epochs x 4 minibatches, with resets and bootstrap. The window has 64 steps. A run
that does not go through CUDA graphs says why.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from this_commit import this_commit

RESULTS = Path(__file__).parent / "results" / "gpu_memories.json"
CORES = ("lstm", "gru", "mingru", "lru", "ffm", "mlstm", "window")
WARM_UP = 3  # updates


def measure(core: str, num_envs: int, hidden: int, seconds: float, env: str) -> dict[str, Any]:
    import torch

    import holdfast as hf

    torch.cuda.reset_peak_memory_stats()
    clock: dict[str, float] = {"gap": 0.0, "rollout": 0.0, "update": 0.0}

    class Watch(hf.Callback):
        def on_update_end(self, trainer: Any, row: dict[str, float]) -> bool | None:
            gap = row["memory/replay_gap"]
            clock["gap"] = max(clock["gap"], gap) if gap == gap else clock["gap"]
            if trainer.update == WARM_UP:
                torch.cuda.synchronize()
                clock["t"], clock["steps"] = time.perf_counter(), trainer.steps
            elif trainer.update > WARM_UP:
                clock["rollout"] += row["time/env"] + row["time/policy"]
                clock["update"] += row["time/update"]
                if time.perf_counter() - clock["t"] > seconds:
                    torch.cuda.synchronize()
                    clock["seconds"] = time.perf_counter() - clock["t"]
                    clock["done"], clock["return"] = trainer.steps, row["rollout/ep_rew_mean"]
                    clock["updates"] = trainer.update - WARM_UP
                    return False
            return None

    with tempfile.TemporaryDirectory() as folder:
        config = hf.TrainConfig(
            env=env, core=core, hidden_size=hidden, memory_span=64 if core == "window" else None, num_envs=num_envs, num_steps=64, epochs=4,
            minibatches=4, total_steps=10**11, device="cuda", run_dir=str(Path(folder) / "run"), quiet=True, tensorboard=False,
            checkpoint_every=0, final_eval_episodes=1, replay_check_every=10,
        )  # fmt: skip
        trainer = hf.Trainer(config, callbacks=[Watch()])
        began = time.perf_counter()
        trainer.run()
        engines = trainer.engines
    n = clock["updates"]
    result = {
        "core": core, "num_envs": num_envs, "hidden": hidden, "steps_per_second": (clock["done"] - clock["steps"]) / clock["seconds"],
        "rollout_ms": 1000 * clock["rollout"] / n, "update_ms": 1000 * clock["update"] / n, "gib": torch.cuda.max_memory_reserved() / 2**30,
        "replay_gap": clock["gap"], "return": clock["return"], "wall_s": time.perf_counter() - began, **engines,
    }  # fmt: skip
    del trainer
    gc.collect()
    torch.cuda.empty_cache()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cores", nargs="+", default=list(CORES))
    parser.add_argument("--envs", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--env", default="holdfast/RepeatPreviousEasy-v0")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    import torch

    commit = this_commit()
    rows = []
    print(
        "| core | million steps/s | rollout ms | update ms | GiB | replay gap | rollout | update |\n|---|---|---|---|---|---|---|---|"
    )
    for core in options.cores:
        try:
            row = measure(core, options.envs, options.hidden, options.seconds, options.env)
        except Exception as error:
            row = {"core": core, "error": f"{type(error).__name__}: {error}"[:300]}
            print(f"| {core} | {row['error']} |", flush=True)
        else:
            print(
                f"| {core} | {row['steps_per_second'] / 1e6:.2f} | {row['rollout_ms']:.1f} | {row['update_ms']:.1f} | {row['gib']:.1f} | "
                f"{row['replay_gap']:.1e} | {row['rollout']} | {row['update']} |",
                flush=True,
            )
        rows.append(row)
    found = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": commit, "rows": rows}
    options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
