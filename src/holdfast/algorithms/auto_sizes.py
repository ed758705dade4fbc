"""Settings that follow from the task: sizes of rollouts and minibatches, passes over the data, threads, inputs of the policy.

A setting that the user gave is kept. The rest follows from how many steps the run has and what a step costs:

- A run is about a hundred rollouts, or two hundred on a GPU, whose rollouts are larger. Short runs get small rollouts and still
  a hundred chances to improve.
- Segments are 128 steps long: gradients reach that far back.
- An environment that runs in Python is slow compared with training, so each of its steps is used more often, and a rollout is cut into
  fewer minibatches: with 10 passes over 32 of one sequence each, a solved task was unlearned again by noise.
- With several Box actions there is no entropy bonus, which only widens a Gaussian, and the noise is white: a body that is pushed about
  in all its joints falls. With one action, correlated noise gets a body up a hill.
- Other minibatches are small, down to one sequence: steps of the optimizer are what a short run lacks. On a GPU, rollouts of
  thousands of environments are cut into a few large ones that fill it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from typing import Any, TypeVar

import torch
from gymnasium import spaces

from holdfast.algorithms.base import Task
from holdfast.config import OnPolicyConfig, RunConfig, settings_of

Config = TypeVar("Config", bound=RunConfig)

SIZES = ("num_envs", "num_steps", "epochs", "minibatches")
ROLLOUTS_ON_CPU, ROLLOUTS_ON_GPU = 100, 200  # in a run, about
SMALLEST_ROLLOUT, LARGEST_ON_CPU, LARGEST_ON_GPU = 1024, 8192, 2**20  # steps of all environments together
SEGMENT, SHORTEST, LONGEST = 128, 64, 256  # steps
MANY_MINIBATCHES, FEW_MINIBATCHES = 32, 8  # at most
FILLS_A_GPU = 2**18  # steps of a rollout from which on it is cut into few minibatches there
PASSES_FAST, PASSES_SLOW = 4, 10


def choose_sizes(config: OnPolicyConfig, task: Task) -> tuple[OnPolicyConfig, str]:
    """The config with all sizes filled in, and which of them were chosen and why ("" if the user gave them all)."""
    chosen = [name for name in SIZES if not getattr(config, name)]
    if not chosen:
        return config, ""
    num_envs = config.num_envs or task.num_envs or 0
    num_steps = config.num_steps
    rollout = _rollout_size(config.total_steps, task.on_gpu)
    if not num_steps:
        num_steps = min(LONGEST, max(SHORTEST, rollout // num_envs)) if num_envs else SEGMENT
        if config.bptt:
            num_steps = config.bptt * max(1, num_steps // config.bptt)
    if not num_envs:
        num_envs = max(1, rollout // num_steps, task.ranks)
        num_envs = -(-num_envs // task.ranks) * task.ranks
    epochs = config.epochs or (PASSES_FAST if task.fast_env else PASSES_SLOW)
    sequences = num_envs // task.ranks * (num_steps // (config.bptt or num_steps))
    few = not task.fast_env or (task.on_gpu and num_envs * num_steps >= FILLS_A_GPU)
    minibatches = config.minibatches or _largest_divisor(sequences, FEW_MINIBATCHES if few else MANY_MINIBATCHES)
    filled = dataclasses.replace(config, num_envs=num_envs, num_steps=num_steps, epochs=epochs, minibatches=minibatches)
    kind = "" if task.fast_env else " in an environment that runs in Python"
    which = "" if len(chosen) == len(SIZES) else f"{', '.join(chosen)} "
    return filled, f"{which}chosen for {config.total_steps:,} steps{kind}"


def choose_for_actions(config: Config, action_space: Any) -> tuple[Config, str]:
    """The config with settings filled in that follow from the actions, and a line about them ("" unless they are several of a Box)."""
    several = isinstance(action_space, spaces.Box) and math.prod(action_space.shape) > 1
    declared = settings_of(type(config)).items()
    chosen = {name: one.chosen[several] for name, one in declared if one.chosen and getattr(config, name) is None}
    if not chosen:
        return config, ""
    text = ", ".join(f"{name} {value:g}" for name, value in chosen.items())
    return dataclasses.replace(config, **chosen), f"{text} (chosen for several Box actions)" if several else ""


def choose_inputs(config: RunConfig, env: Any, own_policy: bool, usual: Collection[str]) -> RunConfig:
    """The config with `inputs` filled in: those that are `usual`, and what the environment's metadata names in "inputs".

    The control without memory sees the observation alone, because a previous action is a memory too. So does a policy of the
    user's own, which may be made for it.
    """
    if config.inputs:
        return config
    alone = own_policy or config.core == "none"
    wanted = {"obs"} if alone else {"obs", *usual, *(env.metadata or {}).get("inputs", ())}
    return dataclasses.replace(config, inputs=tuple(x for x in ("obs", "prev_action", "prev_reward") if x in wanted))


def threads_for(config: OnPolicyConfig, num_envs: int) -> int:
    """One thread for small networks and minibatches, where handing work around costs more than it saves."""
    steps = num_envs * config.num_steps // config.minibatches
    work = steps * config.hidden_size**2  # multiplications of a recurrent product per minibatch, up to a constant
    return 1 if work < 2**28 else torch.get_num_threads()


def _rollout_size(total_steps: int, on_gpu: bool) -> int:
    """A power of two near a hundredth of the run, or near half of that on a GPU."""
    wanted = max(SMALLEST_ROLLOUT, total_steps // (ROLLOUTS_ON_GPU if on_gpu else ROLLOUTS_ON_CPU))
    return int(min(2 ** (wanted.bit_length() - 1), LARGEST_ON_GPU if on_gpu else LARGEST_ON_CPU))


def _largest_divisor(number: int, at_most: int) -> int:
    return max(d for d in range(1, at_most + 1) if number % d == 0)
