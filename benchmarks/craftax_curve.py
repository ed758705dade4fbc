"""Craftax-Classic with a GRU to 100 million steps: a learning curve, with what was achieved on the way.

    python benchmarks/craftax_curve.py                                   # benchmarks/results/craftax_curve.csv, .json
    python benchmarks/craftax_curve.py --run-dir runs/craftax --total-steps 1000000000
    python benchmarks/craftax_curve.py --run-dir runs/craftax            # started again: continues where it was
    python benchmarks/craftax_curve.py --plot                            # docs/craftax.png from that file

Published settings of PPO with an RNN (gamma 0.99, lambda 0.8, entropy 0.01, 4 epochs) for many more environments: shorter
rollouts and a larger learning rate, so that updates stay frequent. A row of the file is one update: `mean_return`, `length` and the
achievements are means over all episodes that ended in it, sampled actions, training's own environments. An achievement made in an
episode's last step counts for its return only. There is no final evaluation, which would play in environments of its own.
SIGTERM saves, and so does the end. The optimum of the return is about 22: one per achievement, and a little for health.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path.home() / ".cache" / "jax"))

import numpy as np
import torch

import holdfast as hf
import holdfast.envs
from holdfast.envs.jax import tensors
from holdfast.training.stop_signal import Terminated

ENV = "craftax:Craftax-Classic-Symbolic-v1"
SETTINGS: dict[str, Any] = dict(
    core="gru", hidden_size=512, head_sizes=(512,), activation="relu", num_steps=16, epochs=4, minibatches=16, learning_rate=4e-4,
    gamma=0.99, gae_lambda=0.8, entropy_coef=0.01, max_grad_norm=1.0, normalize_obs=False,
)  # fmt: skip
COLUMNS = ("update", "steps", "seconds", "wall", "episodes", "mean_return", "return_std", "length", "achievements", "entropy",
           "replay_gap")  # fmt: skip
RESULTS = Path(__file__).parent / "results"
PICTURE = Path(__file__).parents[1] / "docs" / "craftax.png"
MAXIMUM = 22  # achievements
OLD_POINTS = {2.6e6: 4.4, 5.2e6: 6.6, 7.9e6: 8.9}  # steps: return of Holdfast 0.1, GRU 512, 2048 environments
PUBLISHED = {"PPO-GTrXL": 18.3, "PQN-RNN": 16.0, "PPO-RNN": 15.3}  # Craftax (full) at 1B steps, % of the maximum


def achievement_names() -> list[str]:
    from craftax.craftax_classic.constants import Achievement

    return [one.name.lower() for one in sorted(Achievement, key=lambda one: one.value)]


class Achieved:
    """Counts, on the device, how many episodes ended and which achievements they had."""

    def __init__(self, env: Any) -> None:
        jax = tensors.import_jax()
        step = env.transition
        # A step takes over the arrays of its state, so they are copied. Zero comes from torch: JAX then waits for what torch reads.
        self._copied = jax.jit(lambda flags, zero: flags.astype("uint8") + zero.astype("uint8"))
        self._zero = torch.zeros((), dtype=torch.int32, device=env.device)
        self._counts = torch.zeros(1 + len(achievement_names()), device=env.device)

        def counted(state: Any, actions: Any, draws: Any) -> Any:
            before = tensors.to_torch(self._copied(state["rows"]["achievements"], tensors.to_jax(self._zero)))
            result = step(state, actions, draws)
            self._counts[0] += result.done.sum()
            self._counts[1:] += (before * result.done[:, None]).sum(0)
            return result

        env.transition = counted

    def take(self) -> tuple[float, list[float]]:
        """Episodes and the share of them that had each achievement, since the last call."""
        ended, *counts = self._counts.tolist()
        self._counts.zero_()
        return ended, [count / max(1.0, ended) for count in counts]


class Recorder(hf.Callback):
    """A row per update in a CSV file, which a run that goes on extends."""

    def __init__(self, path: Path, began: float) -> None:
        self.path, self._began, self._names = path, began, achievement_names()

    def on_run_start(self, trainer: Any) -> None:
        self._achieved = Achieved(trainer.env)
        if not self.path.exists():
            self.path.write_text(",".join([*COLUMNS, *self._names]) + "\n")

    def on_rollout_end(self, trainer: Any, segment: Any) -> None:
        self._returns, self._lengths = segment.episode_returns, segment.episode_lengths

    def on_update_end(self, trainer: Any, row: dict[str, float]) -> None:
        _, shares = self._achieved.take()
        returns = np.asarray(self._returns or [np.nan])
        wall, length = time.perf_counter() - self._began, np.mean(self._lengths or [np.nan])
        numbers = [trainer.seconds, wall, len(self._returns), returns.mean(), returns.std(), length, sum(shares)]
        numbers += [row["train/entropy"], row["memory/replay_gap"]]
        with self.path.open("a") as file:
            print(trainer.update, trainer.steps, *(f"{one:.6g}" for one in [*numbers, *shares]), sep=",", file=file)
        if trainer.update % 20 == 1:
            achieved = f"return {returns.mean():.2f}, {sum(shares):.2f} achievements in {length:.0f} steps"
            print(f"{trainer.steps / 1e6:6.1f}M steps, {trainer.seconds:5.0f} s: {achieved}", flush=True)
        if trainer.steps >= trainer.config.total_steps:
            os.kill(os.getpid(), signal.SIGTERM)  # saves, and leaves out the final evaluation


def compile_ahead(num_envs: int, device: str) -> None:
    """Both compiled functions of the environment at once, into JAX's cache."""
    jax = tensors.import_jax()
    env: Any = holdfast.envs.make(ENV, num_envs, device=device)
    here = jax.sharding.SingleDeviceSharding(jax.devices(device)[0])

    def described(kind: Any) -> Any:  # as an array on this device: the cache tells them apart
        return jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=here, weak_type=getattr(kind, "weak_type", False))

    key, actions = (described(np.empty(shape, np.int32)) for shape in ((2,), (num_envs,)))
    state = jax.tree.map(described, jax.eval_shape(env._begin, key)[1])
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(env._step.lower(state, actions).compile), pool.submit(env._begin.lower(key).compile)]
        for job in jobs:
            job.result()


def read_curve(path: Path) -> np.ndarray:
    """A row per update; the last of those that a resumed run repeated."""
    rows = np.atleast_1d(np.genfromtxt(path, delimiter=",", names=True))
    return np.array(list({row["update"]: row for row in rows}.values()))


def plot(path: Path, out: Path) -> None:
    """The curve, and beside it what was published for the larger world."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = read_curve(path)
    rows = rows[rows["episodes"] > 0]
    percent, millions = 100 / MAXIMUM, rows["steps"] / 1e6
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), width_ratios=[3, 1], sharey=True)
    left.plot(millions, percent * rows["mean_return"], label="return, GRU 512")
    left.plot([x / 1e6 for x in OLD_POINTS], [percent * y for y in OLD_POINTS.values()], "kx", label="Holdfast 0.1")
    left.set(xlabel="million steps", ylabel="% of the maximum", title="Craftax-Classic-Symbolic, one run")
    left.set_ylim(0)
    left.legend(loc="lower right")
    right.bar(list(PUBLISHED), list(PUBLISHED.values()), color="0.6")
    right.set_title("published, another world:\nCraftax (full), 1000 million steps", fontsize=9)
    right.tick_params(axis="x", labelsize=7)
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(out, dpi=110)
    plt.close(figure)


def summary(path: Path, config: hf.TrainConfig, device: str) -> dict[str, Any]:
    """The end of the curve: over the last twentieth of its steps, each episode counted once."""
    rows = read_curve(path)
    last = rows[(rows["steps"] > 0.95 * rows["steps"][-1]) & (rows["episodes"] > 0)]
    weights = last["episodes"] / last["episodes"].sum()
    share = {name: round(float(last[name] @ weights), 4) for name in achievement_names()}
    logs = np.log1p([100 * one for one in share.values()])
    return {
        "env": ENV, "device": torch.cuda.get_device_name() if device == "cuda" else "cpu", "steps": int(rows["steps"][-1]),
        "training_seconds": round(float(rows["seconds"][-1]), 1), "episodes": int(last["episodes"].sum()),
        "return": round(float(last["mean_return"] @ weights), 3), "of_22": round(float(last["mean_return"] @ weights) / MAXIMUM, 4),
        "length": round(float(last["length"] @ weights), 1), "achievements": round(sum(share.values()), 3),
        "crafter_score": round(float(np.expm1(logs.mean())), 2), "share": share, "config": config.to_dict(),
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    began = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-envs", type=int, default=16384)
    parser.add_argument("--num-steps", type=int, default=SETTINGS["num_steps"])
    parser.add_argument("--hidden-size", type=int, default=SETTINGS["hidden_size"])
    parser.add_argument("--total-steps", type=int, default=100_000_000)
    parser.add_argument("--checkpoint-every", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/craftax-curve"))
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the curve and its summary")
    parser.add_argument("--plot", action="store_true", help=f"only draw {PICTURE.name} from the curve in --output")
    flags = parser.parse_args(arguments)
    if flags.plot:
        plot(flags.output / "craftax_curve.csv", PICTURE)
        return {"picture": str(PICTURE)}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    curve = flags.output / "craftax_curve.csv"
    settings = {**SETTINGS, "num_steps": flags.num_steps, "hidden_size": flags.hidden_size}
    config = hf.TrainConfig(
        env=ENV, num_envs=flags.num_envs, total_steps=flags.total_steps, device=device, run_dir=str(flags.run_dir), seed=flags.seed,
        checkpoint_every=flags.checkpoint_every, keep_checkpoints=1, quiet=True, tensorboard=False, **settings,
    )  # fmt: skip
    compile_ahead(flags.num_envs, device)
    print(f"compiled after {time.perf_counter() - began:.0f} s", flush=True)
    recorder, kept = Recorder(curve, began), flags.run_dir / curve.name
    if list(flags.run_dir.glob("checkpoints/*.pt")):
        if kept.exists() and not curve.exists():
            shutil.copy(kept, curve)
        trainer = hf.Trainer.resume(flags.run_dir, callbacks=[recorder], total_steps=flags.total_steps)
    else:
        curve.unlink(missing_ok=True)
        trainer = hf.Trainer(config, callbacks=[recorder])
    print(f"{trainer.engines}, built after {time.perf_counter() - began:.0f} s", flush=True)
    try:
        trainer.run()
    except Terminated:
        shutil.copy(curve, kept)
    result = summary(curve, trainer.config, device)
    (flags.output / "craftax_curve.json").write_text(json.dumps(result, indent=1) + "\n")
    return result


if __name__ == "__main__":
    print(main())
