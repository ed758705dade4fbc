"""`WorkersVectorEnv`: gymnasium environments in a few processes, several in each, observations through shared memory.

Each worker steps its environments one after another, as gymnasium's `SyncVectorEnv` does, because it holds one: resets,
final observations, infos and seeds are those of a single `SyncVectorEnv` over all environments. One message per worker and
step, where gymnasium's `AsyncVectorEnv` exchanges one per environment, is what makes it pay for short steps.
"""

from __future__ import annotations

import gc
import mmap
import multiprocessing
import os
import signal
import tempfile
import textwrap
import threading
import time
import traceback
import weakref
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from multiprocessing.util import Finalize
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import CloudpickleWrapper, batch_space, create_empty_array

from holdfast.state import leaves, tree_map

_SECONDS_TO_CLOSE = 5.0
_starting = threading.Lock()
_all_parent_pipes: weakref.WeakSet[Any] = weakref.WeakSet()  # of all vector environments of this process
_ALIGNMENT = 64  # of arrays in the shared memory: no cache line is written by two workers' arrays


class WorkerFailedError(RuntimeError):
    """An environment raised, or its process is gone. `report` is the traceback of the process, or what became of it."""

    def __init__(self, report: str) -> None:
        super().__init__(what_happened(report))
        self.report = report


def what_happened(report: str) -> str:
    """A report in one line: the last line, or all of the message if a traceback ends in one of several lines.

    >>> what_happened('  File "env.py", line 2, in step\\n    fall()\\nRuntimeError: no floor\\nat x = 3')
    'RuntimeError: no floor at x = 3'
    """
    lines = report.rstrip().splitlines() or ["no reason given"]
    frames = [number for number, line in enumerate(lines) if line.startswith('  File "')]
    message = lines[frames[-1] + 1 :] if frames else lines[-1:]
    while len(message) > 1 and message[0].startswith("    "):  # the code of the last frame
        del message[0]
    return textwrap.shorten(" ".join(message), 500, placeholder=" ...")


def default_workers(num_envs: int) -> int:
    """One per core that this process may use, shared with the other ranks of this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(num_envs, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))


class WorkersVectorEnv(VectorEnv[Any, Any, Any]):
    """The environments that `env_fns` make, dealt to `workers` processes in order (default: one per core)."""

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Any]],
        workers: int | None = None,
        autoreset_mode: AutoresetMode = AutoresetMode.SAME_STEP,
    ) -> None:
        self.num_envs = len(env_fns)
        workers = default_workers(self.num_envs) if workers is None else workers
        if not 1 <= workers <= self.num_envs:
            raise ValueError(
                f"{workers} workers for {self.num_envs} environments; expected at least one, and no more than environments"
            )
        bounds = [self.num_envs * w // workers for w in range(workers + 1)]
        self._rows = [slice(begin, end) for begin, end in pairwise(bounds)]
        self._waiting: list[int] = []  # workers that owe an answer
        self._masks: list[Any] = [None] * workers
        self.parent_pipes: list[Any] = []
        self.processes: list[Any] = []
        # multiprocessing ends its processes by SIGTERM when the program ends, which workers do not obey: this comes before.
        self._end_workers = Finalize(self, _end_workers, (self.parent_pipes, self.processes), exitpriority=1)
        try:
            self._build(env_fns, autoreset_mode)
        except BaseException:
            self.close_extras()
            raise

    def _build(self, env_fns: Sequence[Callable[[], Any]], mode: AutoresetMode) -> None:
        for number, rows in enumerate(self._rows):
            self._start(
                number, CloudpickleWrapper(partial(SyncVectorEnv, env_fns[rows], copy=False, autoreset_mode=mode))
            )
        made = self._collect(None)
        self.metadata, self.render_mode, self.single_observation_space, self.single_action_space, _ = made[0]
        for rows, (_, _, observation_space, action_space, _) in zip(self._rows, made):
            if (observation_space, action_space) != (self.single_observation_space, self.single_action_space):
                raise ValueError(f"environment {rows.start} has other spaces than environment 0; make them equal")
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._share_observations()
        if all(has_masks for *_, has_masks in made):
            self.action_masks = self._last_masks

    def _start(self, number: int, make: Any) -> None:
        name = f"Worker<{type(self).__name__}>-{number}"
        with _starting:
            ours, theirs = multiprocessing.Pipe()
            process = multiprocessing.Process(
                target=_work, name=name, args=(make, theirs, global_entropy()), daemon=True
            )
            self.parent_pipes.append(ours)
            self.processes.append(process)
            _all_parent_pipes.add(ours)
            process.start()
            theirs.close()
        self._waiting.append(number)

    def _share_observations(self) -> None:
        """One memory for the observations of all; who has mapped it keeps it when the file is gone."""
        with _file_of(_bytes_of(self.single_observation_space, self.num_envs)) as file:
            self._observations = _arrays(self.single_observation_space, self.num_envs, file.name)
            self._ask_each([("observe", (self.num_envs, rows, file.name)) for rows in self._rows])
            self._collect(None)

    # --- gymnasium's interface ---------------------------------------------------------------------------------------

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        self.reset_async(seed=seed, options=options)
        return self.reset_wait()

    def reset_async(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> None:
        """With options["reset_mask"] only environments that it marks."""
        seeds = list(range(seed, seed + self.num_envs)) if isinstance(seed, int) else seed
        questions: list[Any] = []
        for rows in self._rows:
            of_rows = dict(options) if options is not None else None
            if of_rows is not None and "reset_mask" in of_rows:
                of_rows["reset_mask"] = of_rows["reset_mask"][rows]
            marked = of_rows is None or "reset_mask" not in of_rows or of_rows["reset_mask"].any()
            questions.append(("reset", (None if seeds is None else list(seeds[rows]), of_rows)) if marked else None)
        self._ask_each(questions)

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        answers = self._collect(timeout)
        infos = [{} if answer is None else self._noted(number, *answer) for number, answer in enumerate(answers)]
        return tree_map(np.copy, self._observations), self._merge(infos)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: Any) -> None:
        self._ask_each([("step", tree_map(lambda a, rows=rows: np.asarray(a)[rows], actions)) for rows in self._rows])

    def step_wait(self, timeout: float | None = None) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        answers = self._collect(timeout)
        rewards, terminated, truncated = (np.concatenate([answer[i] for answer in answers]) for i in range(3))
        infos = [self._noted(number, *answer[3:]) for number, answer in enumerate(answers)]
        return tree_map(np.copy, self._observations), rewards, terminated, truncated, self._merge(infos)

    def call(self, name: str, *args: Any, **options: Any) -> tuple[Any, ...]:
        """Call a method of every environment, or read its attribute."""
        self._ask_each([("call", (name, args, options))] * len(self._rows))
        return tuple(result for answer in self._collect(None) for result in answer)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        if not isinstance(values, (list, tuple)):
            values = [values] * self.num_envs
        self._ask_each([("set_attr", (name, list(values[rows]))) for rows in self._rows])
        self._collect(None)

    def render(self) -> tuple[Any, ...] | None:
        return self.call("render")

    def close_extras(self, **options: Any) -> None:
        self._end_workers()

    # --- messages ----------------------------------------------------------------------------------------------------

    def _ask_each(self, questions: list[Any]) -> None:
        """One question per worker; None for those that have nothing to do."""
        if self._waiting:
            raise RuntimeError("the environments are still at their last step or reset; wait for it first")
        for number, question in enumerate(questions):
            if question is not None:
                with suppress(OSError):  # a process that has ended is noticed when no answer comes
                    self.parent_pipes[number].send(question)
                self._waiting.append(number)

    def _collect(self, timeout: float | None) -> list[Any]:
        """The answer of each worker that was asked, None of the others."""
        answers: list[Any] = [None] * len(self._rows)
        gives_up = None if timeout is None else time.monotonic() + timeout
        while self._waiting:
            number = self._waiting[0]
            pipe = self.parent_pipes[number]
            try:
                if gives_up is not None and not pipe.poll(max(0.0, gives_up - time.monotonic())):
                    raise multiprocessing.TimeoutError
                kind, answer = pipe.recv()
            except (EOFError, ConnectionError):
                raise WorkerFailedError(self._ending_of(number)) from None
            if kind == "error":
                report, self._env_obs = answer
                raise WorkerFailedError(report)
            answers[number] = answer
            del self._waiting[0]
        return answers

    def _ending_of(self, number: int) -> str:
        rows, process = self._rows[number], self.processes[number]
        process.join(1.0)  # its files are closed, but it may not have an exit code yet
        count = rows.stop - rows.start
        which = f"environments {rows.start} to {rows.stop - 1}" if count > 1 else f"environment {rows.start}"
        code = process.exitcode
        if code is None or code >= 0:
            return f"the process of {which} ended by itself (exit code {code})"
        names = {s.value: s.name for s in signal.Signals}
        return f"the process of {which} was killed by {names.get(-code, 'a signal')} (exit code {code})"

    # --- masks and infos ---------------------------------------------------------------------------------------------

    def _noted(self, number: int, info: dict[str, Any], masks: Any) -> dict[str, Any]:
        self._masks[number] = masks
        return info

    def _last_masks(self) -> list[Any]:
        """`action_masks()` of every environment, as of its last step or reset."""
        return [mask for masks in self._masks for mask in masks]

    def _merge(self, infos: list[dict[str, Any]]) -> dict[str, Any]:
        """The info of all environments from those of the workers, [B, ...] each; zeros, or None, where one has none."""
        if not any(infos):
            return {}
        return {
            key: self._merged([info.get(key) for info in infos]) for key in dict.fromkeys(k for i in infos for k in i)
        }

    def _merged(self, parts: list[Any]) -> Any:
        known = next(part for part in parts if part is not None)
        if isinstance(known, dict):
            return self._merge([part or {} for part in parts])
        counts = [rows.stop - rows.start for rows in self._rows]
        nothing = None if known.dtype == object else 0
        return np.concatenate(
            [np.full((n, *known.shape[1:]), nothing, known.dtype) if p is None else p for p, n in zip(parts, counts)]
        )


def _end_workers(pipes: list[Any], processes: list[Any]) -> None:
    for pipe in pipes:
        with suppress(OSError):  # it has ended
            pipe.send(("close", None))
    gives_up = time.monotonic() + _SECONDS_TO_CLOSE
    for process in processes:
        process.join(max(0.0, gives_up - time.monotonic()))
        process.kill()
        process.join()
    for pipe in pipes:
        pipe.close()


# --- the observations of all environments in one memory ----------------------------------------------------------------


def _leaves_of(space: Any, num_envs: int) -> tuple[Any, list[Any]]:
    shapes = create_empty_array(space, num_envs, fn=np.zeros)
    found = leaves(shapes)
    if not all(isinstance(leaf, np.ndarray) for leaf in found):
        raise ValueError(f"observations of {space} are not arrays, so they cannot be shared; use vectorization sync")
    return shapes, found


def _bytes_of(space: Any, num_envs: int) -> int:
    _, found = _leaves_of(space, num_envs)
    return max(1, sum(-(-leaf.nbytes // _ALIGNMENT) * _ALIGNMENT for leaf in found))


def _file_of(size: int) -> Any:
    """A new file in memory, or in the temporary folder if there is no room in memory."""
    folders = [*(["/dev/shm"] if os.path.isdir("/dev/shm") else []), tempfile.gettempdir()]
    reason = ""
    for folder in folders:
        try:
            return _reserved(folder, size)
        except OSError as error:
            reason = str(error.strerror)
    raise ValueError(
        f"the observations of all environments ({size:,} bytes) do not fit into {' or '.join(folders)} ({reason}); free space "
        "there, or use vectorization sync"
    )


def _reserved(folder: str, size: int) -> Any:
    file = tempfile.NamedTemporaryFile(dir=folder)  # noqa: SIM115 (the caller closes it)
    try:
        file.truncate(size)
        if hasattr(os, "posix_fallocate"):  # without room this is an error; touching the memory would be a signal
            os.posix_fallocate(file.fileno(), 0, size)
    except OSError:
        file.close()
        raise
    return file


def _arrays(space: Any, num_envs: int, file: str) -> Any:
    """Observations [B, ...] as arrays in the memory of a file."""
    shapes, _ = _leaves_of(space, num_envs)
    with open(file, "r+b") as opened:
        memory = mmap.mmap(opened.fileno(), 0)
    begin = 0

    def place(leaf: Any) -> Any:
        nonlocal begin
        array = np.ndarray(leaf.shape, leaf.dtype, memory, begin)
        begin += -(-leaf.nbytes // _ALIGNMENT) * _ALIGNMENT
        return array

    return tree_map(place, shapes)


# --- the process of some environments --------------------------------------------------------------------------------


def _work(make: Any, pipe: Any, entropy: int) -> None:
    """Answer questions until the pipe closes: ("done", answer) or ("error", (traceback, the last observations))."""
    for other in list(_all_parent_pipes):  # a pipe closes when nobody has its other end, and this process was forked
        other.close()
    # Ctrl-C and a scheduler's SIGTERM reach all processes; the one that trains handles them, and needs its environments
    # until it has. A program that an environment starts inherits SIG_IGN, and `terminate()` must still end it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: None)
    draw_other_numbers(entropy)
    gc.freeze()  # looking for garbage among the objects of the process that trains would copy its memory
    worker = None
    try:
        worker = _Worker(make())
        pipe.send(("done", worker.describe()))
        while True:
            question, argument = pipe.recv()
            if question == "close":
                return
            pipe.send(("done", getattr(worker, question)(argument)))
    except (EOFError, BrokenPipeError):  # the process that trains is gone
        pass
    except (Exception, KeyboardInterrupt):  # anything may be raised; exit() ends the process, and is seen there
        seen = getattr(worker.env, "_env_obs", None) if worker is not None else None
        with suppress(OSError):
            pipe.send(("error", (traceback.format_exc(), seen)))
    finally:
        if worker is not None:
            worker.env.close()


def global_entropy() -> int:
    """A number that follows from where numpy's own generator is; nothing is drawn from it."""
    _, words, position, *_ = np.random.get_state(legacy=True)
    return zlib.crc32(np.asarray(words).tobytes() + bytes([int(position) % 256, int(position) // 256]))


def draw_other_numbers(entropy: int) -> None:
    """Seed numpy's and torch's own generators by the number of this process and the `global_entropy` of the one it comes from.
    A forked process has that one's generators, so that environments of all workers would draw the same numbers from them."""
    number = int(multiprocessing.current_process().name.rpartition("-")[2])
    np.random.seed([entropy, number])
    torch.default_generator.manual_seed(int(np.random.randint(2**31)))  # torch.manual_seed takes a lock of threads


class _Worker:
    def __init__(self, env: SyncVectorEnv) -> None:
        self.env = env
        self._has_masks = all(self.env.call("has_wrapper_attr", "action_masks"))
        self._shared: Any = None

    def describe(self) -> tuple[Any, ...]:
        env = self.env
        spaces = env.single_observation_space, env.single_action_space
        return env.metadata, env.render_mode, *spaces, self._has_masks

    def observe(self, argument: tuple[int, slice, str]) -> None:
        num_envs, rows, file = argument
        self._shared = tree_map(lambda a: a[rows], _arrays(self.env.single_observation_space, num_envs, file))

    def reset(self, argument: tuple[Any, Any]) -> tuple[Any, ...]:
        seed, options = argument
        obs, info = self.env.reset(seed=seed, options=options)
        self._publish(obs)
        return info, self._masks()

    def step(self, actions: Any) -> tuple[Any, ...]:
        obs, rewards, terminated, truncated, info = self.env.step(actions)
        self._publish(obs)
        return rewards, terminated, truncated, info, self._masks()

    def call(self, argument: tuple[str, tuple[Any, ...], dict[str, Any]]) -> tuple[Any, ...]:
        name, args, options = argument
        return self.env.call(name, *args, **options)

    def set_attr(self, argument: tuple[str, list[Any]]) -> None:
        self.env.set_attr(*argument)

    def _publish(self, obs: Any) -> None:
        tree_map(lambda shared, o: np.copyto(shared, o), self._shared, obs)

    def _masks(self) -> Any:
        return self.env.call("action_masks") if self._has_masks else None
