"""Craftax with memory: steps per second of the environment alone and of training, and a learning curve.

    python benchmarks/craftax_speed.py                                        # benchmarks/results/craftax.json
    python benchmarks/craftax_speed.py --part env --num-envs 1024 4096
    python benchmarks/craftax_speed.py --part train --num-envs 4096 --seconds 10
    python benchmarks/craftax_speed.py --part curve --num-envs 4096 --steps 100000000
    python benchmarks/craftax_speed.py --env craftax:Craftax-Symbolic-v1

PPO, GRU 512, T = 64, 4 epochs x 8 minibatches. "env" steps the environment with random actions drawn on the device, through the same
`step` as training, twice: with new worlds only where an episode ended (ours), and with a new world for every environment in every
step in which some episode ended, close to what Craftax's own autoreset does. "train" is whole training after warm-up: rollout, update, replay check. The file is
written after every figure, so a run that is stopped leaves what it measured. A first step compiles for a minute or more; set
JAX_COMPILATION_CACHE_DIR to do that once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "craftax.json"
SETTINGS: dict[str, Any] = dict(
    core="gru", hidden_size=512, num_steps=64, epochs=4, minibatches=8, learning_rate=2e-4, gamma=0.99, gae_lambda=0.8
)
WARM_UP = 3  # updates in which steps are compiled and graphs captured


class Measured(Exception):
    """Ends a training without its final evaluation, which would compile the environment once more."""


class Figures:
    """What was measured, written to a file after each entry."""

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self.path, self.rows = path, {"about": about, "env": [], "train": [], "curve": []}

    def add(self, part: str, row: dict[str, Any]) -> None:
        self.rows[part].append(row)
        self.path.write_text(json.dumps(self.rows, indent=1) + "\n")
        print(part, {key: value for key, value in row.items() if key != "points"}, flush=True)


def about(env: str, device: str) -> dict[str, Any]:
    """Machine and versions."""
    from importlib.metadata import version

    import torch

    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    versions = {package: _version(version, package) for package in ("torch", "jax", "craftax", "numpy")}
    return {"env": env, "device": name, "settings": SETTINGS, **versions}


def _version(ask: Any, package: str) -> str:
    try:
        return str(ask(package))
    except Exception:  # a package that was copied and not installed has no version
        return "unknown"


def env_alone(env_id: str, num_envs: int, device: str, seconds: float, reset_all: bool) -> dict[str, Any]:
    """Steps per second of the environment with random actions."""
    import torch

    import holdfast.envs

    began = time.perf_counter()
    options = {"resets_at_once": num_envs} if reset_all else {}
    env: Any = holdfast.envs.make(env_id, num_envs, device=device, env_kwargs=options)
    env.reset(seed=1)
    actions = torch.randint(int(env.single_action_space.n), (64, num_envs), device=device)

    def play(steps: int) -> tuple[float, float]:
        start, ended = time.perf_counter(), torch.zeros((), device=device)
        for t in range(steps):
            _, _, terminated, truncated, _ = env.step(actions[t % 64])
            ended += (terminated | truncated).sum()
        ends = float(ended)  # waits for the device
        return time.perf_counter() - start, ends

    play(2)
    compiled = time.perf_counter() - began
    play(256 if device == "cuda" else 8)  # so that episodes do not all begin at the same time
    took, ends = play(10)
    steps = max(10, int(10 * seconds / took))
    took, ends = play(steps)
    every = "all environments" if reset_all else "where an episode ended"
    return {
        "num_envs": num_envs, "new_worlds": every, "steps_per_second": round(num_envs * steps / took),
        "ms_per_step": round(1e3 * took / steps, 3), "episodes_per_step": round(ends / steps, 2),
        "seconds_to_compile": round(compiled, 1), "peak_gb": _peak_gb(device),
    }  # fmt: skip


def train(
    env_id: str, num_envs: int, device: str, seconds: float, steps: int | None = None, **changes: Any
) -> dict[str, Any]:
    """Steps per second of training after warm-up, for `seconds`; or a learning curve to `steps`, for at most `seconds`."""
    import torch

    import holdfast as hf

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    clock: dict[str, float] = {"start": 0.0, "first": 0.0, "env": 0.0, "policy": 0.0, "update": 0.0, "gap": 0.0}
    points: list[list[float]] = []

    class Watch(hf.Callback):
        def on_update_end(self, trainer: Any, row: dict[str, float]) -> bool | None:
            now, gap = time.perf_counter(), row["memory/replay_gap"]
            clock["gap"] = max(clock["gap"], gap) if gap == gap else clock["gap"]
            points.append(
                [
                    trainer.steps,
                    round(now - began, 1),
                    round(row["rollout/ep_rew_mean"], 3),
                    round(row["rollout/ep_len_mean"], 1),
                ]
            )
            if trainer.update == WARM_UP:
                clock.update(start=now, first=trainer.steps)
            elif trainer.update > WARM_UP:
                for name in ("env", "policy", "update"):
                    clock[name] += row[f"time/{name}"]
            clock.update(last=now, steps=trainer.steps, updates=trainer.update - WARM_UP)
            if (clock["start"] and now - clock["start"] > seconds) or trainer.steps >= trainer.config.total_steps:
                raise Measured
            return None

    settings = {**SETTINGS, **changes}
    config = hf.TrainConfig(
        env=env_id, num_envs=num_envs, total_steps=steps or 10**10, device=device, run_dir=tempfile.mkdtemp() + "/run", seed=1,
        checkpoint_every=0, quiet=True, tensorboard=False, **settings,
    )  # fmt: skip
    with contextlib.suppress(Measured):
        hf.Trainer(config, callbacks=[Watch()]).run()
    took, updates = clock["last"] - clock["start"], max(1.0, clock["updates"])
    return {
        "num_envs": num_envs, **changes, "steps_per_second": round((clock["steps"] - clock["first"]) / took),
        **{f"{name}_ms_per_update": round(1e3 * clock[name] / updates, 1) for name in ("env", "policy", "update")},
        "replay_gap": clock["gap"], "updates": int(updates), "steps": int(clock["steps"]),
        "seconds": round(clock["last"] - began, 1), "peak_gb": _peak_gb(device),
        "return": points[-1][2] if points else None, "points": points[:: max(1, len(points) // 200)] if steps else [],
    }  # fmt: skip


def _peak_gb(device: str) -> float | None:
    """Memory of torch and JAX together."""
    if device != "cuda":
        return None
    import jax
    import torch

    stats = jax.devices("cuda")[0].memory_stats() or {}
    return round((torch.cuda.max_memory_allocated() + stats.get("peak_bytes_in_use", 0)) / 1e9, 1)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="craftax:Craftax-Classic-Symbolic-v1")
    parser.add_argument("--part", choices=["env", "train", "curve", "all"], default="all")
    parser.add_argument("--num-envs", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384])
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="to measure each figure; at most this long for a curve"
    )
    parser.add_argument("--steps", type=int, default=100_000_000, help="of the learning curve")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--hidden-size", type=int, default=SETTINGS["hidden_size"])
    parser.add_argument("--no-reset-all", action="store_true", help="leave out Craftax's own way of resetting")
    parser.add_argument("--output", type=Path, default=RESULTS)
    flags = parser.parse_args(arguments)

    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    figures = Figures(flags.output, about(flags.env, device))
    changes = {"precision": flags.precision, "hidden_size": flags.hidden_size}
    for num_envs in flags.num_envs:
        if flags.part in ("env", "all"):
            for reset_all in [False] if flags.no_reset_all else [False, True]:
                figures.add("env", env_alone(flags.env, num_envs, device, flags.seconds, reset_all))
        if flags.part in ("train", "all"):
            figures.add("train", train(flags.env, num_envs, device, flags.seconds, **changes))
    if flags.part in ("curve", "all"):
        limit = flags.seconds if flags.part == "curve" else 1e9
        figures.add("curve", train(flags.env, flags.num_envs[-1], device, limit, flags.steps, **changes))
    return figures.rows


if __name__ == "__main__":
    main()
