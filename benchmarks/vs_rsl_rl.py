"""rsl_rl's `OnPolicyRunner` with its own classes and with ours, on the same synthetic robot.

    python benchmarks/vs_rsl_rl.py                    # one GPU; needs pip install 'holdfast[rsl_rl]'
    python benchmarks/vs_rsl_rl.py --tf32 --out benchmarks/results/vs_rsl_rl_tf32.json    # both in TF32, as Isaac Lab's train.py

4096 environments x 24 steps, 48 observations, 12 actions, episodes that end in 2% of the steps (half of them timeouts), a
core of 256 units and an MLP of 256-128 in actor and critic each, 5 epochs x 4 minibatches, adaptive learning rate. Both
runners play the same environment, in turns of a few iterations. Before anything is timed, both compute the same actions
and values from the same weights over a rollout with resets. Writes benchmarks/results/vs_rsl_rl.json.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from this_commit import this_commit
from torch import Tensor

RESULTS = Path(__file__).parent / "results" / "vs_rsl_rl.json"
OURS = "holdfast.integrations.rsl_rl:"


class SyntheticRobot:
    """A noisy linear system on the device; the state of an environment that ends is drawn again."""

    def __init__(self, num_envs: int, observations: int, actions: int, device: str, ends: float = 0.02) -> None:
        self.num_envs, self.num_actions, self.device, self.cfg, self.ends = num_envs, actions, device, {}, ends
        self.max_episode_length = 1000
        self.episode_length_buf = torch.zeros(num_envs, dtype=torch.long, device=device)
        generator = torch.Generator().manual_seed(0)
        self.push = torch.randn(actions, observations, generator=generator).to(device) / actions
        self.obs = torch.randn(num_envs, observations, generator=generator).to(device)

    def get_observations(self) -> Any:
        from tensordict import TensorDict

        return TensorDict({"policy": self.obs}, batch_size=[self.num_envs])

    def step(self, actions: Tensor) -> tuple[Any, Tensor, Tensor, dict[str, Tensor]]:
        noise = torch.randn_like(self.obs)
        moved = 0.9 * self.obs + actions @ self.push + 0.1 * noise
        rewards = -moved[:, :12].square().mean(1)
        chance = torch.rand(self.num_envs, device=self.device)
        dones, time_outs = chance < self.ends, chance < self.ends / 2
        self.obs = torch.where(dones.unsqueeze(1), noise, moved)
        self.episode_length_buf = (self.episode_length_buf + 1).masked_fill(dones, 0)
        return self.get_observations(), rewards, dones.long(), {"time_outs": time_outs}


def train_cfg(ours: bool, rnn_type: str, args: argparse.Namespace) -> dict[str, Any]:
    where = OURS if ours else ""
    network = {"hidden_dims": args.heads, "activation": "elu", "rnn_type": rnn_type, "rnn_hidden_dim": args.units}
    return {
        "num_steps_per_env": args.num_steps, "save_interval": 10**9, "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "actor": {"class_name": where + "RNNModel", **network, "distribution_cfg": {"class_name": "GaussianDistribution"}},
        "critic": {"class_name": where + "RNNModel", **network},
        "algorithm": {"class_name": where + "PPO", "num_learning_epochs": 5, "num_mini_batches": 4, "desired_kl": 0.01},
    }  # fmt: skip


class Contender:
    """A runner whose rollouts and updates are timed."""

    def __init__(self, ours: bool, rnn_type: str, args: argparse.Namespace) -> None:
        from rsl_rl.runners import OnPolicyRunner

        self.args, self.rollout, self.update = args, [], []
        robot = SyntheticRobot(args.num_envs, 48, 12, args.device)
        with contextlib.redirect_stdout(io.StringIO()):
            self.runner = OnPolicyRunner(robot, train_cfg(ours, rnn_type, args), device=args.device)
        algorithm = self.runner.alg
        plain, self.in_update = algorithm.update, 0.0

        def timed() -> dict[str, float]:
            began = self.now()
            losses = plain()
            self.in_update += self.now() - began
            return losses

        algorithm.update = timed

    def now(self) -> float:
        if self.args.device.startswith("cuda"):
            torch.cuda.synchronize()
        return time.perf_counter()

    def iterate(self, count: int, keep: bool = True) -> None:
        self.in_update, began = 0.0, self.now()
        with contextlib.redirect_stdout(io.StringIO()):
            self.runner.learn(count)
        whole = self.now() - began
        if keep:
            self.update.append(self.in_update / count)
            self.rollout.append((whole - self.in_update) / count)

    def report(self) -> dict[str, float]:
        rollout, update = statistics.median(self.rollout), statistics.median(self.update)
        steps = self.args.num_envs * self.args.num_steps
        fastest = min(r + u for r, u in zip(self.rollout, self.update))
        return {
            "rollout_ms": 1e3 * rollout,
            "update_ms": 1e3 * update,
            "steps_per_second": steps / (rollout + update),
            "steps_per_second_of_the_fastest_round": steps / fastest,
        }


@torch.inference_mode()
def largest_difference(stock: Contender, ours: Contender, steps: int) -> float:
    """Between the actions and values of both models with equal weights, over steps with resets."""
    largest = 0.0
    for name in ("actor", "critic"):
        theirs, mine = getattr(stock.runner.alg, name), getattr(ours.runner.alg, name)
        mine.load_state_dict(theirs.state_dict())
        robot = SyntheticRobot(stock.args.num_envs, 48, 12, stock.args.device)
        obs = robot.get_observations()
        for _ in range(steps):
            a, b = theirs(obs), mine(obs)
            largest = max(largest, float((a - b).abs().max()))
            obs, _, dones, _ = robot.step(torch.randn(robot.num_envs, 12, device=robot.device))
            theirs.reset(dones)
            mine.reset(dones)
        theirs.reset()
        mine.reset()
    return largest


def warmed_up(rnn_type: str, args: argparse.Namespace) -> tuple[Contender, Contender, float]:
    """Both runners after a few iterations, and the largest difference of their outputs from equal weights."""
    stock, ours = Contender(False, rnn_type, args), Contender(True, rnn_type, args)
    difference = largest_difference(stock, ours, args.num_steps)
    if difference > 5e-3:  # TF32 and fast kernels
        raise SystemExit(f"{rnn_type}: the same weights give outputs that differ by {difference:.2g}")
    for contender in (stock, ours):
        contender.iterate(3, keep=False)
    return stock, ours, difference


def compare(stock: Contender, ours: Contender, difference: float, rnn_type: str) -> dict[str, Any]:
    args = stock.args
    for _ in range(args.rounds):
        for contender in (stock, ours):
            contender.iterate(args.iterations)
    a, b = stock.report(), ours.report()
    row = {
        "rnn_type": rnn_type, "rsl_rl": a, "holdfast": b, "largest_difference": difference,
        "times_the_steps_per_second": b["steps_per_second"] / a["steps_per_second"],
        "update_times_faster": a["update_ms"] / b["update_ms"],
    }  # fmt: skip
    for name, side in (("rsl_rl", a), ("holdfast", b)):
        print(f"{rnn_type:5} {name:9} rollout {side['rollout_ms']:7.1f} ms  update {side['update_ms']:7.1f} ms  "
              f"{side['steps_per_second']:12,.0f} steps/s")  # fmt: skip
    print(
        f"{rnn_type:5} steps per second x {row['times_the_steps_per_second']:.2f}, update x {row['update_times_faster']:.2f}"
    )
    return row


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rnn-types", nargs="+", default=["lstm", "gru"])
    parser.add_argument("--num-envs", type=int, default=4096)
    parser.add_argument("--num-steps", type=int, default=24)
    parser.add_argument("--units", type=int, default=256)
    parser.add_argument("--heads", type=int, nargs="+", default=[256, 128])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=4, help="of each runner, per round")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tf32", action="store_true", help="let torch multiply in TF32, which is off by default")
    parser.add_argument("--out", default=str(RESULTS))
    args = parser.parse_args(argv)
    from importlib.metadata import PackageNotFoundError, version

    import holdfast

    try:
        rsl_rl = version("rsl-rl-lib")
    except PackageNotFoundError:  # on PYTHONPATH without its metadata
        rsl_rl = "unknown"
    found = {
        "machine": torch.cuda.get_device_name() if args.device.startswith("cuda") else platform.processor(),
        "torch": torch.__version__, "rsl_rl": rsl_rl, "holdfast": holdfast.__version__, "commit": this_commit(),
        "command": " ".join(["python", *sys.argv]), "settings": vars(args), "rows": [],
    }  # fmt: skip
    torch.backends.cuda.matmul.allow_tf32 = args.tf32
    for rnn_type in args.rnn_types:
        found["rows"].append(compare(*warmed_up(rnn_type, args), rnn_type))
        Path(args.out).write_text(json.dumps(found, indent=1) + "\n")
    return found


if __name__ == "__main__":
    main()
