"""Where the time of recurrent PPO goes on a CPU: a minibatch of one environment's 128 steps, part by part, run in three ways.

    python benchmarks/update_profile.py          # prints a table, writes benchmarks/results/update_profile.json

portable: the kernel in plain PyTorch, gradients by autograd. native: the C kernel for the recurrence, the rest by
autograd. without autograd: heads, recurrence and objective in C, as `hf.Trainer` runs an `hf.ActorCritic`.
The setting is that of vs_sb3.py: velocity-masked CartPole, separate actor and critic LSTM, heads 64-64, one thread. CPU
microseconds, lower quartile of 60, the three ways alternately.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import vs_sb3

import holdfast as hf
from holdfast import envs
from holdfast.algorithms.optimizers import groups_of, make_optimizer
from holdfast.algorithms.ppo import PPO, ClippedLoss
from holdfast.engines.autograd import Minibatches
from holdfast.engines.native import NativeMinibatches, native_obstacle
from holdfast.kernels.cpu import recurrence as native

RESULTS = Path(__file__).parent / "results" / "update_profile.json"
REPEATS = 60


def quartiles(runs: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """CPU-microseconds of each run, interleaved."""
    times: dict[str, list[int]] = {name: [] for name in runs}
    for _ in range(REPEATS):
        for name, run in runs.items():
            began = time.process_time_ns()
            run()
            times[name].append(time.process_time_ns() - began)
    return {name: sorted(values)[REPEATS // 4] / 1e3 for name, values in times.items()}


def profile(hidden: int) -> dict[str, dict[str, float]]:
    """Part -> way -> microseconds."""
    config = vs_sb3.cartpole_config(hidden, 1, 10**6)
    env = envs.make(config.env, config.num_envs, mask_velocity=True)
    policy = PPO.make_policy(config, env.single_observation_space, env.single_action_space)
    collector = hf.Collector(env, policy, config.num_steps, seed=1)
    optimizer = make_optimizer(groups_of(policy.parameters(), policy.core, config.learning_rate, config), config)
    loss = ClippedLoss(value_scale=policy.value_scale)
    segment = loss.targets(collector.rollout())
    column = torch.tensor([3])
    batch = segment.select(column)
    assert native_obstacle(policy) is None
    through_autograd = Minibatches(policy, config, optimizer)
    through_autograd.load(batch, loss)
    through_autograd.step(None)  # Adam makes its moments in its first step
    in_c = NativeMinibatches(policy, config, optimizer)
    in_c.load(batch, loss)
    feed, action = collector.adapter, policy.act(collector.adapter.obs, collector.adapter.resets).action

    def with_kernel(kernel: str, run: Callable[[], Any]) -> Callable[[], Any]:
        def switched() -> None:
            for core in policy.core.cores.values():
                core.kernel = kernel
            run()

        return switched

    def forward() -> Any:
        return loss(policy.unroll(batch.obs, batch.start_state, batch.resets), batch)["loss"]

    def gradient() -> None:
        forward().backward()
        optimizer.zero_grad(set_to_none=True)

    three = {
        "a minibatch, whole": (lambda: through_autograd.step(None), lambda: in_c.step(None)),
        "- the loss and its parts, forward": (forward, None),
        "- with gradients": (gradient, lambda: in_c.gradients(in_c.select(None), 1.0)),
    }
    table = {}
    for part, (autograd, hand) in three.items():
        runs = {"portable": with_kernel("portable", autograd), "native": with_kernel("auto", autograd)}
        if hand is not None:
            runs["without autograd"] = with_kernel("auto", hand)
        table[part] = quartiles(runs)
    in_c.step(None)
    table["- gradient norm and Adam"] = quartiles(
        {"native": through_autograd.optimizer_step, "without autograd": in_c.optimizer_step}
    )
    table["its columns, selected"] = quartiles({"native": lambda: segment.select(column)})
    act = lambda: policy.act(feed.obs, feed.resets)  # noqa: E731
    table["a rollout step, policy (8 environments)"] = quartiles(
        {kernel: with_kernel("auto" if kernel == "native" else kernel, act) for kernel in ("portable", "native")}
    )
    table["a rollout step, environments (8)"] = quartiles({"native": lambda: feed.step(action)})
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    out = parser.parse_args().out
    torch.set_num_threads(1)
    assert native.in_use(), native.status()["reason"]
    results = {hidden: profile(hidden) for hidden in (64, 256)}
    ways = ("portable", "native", "without autograd")
    heads = [f"hidden {hidden}, {way}" for hidden in results for way in ways]
    print(f"| CPU microseconds | {' | '.join(heads)} |\n|{' --- |' * (len(heads) + 1)}")
    for part in results[64]:
        cells = [results[hidden][part].get(way) for hidden in results for way in ways]
        print(f"| {part} | {' | '.join('' if cell is None else f'{cell:.0f}' for cell in cells)} |")
    out.write_text(json.dumps({"torch": torch.__version__, "microseconds": results}, indent=1) + "\n")
    print(f"written to {out}")


if __name__ == "__main__":
    main()
