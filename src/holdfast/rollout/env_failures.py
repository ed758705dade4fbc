"""`RebuildingEnv`: a vector environment that survives its environments raising, hanging or dying.

    env = RebuildingEnv(lambda: gym.make_vec("CartPole-v1", 8, vectorization_mode="async",
                        vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP}), timeout=60)

A failure closes the whole vector environment and rebuilds it. The step in which it happened truncates every open episode,
with reward 0 and the last observation seen as the final one; the next observations are first ones, so memory starts
fresh. Failures are counted and reported with the traceback of the environment's own process.
"""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import signal
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from torch import Tensor

from holdfast.distributed.processes import Terminated
from holdfast.envs.workers import WorkerFailedError, what_happened
from holdfast.rollout.env_arrays import masks_of
from holdfast.rollout.env_contract import broken_rule
from holdfast.rollout.vector_env import autoreset_mode
from holdfast.state import tree_map

REBUILDING = "rebuilding"  # marks a state that holds more than the environment's own
LONGEST_REPORT = 20_000  # characters of a traceback
FAILURES = (Exception, SystemExit)  # an environment that calls exit() must not end the run


class EnvFailedError(RuntimeError):
    """Environments failed more often than allowed."""


class BrokenEnvError(EnvFailedError):
    """An environment does not follow gymnasium's interface. Rebuilding it would not help."""


class RebuildingEnv(VectorWrapper):  # generic in newer gymnasium only
    """Builds its environments with `make`, and again after each of up to `limit` failures.

    timeout: seconds that a step or reset in other processes may take; None: no limit. report: called at every failure
    with its number and the traceback, whose last line says what happened. Environments must reset in the step that ends
    an episode (SAME_STEP).
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
        self._gone = False
        self._seed: int | None = None
        self._obs: Any = None
        self._masks: Callable[[], Any] | None = None
        self._attach()

    def __getattr__(self, name: str) -> Any:
        """Attributes of the wrapped environment. If it can save its state, so can this wrapper, with what it adds."""
        if name.startswith("_") or name == "env" or self._gone:
            raise AttributeError(name)
        theirs = getattr(self.env, name)
        ours = {"state_dict": self._state_dict, "load_state_dict": self._load_state_dict, "regroup": self._regroup}
        return ours.get(name, theirs)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._seed = seed if seed is not None else self._seed
        try:
            self._obs, info = self._wait("reset", seed=seed, options=options)
            return self._obs, self._with_masks(info)
        except Terminated:  # the process is told to end while an environment works
            raise
        except FAILURES as error:
            failure = error
        info = self._rebuild(failure)
        return self._obs, info

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        try:
            obs, rewards, terminated, truncated, info = self._wait("step", actions)
            info = self._with_masks(info)
            self._obs = obs
            return obs, rewards, terminated, truncated, info
        except Terminated:  # the process is told to end while an environment works
            raise
        except FAILURES as error:
            failure = error  # handled outside: new processes would inherit it as the context of their own errors
        last, count = self._obs, self.num_envs
        info = self._rebuild(failure)
        ends = {"final_obs": last, "_final_obs": np.ones(count, bool), "env_failure": True}
        return self._obs, np.zeros(count), np.zeros(count, bool), np.ones(count, bool), {**info, **ends}

    # --- saving ------------------------------------------------------------------------------------------------------

    def _state_dict(self) -> dict[str, Any]:
        """What is needed to continue exactly, also through the next failure."""
        return {
            REBUILDING: True,
            "env": self.env.state_dict(),  # type: ignore[attr-defined]
            "seed": self._seed,
            "failures": self.failures,
            "obs": tree_map(lambda o: o.cpu() if isinstance(o, Tensor) else np.copy(o), self._obs),
        }

    def _load_state_dict(self, d: Mapping[str, Any]) -> None:
        """Continue from a `state_dict()`, or from that of the environment alone, which 0.1 saved."""
        ours = REBUILDING in d
        self.env.load_state_dict(d["env"] if ours else d)  # type: ignore[attr-defined]
        if ours:
            self._seed, self.failures, self._obs = d["seed"], d["failures"], d["obs"]

    def _regroup(self, saved: Sequence[Mapping[str, Any]], first: int, part: int, seed: int) -> dict[str, Any]:
        """As the environment's own `regroup`. Rebuilds are counted and seeded as in `saved[part]`, or from `seed`."""
        mine = saved[part] if part < len(saved) else {"seed": seed, "failures": 0}
        rows = slice(first, first + self.num_envs)
        return {
            REBUILDING: True,
            "env": self.env.regroup([one["env"] for one in saved], first, part, seed),  # type: ignore[attr-defined]
            "seed": mine["seed"],
            "failures": mine["failures"],
            "obs": tree_map(lambda *parts: torch.cat(parts)[rows], *(one["obs"] for one in saved)),
        }

    # --- inside ------------------------------------------------------------------------------------------------------

    def _wait(self, call: str, *args: Any, **options: Any) -> Any:
        if self._timeout is None or not hasattr(self.env, f"{call}_async"):
            return getattr(self.env, call)(*args, **options)
        getattr(self.env, f"{call}_async")(*args, **options)
        return getattr(self.env, f"{call}_wait")(timeout=self._timeout)

    def _with_masks(self, info: dict[str, Any]) -> dict[str, Any]:
        """Asked for here, where an `action_masks()` that fails counts as a failure of its environment."""
        if self._masks is None or "action_mask" in info:
            return info
        return {**info, "action_mask": self._masks()}

    def _rebuild(self, error: BaseException) -> dict[str, Any]:
        """Close the environment, build and reset it; `_obs` are first observations then. Returns the reset's info."""
        while True:
            self.failures += 1
            text = self._describe(error)
            rule = broken_rule(text, self.env)
            if rule is not None:
                self.failures = self._limit + 1  # it would fail again
            _tear_down(self.env)
            if self.report is not None:
                self.report(self.failures, text)
            if self.failures > self._limit:
                self._gone = True
                if rule is not None:
                    raise BrokenEnvError(f"the environment does not follow gymnasium's interface: {rule}") from error
                times = f"failed {self.failures} times, {self._limit} allowed" if self._limit else "failed"
                raise EnvFailedError(f"the environments {times}: {what_happened(text)}") from error
            try:
                self.env = self._make()
                self._attach()
                seed = None if self._seed is None else self._seed + 7_919 * self.failures  # other episodes than before
                self._obs, info = self._wait("reset", seed=seed)
                return self._with_masks(info)
            except Terminated:
                raise
            except FAILURES as another:
                error = another

    def _attach(self) -> None:
        """Prepare an environment that was just built."""
        if hasattr(self.env.unwrapped, "error_queue"):
            self.env.unwrapped.error_queue = _Recorder(self.env.unwrapped.error_queue)
        self._masks = masks_of(self.env, self._timeout)

    def _describe(self, error: BaseException) -> str:
        """A traceback, and in its last line what happened."""
        if isinstance(error, WorkerFailedError):
            return error.report[-LONGEST_REPORT:]
        recorder = getattr(self.env.unwrapped, "error_queue", None)
        if isinstance(recorder, _Recorder) and (text := recorder.read()):
            return text[-LONGEST_REPORT:]
        if isinstance(error, multiprocessing.TimeoutError):
            return f"an environment did not answer within {self._timeout:g} seconds"
        workers = getattr(self.env.unwrapped, "processes", ())
        ending = multiprocessing.connection.wait([p.sentinel for p in workers], timeout=1.0) if workers else []
        ends = []
        for number, process in enumerate(workers):
            if process.sentinel in ending:
                process.join(timeout=1.0)  # its files are closed, but it may not have an exit code yet
                ends.append(f"the process of environment {number} {_how_it_ended(process.exitcode)}")
        if ends:
            return ", ".join(ends)
        return "".join(traceback.format_exception(error))[-LONGEST_REPORT:]


def _how_it_ended(code: int | None) -> str:
    if code is None or code >= 0:
        return f"ended by itself (exit code {code})"
    try:
        return f"was killed by {signal.Signals(-code).name} (exit code {code})"
    except ValueError:  # a signal this system has no name for
        return f"was killed (exit code {code})"


class _Recorder:
    """A queue of errors from the workers of gymnasium's AsyncVectorEnv that keeps the last traceback.

    gymnasium also warns about them, in the middle of the display: warnings are silenced until the report.
    """

    def __init__(self, queue: Any) -> None:
        self._queue, self.traceback = queue, ""
        self._silence: warnings.catch_warnings[None] | None = None

    def get(self, *args: Any, **options: Any) -> Any:
        item = self._queue.get(*args, **options)
        self.traceback = str(item[-1])
        if self._silence is None:
            self._silence = warnings.catch_warnings()
            self._silence.__enter__()
            warnings.simplefilter("ignore")
        return item

    def read(self) -> str:
        """The last traceback; "" if there was none."""
        if self._silence is not None:
            self._silence.__exit__(None, None, None)
            self._silence = None
        return self.traceback

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)


def _tear_down(env: VectorEnv[Any, Any, Any]) -> None:
    """Close an environment in any state. One that hangs does not answer a request to close."""
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
