"""EnvPool's environments: `envpool:Pong-v5`, in lockstep or in asynchronous batches.

EnvPool steps its environments in C++ threads. It resets an environment in the step after its episode's end (NEXT_STEP).
In asynchronous mode `send` gives actions to some environments and `recv` returns those that were ready first, with their
ids; `rollout/async_collector.py` uses it. `reset` and `step` work in both modes, for all environments at once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from holdfast.state import tree_map

PREFIX = "envpool:"
MOST_THREADS = 1024
SEEDED = "`--seed` or reset(seed=...) seeds all environments"
GIVEN_OTHERWISE = {"seed": SEEDED, "env_seed": SEEDED, "gym_reset_return_info": "reset always returns one"}


def named(env_id: str) -> Callable[..., Any]:
    """What makes the environments of `envpool:Name`."""
    try:
        import envpool
    except ImportError as missing:
        raise ModuleNotFoundError(f"{env_id!r} needs EnvPool: pip install envpool") from missing
    task = env_id.removeprefix(PREFIX)
    if task not in envpool.list_all_envs():
        from difflib import get_close_matches

        likely = get_close_matches(task, envpool.list_all_envs(), 1)
        hint = f"; did you mean {PREFIX}{likely[0]}?" if likely else ""
        raise ValueError(f"EnvPool has no environment {task!r}{hint}")
    return partial(EnvPoolVectorEnv, task)


def default_batch(num_envs: int) -> int:
    """The largest batch that divides the environments into at least two parts; all of them where there is none."""
    return next((size for size in range(num_envs // 2, 0, -1) if num_envs % size == 0), num_envs)


class EnvPoolVectorEnv(VectorEnv[Any, Any, Any]):
    """`num_envs` copies of an EnvPool task. With `batch_size` below that, `send` and `recv` work in batches.

    EnvPool takes a seed only when a pool is made, so `reset(seed=...)` makes a new one. `options` are EnvPool's.
    """

    # gymnasium closes an environment that is deleted, also one whose constructor refused its arguments.
    _pool: Any = None

    def __init__(self, task: str, num_envs: int, batch_size: int | None = None, **options: Any) -> None:
        if batch_size is not None and (not isinstance(batch_size, int) or batch_size < 1 or num_envs % batch_size):
            raise ValueError(f"batch_size={batch_size!r} must divide the {num_envs} environments")
        threads = options.get("num_threads", 0)
        if not isinstance(threads, int) or not 0 <= threads <= MOST_THREADS:  # EnvPool aborts the process
            raise ValueError(
                f"num_threads={threads!r} must be between 0, which lets EnvPool choose, and {MOST_THREADS}"
            )
        _require_known(task, options)
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.num_envs, self.batch_size = num_envs, batch_size or num_envs
        self._task, self._options = task, options
        self._pool = self._make(None)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*precision lowered by casting")  # EnvPool gives bounds of float64
            spaces = self._pool.observation_space, self._pool.action_space
        self.single_observation_space, self.single_action_space = spaces
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    @property
    def is_asynchronous(self) -> bool:
        return self.batch_size < self.num_envs

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self._pool.close()
            self._pool = self._make(seed)
        if not self.is_asynchronous:
            obs, info = self._pool.reset()
            return _rows(obs, info["env_id"]), {}
        self._pool.async_reset()
        obs, *_ = self._receive_all()
        return obs, {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        self.send(actions, np.arange(self.num_envs))
        return (*self._receive_all(), {})

    def send(self, actions: Any, env_ids: Any) -> None:
        """Give actions to the environments `env_ids`."""
        self._pool.send(np.asarray(actions).astype(self.single_action_space.dtype), np.asarray(env_ids, np.int32))

    def recv(self) -> tuple[Any, Any, Any, Any, Any]:
        """The `batch_size` environments that are ready first: observations, rewards, terminated, truncated, ids."""
        obs, rewards, terminated, truncated, info = self._pool.recv()
        return obs, rewards, terminated, truncated, np.asarray(info["env_id"], np.int64)

    def close_extras(self, **options: Any) -> None:
        if self._pool is not None:
            self._pool.close()

    def _make(self, seed: int | None) -> Any:
        import envpool

        seeds = {} if seed is None else {"seed": int(seed) % 2**31}
        return envpool.make(
            self._task,
            env_type="gymnasium",
            num_envs=self.num_envs,
            batch_size=self.batch_size,
            **seeds,
            **self._options,
        )

    def _receive_all(self) -> tuple[Any, Any, Any, Any]:
        """A result of every environment, in their order."""
        parts = [self.recv() for _ in range(self.num_envs // self.batch_size)]
        together = tree_map(lambda *arrays: np.concatenate(arrays), *parts)
        obs, rewards, terminated, truncated = _rows(together[:4], together[4])
        return obs, rewards, terminated, truncated


def _require_known(task: str, options: dict[str, Any]) -> None:
    """Raise ValueError for an option that EnvPool does not have for this task, or that is given in another way."""
    import envpool

    known = [name for name in envpool.make_spec(task).config._fields if name not in GIVEN_OTHERWISE]
    for name in options:
        if name in GIVEN_OTHERWISE:
            raise ValueError(f"{name} is not an option here; {GIVEN_OTHERWISE[name]}")
        if name not in known:
            raise ValueError(f"{PREFIX}{task} has no option {name!r}; it has {', '.join(known)}")


def _rows(tree: Any, env_ids: Any) -> Any:
    """Arrays in the order of the ids."""
    order = np.argsort(env_ids)
    return tree_map(lambda array: np.asarray(array)[order], tree)
