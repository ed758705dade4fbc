"""Craftax-Classic with a GRU to 100 million steps: a learning curve, with what was achieved on the way. Also the full Craftax.

    python benchmarks/craftax_curve.py                                   # benchmarks/results/craftax_curve.csv, .json
    python benchmarks/craftax_curve.py --run-dir runs/craftax --total-steps 1000000000
    python benchmarks/craftax_curve.py --run-dir runs/craftax            # started again: continues where it was
    python benchmarks/craftax_curve.py --world full --num-envs 8192 --total-steps 1000000000 --seconds 600    # craftax_full_curve
    python benchmarks/craftax_curve.py --plot                            # docs/craftax.png from those files

Published settings of PPO with an RNN (gamma 0.99, lambda 0.8, entropy 0.01, 4 epochs) for many more environments: shorter
rollouts and a larger learning rate, so that updates stay frequent. A row of the file is one update: `mean_return`, `length` and the
achievements are means over all episodes that ended in it, sampled actions, training's own environments. An achievement made in an
episode's last step counts for its return only. There is no final evaluation, which would play in environments of its own.
SIGTERM saves, and so does the end; with `--checkpoint-every 0` only the curve is kept. The optimum of the return is about 22 in Classic,
one per achievement, and 226 in the full world, where they count 1, 3, 5 or 8; and a little for health.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path.home() / ".cache" / "jax"))  # a second run compiles nothing

import numpy as np
import torch
from this_commit import this_commit

import holdfast as hf
import holdfast.envs
from holdfast.envs.jax import tensors
from holdfast.training.stop_signal import Terminated


@dataclass(frozen=True)
class World:
    env: str
    constants: str  # module
    maximum: int  # of the return
    file: str

    def achievements(self) -> list[str]:
        return [
            one.name.lower() for one in sorted(import_module(self.constants).Achievement, key=lambda one: one.value)
        ]


WORLDS = {
    "classic": World("craftax:Craftax-Classic-Symbolic-v1", "craftax.craftax_classic.constants", 22, "craftax_curve"),
    "full": World("craftax:Craftax-Symbolic-v1", "craftax.craftax.constants", 226, "craftax_full_curve"),
}
SETTINGS: dict[str, Any] = dict(
    core="gru", hidden_size=512, head_sizes=(512,), activation="relu", num_steps=16, epochs=4, minibatches=16, learning_rate=4e-4,
    gamma=0.99, gae_lambda=0.8, entropy_coef=0.01, max_grad_norm=1.0, normalize_obs=False,
)  # fmt: skip
COLUMNS = ("update", "steps", "seconds", "wall", "episodes", "mean_return", "return_std", "length", "achievements", "entropy",
           "replay_gap")  # fmt: skip
RESULTS = Path(__file__).parent / "results"
PICTURE = Path(__file__).parents[1] / "docs" / "craftax.png"
OLD_POINTS = {
    2.6e6: 4.4,
    5.2e6: 6.6,
    7.9e6: 8.9,
}  # steps: return in Classic of Holdfast 0.1, GRU 512, 2048 environments
PUBLISHED = {  # steps: % of the maximum
    "classic": {"PPO": {1e9: 90.0}},
    "full": {"PPO-GTrXL": {1e9: 18.3}, "PQN-RNN": {1e9: 16.0}, "PPO-RNN": {1e6: 2.3, 1e9: 15.3}},
}


class Enough(Exception):
    """Ends a run without saving it and without its final evaluation."""


class Achieved:
    """Counts, on the device, how many episodes ended and which achievements they had."""

    def __init__(self, env: Any, count: int) -> None:
        jax = tensors.import_jax()
        step = env.transition
        # A step takes over the arrays of its state, so they are copied. Zero comes from torch: JAX then waits for what torch reads.
        self._copied = jax.jit(lambda flags, zero: flags.astype("uint8") + zero.astype("uint8"))
        self._zero = torch.zeros((), dtype=torch.int32, device=env.device)
        self._counts = torch.zeros(1 + count, device=env.device)

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

    def __init__(self, path: Path, names: list[str], began: float, seconds: float) -> None:
        self.path, self._names, self._began, self._seconds = path, names, began, seconds

    def on_run_start(self, trainer: Any) -> None:
        self._achieved = Achieved(trainer.env, len(self._names))
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
        if trainer.steps >= trainer.config.total_steps or wall > self._seconds:
            if not trainer.config.checkpoint_every:
                raise Enough
            os.kill(os.getpid(), signal.SIGTERM)  # saves, and leaves out the final evaluation


def read_curve(path: Path) -> np.ndarray:
    """A row per update; the last of those that a resumed run repeated."""
    rows = np.atleast_1d(np.genfromtxt(path, delimiter=",", names=True))
    return np.array(list({row["update"]: row for row in rows}.values()))


def plot(folder: Path, out: Path) -> None:
    """The curves, and what was published."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    titles = {"classic": "Craftax-Classic-Symbolic, one run", "full": "Craftax-Symbolic (full), one run"}
    figure, axes = plt.subplots(1, 2, figsize=(10, 4))
    for axis, (name, world) in zip(axes, WORLDS.items()):
        rows = read_curve(folder / f"{world.file}.csv")
        rows = rows[rows["episodes"] > 0]
        axis.plot(rows["steps"], 100 / world.maximum * rows["mean_return"], label="Holdfast, GRU 512")
        if name == "classic":
            axis.plot(
                list(OLD_POINTS), [100 / world.maximum * y for y in OLD_POINTS.values()], "kx", label="Holdfast 0.1"
            )
        for marker, (who, points) in zip("osD", PUBLISHED[name].items()):
            axis.plot(list(points), list(points.values()), marker, color="0.5", label=f"{who}, published")
        axis.set(xscale="log", xlabel="steps", ylabel="return, % of the maximum", title=titles[name])
        axis.set_ylim(0)
        axis.legend(loc="upper left")
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(out, dpi=110)
    plt.close(figure)


def summary(path: Path, world: World, config: hf.TrainConfig, device: str) -> dict[str, Any]:
    """The end of the curve: over the last twentieth of its steps, each episode counted once."""
    rows = read_curve(path)
    last = rows[(rows["steps"] > 0.95 * rows["steps"][-1]) & (rows["episodes"] > 0)]
    weights = last["episodes"] / last["episodes"].sum()
    share = {name: round(float(last[name] @ weights), 4) for name in world.achievements()}
    logs = np.log1p([100 * one for one in share.values()])
    mean_return, config_of_id = float(last["mean_return"] @ weights), {**config.to_dict(), "env": world.env}
    return {
        "env": world.env, "commit": this_commit(), "device": torch.cuda.get_device_name() if device == "cuda" else "cpu", "steps": int(rows["steps"][-1]),
        "training_seconds": round(float(rows["seconds"][-1]), 1), "episodes": int(last["episodes"].sum()),
        "return": round(mean_return, 3), f"of_{world.maximum}": round(mean_return / world.maximum, 4),
        "length": round(float(last["length"] @ weights), 1), "achievements": round(sum(share.values()), 3),
        "crafter_score": round(float(np.expm1(logs.mean())), 2), "share": share, "config": config_of_id,
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    began = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", choices=list(WORLDS), default="classic")
    parser.add_argument("--num-envs", type=int, default=16384)
    parser.add_argument("--num-steps", type=int, default=SETTINGS["num_steps"])
    parser.add_argument("--hidden-size", type=int, default=SETTINGS["hidden_size"])
    parser.add_argument("--total-steps", type=int, default=100_000_000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after these, compilation included")
    parser.add_argument("--checkpoint-every", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/craftax-curve"))
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the curve and its summary")
    parser.add_argument("--plot", action="store_true", help=f"only draw {PICTURE.name} from the curves in --output")
    flags = parser.parse_args(arguments)
    if flags.plot:
        plot(flags.output, PICTURE)
        return {"picture": str(PICTURE)}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    world = WORLDS[flags.world]
    curve = flags.output / f"{world.file}.csv"
    settings = {**SETTINGS, "num_steps": flags.num_steps, "hidden_size": flags.hidden_size}
    config = hf.TrainConfig(
        env=world.env, num_envs=flags.num_envs, total_steps=flags.total_steps, device=device, run_dir=str(flags.run_dir),
        seed=flags.seed, checkpoint_every=flags.checkpoint_every, keep_checkpoints=1, quiet=True, tensorboard=False, **settings,
    )  # fmt: skip
    env = holdfast.envs.make(world.env, flags.num_envs, device=device)
    env.reset(seed=flags.seed)  # compiles
    print(f"compiled after {time.perf_counter() - began:.0f} s", flush=True)
    recorder, kept = Recorder(curve, world.achievements(), began, flags.seconds), flags.run_dir / curve.name
    if list(flags.run_dir.glob("checkpoints/*.pt")):
        if kept.exists() and not curve.exists():
            shutil.copy(kept, curve)
        trainer = hf.Trainer.resume(flags.run_dir, env=env, callbacks=[recorder], total_steps=flags.total_steps)
    else:
        curve.unlink(missing_ok=True)
        trainer = hf.Trainer(config, env=env, callbacks=[recorder])
    print(f"{trainer.engines}, built after {time.perf_counter() - began:.0f} s", flush=True)
    try:
        trainer.run()
    except Terminated:
        shutil.copy(curve, kept)
    except Enough:
        pass
    result = summary(curve, world, trainer.config, device)
    curve.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    return result


if __name__ == "__main__":
    print(main())
