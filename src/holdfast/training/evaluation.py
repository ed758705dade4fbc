"""`evaluate`: the return of a policy over whole episodes, without side effects.

It has its own memory and its own resets, so nothing about recurrence is left to the caller. Random generators, the
policy's memory and its train/eval mode are as before when it returns. It does not train and does not log.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.cores.base import reset_mode_of
from holdfast.envs.base import TorchVectorEnv
from holdfast.memory import Memory
from holdfast.policies.base import RecurrentPolicy
from holdfast.rollout.collector import Acting
from holdfast.rollout.vector_env import EnvStep, VectorEnvAdapter
from holdfast.runs import rng_state, space_data
from holdfast.state import tree_map
from holdfast.training.eval_record import StepRecord

MAX_STEPS_WITHOUT_END = 200_000
"""Steps of every environment without the end of an episode, after which an evaluation gives up."""


def steps_per_read(env: Any, device: torch.device) -> int:
    """How many steps are played before their rewards and ends are read. A read waits for the GPU, and where several processes
    share it, for theirs; a few steps more than needed cost less."""
    return 32 if isinstance(env, TorchVectorEnv) and device.type == "cuda" else 1


@dataclass
class EvalResult:
    """Returns and lengths of whole episodes, those of the first environment first. All means are NaN if none ended."""

    mean_return: float
    std_error: float
    """Of the mean return; NaN for one episode."""
    mean_length: float
    returns: list[float]
    lengths: list[int]
    record: dict[str, np.ndarray] | None = None
    """What `evaluate` was asked to record, each [T, B, ...]."""
    returns_in_trial: list[float] | None = None
    """Of `envs.Trials`: the mean return of the first, second, ... episode of a trial; `returns` are then those of trials."""

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
    record: Sequence[str] | Callable[[Tensor], None] | None = None,
    max_steps: int | None = None,
    acting: type[Acting] | None = None,
) -> EvalResult:
    """Play exactly `episodes` episodes in a gymnasium vector environment, whatever its autoreset mode.

    Every environment has a quota fixed beforehand: taking the first episodes to end would favor short ones.
    `seed` seeds the environment and the sampling of actions. `inputs` as in `TrainConfig`. record: what to
    keep of every step, out of obs, state (after the step), value, action and dist (its parameters), in `result.record` as arrays
    [T, B, ...], with reward, resets, terminated, truncated, valid, and `counted`: steps of the episodes in the result. Or a
    function, called before each step with the flags [B] of the observations about to be acted on. After `max_steps` steps of all
    environments together only the episodes that have ended count. acting: a faster engine for sampled actions; not with `record`.

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
        adapter = VectorEnvAdapter(env, device, inputs, reset_mode_of(policy.core) == "never")
        for name in ("observation_space", "action_space"):  # a policy of your own need not have them
            space_data.require_fit(getattr(policy, name, None), getattr(adapter, name), name)
        memory = Memory(policy.core)
        if acting is None:
            memory.update_in_place()
        engine = None if acting is None else acting(policy, memory)
        played = _Episodes(episodes, adapter.num_envs)
        most_steps = math.inf if max_steps is None else -(-max_steps // adapter.num_envs)
        hook, kept = (record, None) if record is None or callable(record) else (None, StepRecord(record))
        at_once = steps_per_read(env, device) if record is None else 1
        adapter.takes_every_final_obs = at_once > 1  # else the flags are read to see whether there is one
        adapter.start(seed)
        memory.reserve(adapter.num_envs)
        if engine is not None:
            engine.begin(adapter, 1)
        while played.missing and played.steps < most_steps:
            steps = []
            for _ in range(int(min(at_once, most_steps - played.steps))):
                if hook is not None:
                    hook(adapter.resets)
                obs, resets, mask, valid = adapter.obs, adapter.resets, adapter.action_mask, adapter.valid
                if kept is not None:
                    obs, resets, valid = tree_map(
                        torch.clone, (obs, resets, valid)
                    )  # an environment may write into its own
                step: Any
                dist = None
                if engine is not None:
                    step = engine.act(obs, resets, mask, None)
                elif kept is not None and "dist" in kept.names:
                    step, dist = policy.act_and_decode(obs, resets, None, memory, mask, None, deterministic)
                else:
                    step = policy.act(obs, resets, memory=memory, action_mask=mask, deterministic=deterministic)
                out = adapter.step(step.action)
                steps.append((valid, out))
                if kept is not None:
                    kept.add(
                        obs=obs, state=memory.read(), value=step.value, action=step.action, dist=dist, reward=out.rewards,
                        resets=resets, valid=valid, terminated=out.terminated, truncated=out.truncated,
                    )  # fmt: skip
            played.add(steps)
    result = played.result()
    if kept is not None:
        result.record = kept.arrays(played.counted())
    return result


class _Episodes:
    """Counts the episodes of an evaluation. Every environment has a quota."""

    def __init__(self, episodes: int, num_envs: int) -> None:
        self.missing, self.steps = episodes, 0
        self._quota = [episodes // num_envs + (i < episodes % num_envs) for i in range(num_envs)]
        self._returns: list[list[float]] = [[] for _ in self._quota]
        self._lengths: list[list[int]] = [[] for _ in self._quota]
        self._open_return, self._open_length = np.zeros(num_envs), np.zeros(num_envs, dtype=np.int64)
        self._waited = 0
        self._trials: list[Any] = []
        self._began = np.zeros(num_envs, dtype=np.int64)  # the step with which the present episode began
        self._counted: list[tuple[int, int, int]] = []  # environment, first and last step

    def add(self, steps: list[tuple[Tensor, EnvStep]]) -> None:
        """Steps of all environments, each with `valid`: False where a step only plays an environment's reset."""
        rows = [(out.rewards, valid, out.terminated | out.truncated) for valid, out in steps]
        on_host = [torch.stack(part).cpu().numpy() for part in zip(*rows)]
        for (_, out), rewards, valid, ends in zip(steps, *on_host):
            self._add(rewards, valid, np.flatnonzero(ends), out)

    def _add(self, rewards: Any, valid: Any, ended: Any, out: EnvStep) -> None:
        self.steps += 1
        self._open_return += rewards
        self._open_length += valid
        for b in ended:
            if len(self._returns[b]) < self._quota[b] and not out.failed:
                self._returns[b].append(float(self._open_return[b]))
                self._lengths[b].append(int(self._open_length[b]))
                if out.trial_returns is not None:
                    self._trials.append(out.trial_returns[b])
                self._counted.append((b, self._began[b], self.steps))
                self.missing -= 1
        self._open_return[ended], self._open_length[ended], self._began[ended] = 0.0, 0, self.steps
        self._waited = 0 if len(ended) else self._waited + 1
        if self._waited > MAX_STEPS_WITHOUT_END:
            raise RuntimeError(
                f"no episode ended in {MAX_STEPS_WITHOUT_END:,} steps of {len(self._quota)} environments; "
                "evaluation needs episodes that end: give the environment a time limit"
            )

    def counted(self) -> Any:
        """[T, B]: the steps of the episodes in the result, those that only played a reset included."""
        flags = np.zeros((self.steps, len(self._quota)), dtype=bool)
        for b, first, last in self._counted:
            flags[first:last, b] = True
        return flags

    def result(self) -> EvalResult:
        """Of the first environment first."""
        result = EvalResult.of([r for part in self._returns for r in part], [n for part in self._lengths for n in part])
        result.returns_in_trial = np.mean(self._trials, 0).tolist() if self._trials else None
        return result


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
