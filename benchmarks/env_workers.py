"""When worker processes pay: rollouts in gymnasium environments of known cost, by vectorization.

    python benchmarks/env_workers.py            # writes benchmarks/results/env_workers.json

An environment burns a given CPU-time per step (CPU-time, so that other programs do not shorten it). A policy (LSTM 64) acts in
all of them, step by step, as the trainer's rollout does; no update. Contenders:

    sync      gymnasium's SyncVectorEnv: one after another, in the process of the policy
    async     gymnasium's AsyncVectorEnv: a process per environment
    workers   holdfast.envs.WorkersVectorEnv: a process per core, several environments in each
    halves    workers with double buffering: one half steps while the policy acts in the other (each half has its own
              processes and memory); an experiment, not an option of the trainer

They take turns. Steps per second by wall-clock time, the median over turns, and CPU-time per step of all processes beyond
what the environments burn: what a vectorization costs, which does not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

import holdfast as hf
from holdfast.envs.workers import WorkersVectorEnv, default_workers
from holdfast.rollout.vector_env import VectorEnvAdapter

RESULTS = Path(__file__).parent / "results" / "env_workers.json"
TICKS = os.sysconf("SC_CLK_TCK")


class Burning(gym.Env[Any, Any]):
    """A step takes `microseconds` of CPU-time; episodes have 100 steps."""

    observation_space, action_space = spaces.Box(-1, 1, (8,), np.float32), spaces.Discrete(4)

    def __init__(self, microseconds: float) -> None:
        self.nanoseconds, self.t = 1000 * microseconds, 0
        self.obs = np.zeros(8, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self.obs, {}

    def step(self, action: Any) -> Any:
        ends = time.thread_time_ns() + self.nanoseconds
        self.t += 1
        while time.thread_time_ns() < ends:
            pass
        return self.obs, 1.0, False, self.t == 100, {}


class Rows:
    """Some environments with a policy's memory of their own, stepped in two parts."""

    def __init__(self, env: Any, policy: hf.RecurrentPolicy) -> None:
        self.env, self.policy, self.memory = env, policy, hf.Memory(policy.core)
        self.adapter = VectorEnvAdapter(env)
        self.adapter.start(0)

    def act(self) -> Any:
        adapter = self.adapter
        step = self.policy.act(adapter.obs, adapter.resets, memory=self.memory, action_mask=adapter.action_mask)
        return adapter.to_env(step.action)

    def send(self) -> None:
        self.env.step_async(self.act())

    def receive(self) -> None:
        obs, _, terminated, truncated, _ = self.env.step_wait()
        self.adapter.obs = torch.from_numpy(obs)
        self.adapter.resets = torch.from_numpy(terminated | truncated)

    def step(self) -> None:
        if hasattr(self.env, "step_async"):
            self.send()
            self.receive()
        else:
            obs, _, terminated, truncated, _ = self.env.step(self.act())
            self.adapter.obs, self.adapter.resets = torch.from_numpy(obs), torch.from_numpy(terminated | truncated)


def lockstep(rows: Rows, steps: int) -> None:
    for _ in range(steps):
        rows.step()


def double_buffered(halves: list[Rows], steps: int) -> None:
    for half in halves:
        half.send()
    for _ in range(steps - 1):
        for half in halves:
            half.receive()
            half.send()
    for half in halves:
        half.receive()


def contenders(microseconds: float, num_envs: int, policy: Any) -> dict[str, tuple[Callable[[int], None], list[Any]]]:
    """What plays so many steps, and the vector environments it plays in."""
    makers, mode = [partial(Burning, microseconds)] * num_envs, AutoresetMode.SAME_STEP
    half = num_envs // 2
    per_half = max(1, default_workers(num_envs) // 2)
    envs = {
        "sync": [SyncVectorEnv(makers, autoreset_mode=mode)],
        "async": [AsyncVectorEnv(makers, autoreset_mode=mode)],
        "workers": [WorkersVectorEnv(makers, autoreset_mode=mode)],
        "halves": [WorkersVectorEnv(part, per_half, mode) for part in (makers[:half], makers[half:])],
    }
    rows = {name: [Rows(env, policy) for env in each] for name, each in envs.items()}
    play: dict[str, Callable[[int], None]] = {name: partial(lockstep, each[0]) for name, each in rows.items()}
    play["halves"] = partial(double_buffered, rows["halves"])
    return {name: (play[name], envs[name]) for name in envs}


def cpu_seconds(envs: list[Any]) -> float:
    """Of this process and those of the environments."""
    total = time.process_time()
    for process in (process for env in envs for process in getattr(env, "processes", [])):
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / TICKS
    return total


def measure(microseconds: float, num_envs: int, turns: int, seconds: float) -> dict[str, Any]:
    torch.manual_seed(0)
    space = Burning.observation_space, Burning.action_space
    policy = hf.ActorCritic(*space, core="lstm", hidden_size=64)
    steps = max(8, int(seconds / (num_envs * microseconds * 1e-6)))
    found = contenders(microseconds, num_envs, policy)
    speeds: dict[str, list[float]] = {name: [] for name in found}
    extra: dict[str, list[float]] = {name: [] for name in found}
    try:
        for play, _ in found.values():
            play(4)
        for _ in range(turns):
            for name, (play, envs) in found.items():
                began, cpu_began = time.perf_counter(), cpu_seconds(envs)
                play(steps)
                speeds[name].append(num_envs * steps / (time.perf_counter() - began))
                used = (cpu_seconds(envs) - cpu_began) / (num_envs * steps)
                extra[name].append(1e6 * used - microseconds)
    finally:
        for _, envs in found.values():
            for env in envs:
                env.close()
    return {
        "microseconds_per_step": microseconds,
        "num_envs": num_envs,
        "steps_per_second": {name: statistics.median(numbers) for name, numbers in speeds.items()},
        "times_sync": {
            name: statistics.median(a / b for a, b in zip(numbers, speeds["sync"])) for name, numbers in speeds.items()
        },
        "extra_cpu_microseconds_per_step": {name: statistics.median(numbers) for name, numbers in extra.items()},
        "load": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microseconds", type=float, nargs="+", default=[100, 1000], help="of a step")
    parser.add_argument("--num-envs", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0, help="CPU-seconds that the environments burn in a turn")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cells = []
    for microseconds in options.microseconds:
        for num_envs in options.num_envs:
            cell = measure(microseconds, num_envs, options.turns, options.seconds)
            cells.append(cell)
            print(f"{microseconds:g} us, {num_envs} environments, load {cell['load']:.1f}:")
            for name, speed in cell["steps_per_second"].items():
                extra = cell["extra_cpu_microseconds_per_step"][name]
                print(
                    f"  {name:8} {speed:8,.0f} steps/s, {cell['times_sync'][name]:.2f}x sync, {extra:6.1f} us of CPU more"
                )
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    RESULTS.write_text(json.dumps({"machine": machine, "torch": torch.__version__, "cells": cells}, indent=2) + "\n")


if __name__ == "__main__":
    main()
