"""`evaluate`: the return of a policy over whole episodes, without side effects.

It has its own memory and its own resets, so nothing about recurrence is left to the caller. Random generators, the
policy's memory and its train/eval mode are as before when it returns. It does not train and does not log.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.memory import Memory
from holdfast.policies.base import RecurrentPolicy
from holdfast.rollout.vector_env import VectorEnvAdapter
from holdfast.runs import rng_state

MAX_STEPS_WITHOUT_END = 200_000
"""Steps of every environment without the end of an episode, after which an evaluation gives up."""


@dataclass
class EvalResult:
    """Returns and lengths of whole episodes, those of the first environment first. All means are NaN if none ended."""

    mean_return: float
    std_error: float
    """Of the mean return; NaN for one episode."""
    mean_length: float
    returns: list[float]
    lengths: list[int]

    @classmethod
    def of(cls, returns: list[float], lengths: list[int]) -> EvalResult:
        count = len(returns)
        if not count:
            return cls(math.nan, math.nan, math.nan, [], [])
        deviation = float(np.std(returns, ddof=1)) if count > 1 else math.nan
        return cls(float(np.mean(returns)), deviation / math.sqrt(count), float(np.mean(lengths)), returns, lengths)


def evaluate(
    policy: RecurrentPolicy,
    env: Any,
    episodes: int,
    *,
    deterministic: bool = False,
    seed: int | None = None,
    inputs: tuple[str, ...] = ("obs",),
    record: Callable[[Tensor], None] | None = None,
    max_steps: int | None = None,
) -> EvalResult:
    """Play exactly `episodes` episodes in a gymnasium vector environment, whatever its autoreset mode.

    Every environment has a quota fixed beforehand: taking the first episodes to end would favor short ones.
    `seed` seeds the environment and the sampling of actions. `inputs` as in `TrainConfig`. `record(resets)` is
    called before each step with the flags [B] of the observations about to be acted on. After `max_steps` steps of all
    environments together only the episodes that have ended count.

    >>> import holdfast as hf, holdfast.envs
    >>> env = holdfast.envs.make("holdfast/RepeatPreviousEasy-v0", num_envs=4)
    >>> policy = hf.ActorCritic(env.single_observation_space, env.single_action_space, hidden_size=8)
    >>> evaluate(policy, env, episodes=6, seed=0).lengths
    [51, 51, 51, 51, 51, 51]
    """
    if episodes < 1:
        raise ValueError(f"episodes must be at least 1, got {episodes}")
    device = policy.core.device()
    with _undisturbed(policy, device):
        if seed is not None:
            rng_state.seed(seed, device)
        adapter = VectorEnvAdapter(env, device, inputs)
        memory = Memory(policy.core)
        memory.update_in_place()
        quota = [episodes // adapter.num_envs + (i < episodes % adapter.num_envs) for i in range(adapter.num_envs)]
        returns: list[list[float]] = [[] for _ in quota]
        lengths: list[list[int]] = [[] for _ in quota]
        open_return, open_length = np.zeros(adapter.num_envs), np.zeros(adapter.num_envs, dtype=np.int64)
        missing, waited, played = episodes, 0, 0
        adapter.start(seed)
        memory.reserve(adapter.num_envs)
        while missing and (max_steps is None or played < max_steps):
            if record is not None:
                record(adapter.resets)
            mask = adapter.action_mask
            step = policy.act(adapter.obs, adapter.resets, memory=memory, action_mask=mask, deterministic=deterministic)
            valid = adapter.valid.cpu().numpy()  # False where this step only plays an environment's reset
            out = adapter.step(step.action)
            open_return += out.rewards.cpu().numpy()
            open_length += valid
            played += adapter.num_envs
            ended = np.flatnonzero((out.terminated | out.truncated).cpu().numpy())
            for b in ended:
                if len(returns[b]) < quota[b] and not out.failed:
                    returns[b].append(float(open_return[b]))
                    lengths[b].append(int(open_length[b]))
                    missing -= 1
            open_return[ended], open_length[ended] = 0.0, 0
            waited = 0 if len(ended) else waited + 1
            if waited > MAX_STEPS_WITHOUT_END:
                raise RuntimeError(
                    f"no episode ended in {MAX_STEPS_WITHOUT_END:,} steps of {adapter.num_envs} environments; "
                    "evaluation needs episodes that end: give the environment a time limit"
                )
    return EvalResult.of([r for part in returns for r in part], [n for part in lengths for n in part])


@contextmanager
def _undisturbed(policy: RecurrentPolicy, device: torch.device) -> Iterator[None]:
    """Eval mode inside; random generators and every module's mode as before outside."""
    modes = [(module, module.training) for module in policy.modules()]
    generators = rng_state.capture(device)
    try:
        with torch.no_grad():
            policy.eval()
            yield
    finally:
        for module, training in modes:
            module.training = training
        rng_state.restore(generators, device)
