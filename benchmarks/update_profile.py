"""Where the time of a recurrent PPO update goes on a CPU: one minibatch of one environment's 128 steps, part by part.

    python benchmarks/update_profile.py                                  # the native kernel
    HOLDFAST_CPU_KERNEL=portable python benchmarks/update_profile.py     # without it

The setting of vs_sb3.py: velocity-masked CartPole, separate actor and critic LSTM, heads 64-64, one thread. CPU
microseconds, lower quartile of 60.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import vs_sb3

import holdfast as hf
from holdfast import envs
from holdfast.kernels import native
from holdfast.ppo import PPO, normalize_advantage, ppo_terms
from holdfast.saved_policy import policy_from


def microseconds(run: Callable[[], Any], repeats: int = 60) -> float:
    times = []
    for _ in range(repeats):
        began = time.process_time_ns()
        run()
        times.append(time.process_time_ns() - began)
    return sorted(times)[repeats // 4] / 1e3


def profile(hidden: int) -> dict[str, float]:
    config = vs_sb3.cartpole_config(hidden, 1, 10**6)
    env = envs.make(config.env, config.num_envs, mask_velocity=True)
    policy = policy_from(config, env.single_observation_space, env.single_action_space)
    collector = hf.Collector(env, policy, config.num_steps, seed=1)
    ppo = PPO(policy, config)
    segment = normalize_advantage(collector.rollout())
    batch = segment.select(torch.tensor([3]))
    x = policy._encode(batch.obs.flatten(0, 1)).unflatten(0, (config.num_steps, 1))
    y, _ = policy.core(x, batch.start_state, batch.resets)
    feed, action = collector.feed, policy.act(collector.feed.obs, collector.feed.resets).action

    def forward_backward() -> None:
        ppo_terms(policy, batch, all_valid=True).loss.backward()
        ppo.optimizer.zero_grad(set_to_none=True)

    parts = {
        "minibatch, whole": lambda: ppo._step(batch, True),
        "- select columns": lambda: segment.select(torch.tensor([3])),
        "- cores, forward": lambda: policy.core(x, batch.start_state, batch.resets),
        "- heads, forward": lambda: policy._decode(y.flatten(0, 1), None),
        "- loss and its parts, forward": lambda: ppo_terms(policy, batch, all_valid=True),
        "- forward and backward": forward_backward,
        "rollout step, policy (8 envs)": lambda: policy.act(feed.obs, feed.resets),
        "rollout step, environment (8 envs)": lambda: feed.step(action),
    }
    return {name: microseconds(run) for name, run in parts.items()}


def main() -> None:
    torch.set_num_threads(1)
    print(f"kernel: {native.status()['kernel']}")
    columns = {hidden: profile(hidden) for hidden in (64, 256)}
    print("| part | hidden 64, us | hidden 256, us |\n|---|---|---|")
    for name in columns[64]:
        print(f"| {name} | {columns[64][name]:.0f} | {columns[256][name]:.0f} |")


if __name__ == "__main__":
    main()
