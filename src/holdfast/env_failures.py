"""`RebuildingEnv`: a vector environment that survives its environments raising, hanging or dying.

    env = RebuildingEnv(lambda: gym.make_vec("CartPole-v1", 8, vectorization_mode="async",
                        vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP}), timeout=60)

A failure closes the whole vector environment and builds it anew. The step in which it happened ends every open episode
as truncated, with reward 0 and the last observation seen as its final one; the next observations are first ones, so
memory starts fresh. Failures are counted, and reported with the traceback of the environment's own process.
"""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper

from holdfast import envs
from holdfast.config import TrainConfig
from holdfast.env_feed import autoreset_mode
from holdfast.envs.base import TorchVectorEnv

LONGEST_REPORT = 20_000  # characters of a traceback


class EnvFailedError(RuntimeError):
    """Environments failed, and no more often were they to be built anew."""


class RebuildingEnv(VectorWrapper):  # generic in newer gymnasium only
    """Builds its environments with `make`, and again after each of up to `limit` failures.

    timeout: seconds that a step or reset of an `AsyncVectorEnv` may take; None: any time. report: called with the
    number of failures and the traceback. Environments must reset in the step that ends an episode (SAME_STEP).
    """

    def __init__(
        self,
        make: Callable[[], VectorEnv[Any, Any, Any]],
        *,
        limit: int = 10,
        timeout: float | None = None,
        report: Callable[[int, str], None] | None = None,
        first: VectorEnv[Any, Any, Any] | None = None,
    ) -> None:
        super().__init__(make() if first is None else first)
        if autoreset_mode(self.env) != AutoresetMode.SAME_STEP:
            raise ValueError(
                f"RebuildingEnv needs SAME_STEP autoreset, {type(self.env).__name__} declares "
                f"{autoreset_mode(self.env).name}; make it with autoreset_mode=AutoresetMode.SAME_STEP"
            )
        self._make, self._limit, self._timeout, self.report = make, limit, timeout, report
        self.failures = 0
        self._seed: int | None = None
        self._obs: Any = None
        self._watch_workers()

    def __getattr__(self, name: str) -> Any:  # what only the environment inside has: action_masks, state_dict
        if name.startswith("_") or name == "env":
            raise AttributeError(name)
        return getattr(self.env, name)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._seed = seed if seed is not None else self._seed
        try:
            self._obs, info = self._wait("reset", seed=seed, options=options)
        except Exception as error:
            info = self._build_anew(error)
        return self._obs, info

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        try:
            obs, *rest = self._wait("step", actions)
        except Exception as error:
            last, count = self._obs, self.num_envs
            info = self._build_anew(error)
            ends = {"final_obs": last, "_final_obs": np.ones(count, bool), "env_failure": True}
            return self._obs, np.zeros(count), np.zeros(count, bool), np.ones(count, bool), {**info, **ends}
        self._obs = obs
        return (obs, *rest)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _wait(self, call: str, *args: Any, **options: Any) -> Any:
        if self._timeout is None or not hasattr(self.env, f"{call}_async"):
            return getattr(self.env, call)(*args, **options)
        getattr(self.env, f"{call}_async")(*args, **options)
        return getattr(self.env, f"{call}_wait")(timeout=self._timeout)

    def _build_anew(self, error: Exception) -> dict[str, Any]:
        """Close what is left, build and reset; `_obs` are then first observations. The info of the reset."""
        while True:
            self.failures += 1
            text = self._describe(error)
            _tear_down(self.env)
            if self.failures > self._limit:
                times = f"{self.failures} times, {self._limit} allowed" if self._limit else "once, none allowed"
                raise EnvFailedError(f"the environments failed ({times}). The last failure:\n{text}") from error
            if self.report is not None:
                self.report(self.failures, text)
            try:
                self.env = self._make()
                self._watch_workers()
                seed = None if self._seed is None else self._seed + 7_919 * self.failures  # other episodes than before
                self._obs, info = self._wait("reset", seed=seed)
                return info
            except Exception as another:
                error = another

    def _watch_workers(self) -> None:
        if hasattr(self.env.unwrapped, "error_queue"):
            self.env.unwrapped.error_queue = _Recorder(self.env.unwrapped.error_queue)

    def _describe(self, error: Exception) -> str:
        recorder = getattr(self.env.unwrapped, "error_queue", None)
        if isinstance(recorder, _Recorder) and recorder.traceback:
            return recorder.traceback[-LONGEST_REPORT:]
        if isinstance(error, multiprocessing.TimeoutError):
            return f"an environment did not answer within {self._timeout} seconds"
        workers = getattr(self.env.unwrapped, "processes", ())
        sentinels = [process.sentinel for process in workers]
        ending = multiprocessing.connection.wait(sentinels, timeout=1.0) if workers else []
        dead = [process for process in workers if process.sentinel in ending]
        for process in dead:  # its files are closed, but it may not be quite gone, and have no exit code, yet
            process.join(timeout=1.0)
        codes = ", ".join(f"{p.name} with exit code {p.exitcode}" for p in dead)
        trace = "".join(traceback.format_exception(error))
        return ((f"processes of environments ended: {codes}\n" if dead else "") + trace)[-LONGEST_REPORT:]


class _Recorder:
    """A queue of errors from the workers of gymnasium's AsyncVectorEnv, whose tracebacks it remembers."""

    def __init__(self, queue: Any) -> None:
        self._queue, self.traceback = queue, ""

    def get(self, *args: Any, **options: Any) -> Any:
        item = self._queue.get(*args, **options)
        self.traceback = str(item[-1])
        return item

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)


def _tear_down(env: VectorEnv[Any, Any, Any]) -> None:
    """Close an environment in any state: one that hangs would not answer a request to close."""
    processes = getattr(env.unwrapped, "processes", None)
    if processes is None:
        with contextlib.suppress(Exception):
            env.close()
        return
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
    for pipe in env.unwrapped.parent_pipes:  # type: ignore[attr-defined]
        if pipe is not None:
            pipe.close()
    env.unwrapped.closed = True


# --- a training run's ------------------------------------------------------------------------------------------------


class FailureLog:
    """Counts a run's failures, says each in a line, and appends the tracebacks to a file in the run's folder."""

    def __init__(self, config: TrainConfig, rank: int, say: Callable[[str], None]) -> None:
        self.config, self.say, self.count = config, say, 0
        self.file = config.folder / f"env_failures-rank{rank}.txt"

    def __call__(self, number: int, text: str) -> None:
        self.count += 1
        with contextlib.suppress(OSError), open(self.file, "a") as log:
            log.write(f"--- failure {self.count}\n{text}\n")
        last = text.strip().splitlines()[-1] if text.strip() else "no reason given"
        self.say(
            f"an environment failed ({last}). All {self.config.num_envs} were built anew, open episodes truncated; "
            f"failure {number} of at most {self.config.max_env_failures}, traceback in {self.file}"
        )


def training_env(config: TrainConfig, num_envs: int, device: torch.device, report: FailureLog) -> Any:
    """The environments a config describes; those that can fail survive it as the config says."""

    def make() -> Any:
        return envs.make(
            config.env,
            num_envs,
            device=device,
            vectorization=config.vectorization,
            mask_velocity=config.mask_velocity,
            env_kwargs=config.env_kwargs,
        )

    env = make()
    if isinstance(env, TorchVectorEnv) or autoreset_mode(env) != AutoresetMode.SAME_STEP:
        return env
    limit = config.max_env_failures if config.env_failure == "rebuild" else 0
    return RebuildingEnv(make, limit=limit, timeout=config.env_timeout, report=report, first=env)
