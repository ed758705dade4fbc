"""Environments in worker processes give what a `SyncVectorEnv` over all of them gives: numbers, flags, infos, seeds."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import tempfile
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import CloudpickleWrapper

from counting_env import MODES
from holdfast.envs.workers import WorkerFailedError, WorkersVectorEnv, default_workers
from holdfast.state import leaves

MIXED = spaces.Dict({
    "image": spaces.Box(0, 255, (3, 5), np.uint8),
    "parts": spaces.Tuple((spaces.Discrete(4), spaces.Box(-1, 1, (2,), np.float32))),
})  # fmt: skip


class Mixed(gym.Env[Any, Any]):
    """Random observations of every kind, infos of every kind in some steps only, episodes of random length."""

    observation_space, action_space = MIXED, spaces.Discrete(3)

    def __init__(self, number: int) -> None:
        self.number = number

    def _obs(self) -> Any:
        random = self.np_random
        parts = np.int64(random.integers(4)), random.uniform(-1, 1, 2).astype(np.float32)
        return {"image": random.integers(0, 256, (3, 5)).astype(np.uint8), "parts": parts}

    def _info(self) -> dict[str, Any]:
        if self.np_random.random() < 0.6:
            return {}
        return {"number": self.number, "text": f"env {self.number}", "nested": {"array": self.np_random.random(2)}}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return self._obs(), self._info()

    def step(self, action: Any) -> Any:
        ends = self.np_random.random(2) < 0.15
        return self._obs(), float(action) + self.np_random.random(), bool(ends[0]), bool(ends[1]), self._info()

    def add(self, a: int, b: int = 0) -> int:
        return self.number + a + b


def flat(tree: Any) -> list[Any]:
    return [np.asarray(leaf) for leaf in leaves(tree)]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, np.ndarray) and a.dtype == object:
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b))
    if isinstance(a, tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b))
    return np.array_equal(np.asarray(a), np.asarray(b))


@pytest.fixture
def workers(request: Any) -> Any:
    made = []

    def make(*args: Any, **options: Any) -> WorkersVectorEnv:
        made.append(WorkersVectorEnv(*args, **options))
        return made[-1]

    yield make
    for env in made:
        env.close()
        assert not any(process.is_alive() for process in env.processes)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("num_envs", "count"), [(5, 2), (3, 3), (4, 1)])
def test_everything_is_what_one_sync_vector_env_gives(workers: Any, mode: AutoresetMode, num_envs: int, count: int):
    env_fns = [partial(Mixed, number) for number in range(num_envs)]
    ours, theirs = workers(env_fns, count, mode), SyncVectorEnv(env_fns, autoreset_mode=mode)
    assert ours.metadata == theirs.metadata and ours.observation_space == theirs.observation_space
    random = np.random.default_rng(num_envs)
    assert same(ours.reset(seed=7), theirs.reset(seed=7))
    ended = 0
    for _ in range(30):
        actions = random.integers(0, 3, num_envs)
        found, expected = ours.step(actions), theirs.step(actions)
        assert same(found, expected)
        assert [x.dtype for x in flat(found[:4])] == [x.dtype for x in flat(expected[:4])]
        done = expected[2] | expected[3]
        ended += int(done.sum())
        if mode == AutoresetMode.DISABLED and done.any():
            resets = [env.reset(options={"reset_mask": done.copy()}) for env in (ours, theirs)]
            assert same(*resets)
    assert ended > num_envs, "episodes have ended"
    seeds = [3, None, 1][:num_envs] + [4] * max(0, num_envs - 3)
    firsts = [env.reset(seed=list(seeds))[0]["image"][0] for env in (ours, theirs)]
    assert same(*firsts)


def test_what_is_returned_does_not_change_in_the_next_step(workers: Any):
    env = workers([partial(Mixed, 0)] * 2, 1)
    obs, _ = env.reset(seed=1)
    before = obs["image"].copy()
    env.step(np.zeros(2, int))
    assert np.array_equal(obs["image"], before)


def test_methods_and_attributes_of_every_environment_are_reached_in_order(workers: Any):
    env = workers([partial(Mixed, number) for number in range(5)], 2)
    assert env.call("add", 10, b=5) == (15, 16, 17, 18, 19) and env.get_attr("number") == (0, 1, 2, 3, 4)
    env.set_attr("number", [4, 3, 2, 1, 0])
    assert env.get_attr("number") == (4, 3, 2, 1, 0)


def test_a_worker_that_is_killed_is_one_line_that_says_which_environments_are_gone(workers: Any):
    env = workers([partial(Mixed, 0)] * 5, 2)
    env.reset(seed=1)
    os.kill(env.processes[1].pid, signal.SIGKILL)
    with pytest.raises(WorkerFailedError) as failed:
        for _ in range(2):
            env.step(np.zeros(5, int))
    assert str(failed.value) == "the process of environments 2 to 4 was killed by SIGKILL (exit code -9)"


def test_a_worker_ends_when_the_process_that_trains_is_gone(workers: Any):
    env = workers([partial(Mixed, 0)] * 3, 3)
    for pipe in env.parent_pipes:  # as the system closes them
        pipe.close()
    for process in env.processes:
        process.join(10)
    assert [process.exitcode for process in env.processes] == [0, 0, 0]
    env.parent_pipes.clear()


def test_observations_go_to_the_temporary_folder_if_memory_has_no_room(workers: Any, monkeypatch: pytest.MonkeyPatch):
    reserve, full = os.posix_fallocate, ["/dev/shm"]

    def refuse(file: int, begin: int, size: int) -> None:
        if os.readlink(f"/proc/self/fd/{file}").startswith(tuple(full)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(file, begin, size)

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    env = workers([partial(Mixed, 0)] * 3, 2)
    assert env.reset(seed=2)[0]["image"].any()
    full.append(tempfile.gettempdir())
    with pytest.raises(ValueError, match=r"do not fit into /dev/shm or .*No space left.*use vectorization sync"):
        WorkersVectorEnv([partial(Mixed, 0)] * 3, 2)


def two_that_know_each_other(pids: Any) -> None:
    """The first has a worker that was forked before, and one that was forked after the second's."""
    first = WorkersVectorEnv([partial(Mixed, 0)], 1)
    second = WorkersVectorEnv([partial(Mixed, 0)], 1)
    first._start(0, CloudpickleWrapper(partial(SyncVectorEnv, [partial(Mixed, 0)])))
    first.parent_pipes[1].recv()  # it has made its environments, and has closed the pipes of the others before
    pids.send([process.pid for env in (first, second) for process in env.processes])
    signal.pause()


def test_no_worker_outlives_the_process_that_trains_whatever_pipes_it_inherited():
    ours, theirs = multiprocessing.Pipe()
    trains = multiprocessing.get_context("fork").Process(target=two_that_know_each_other, args=(theirs,))
    trains.start()
    pids = ours.recv()
    os.kill(pids[1], signal.SIGSTOP)  # one that does not end keeps no other one alive
    trains.kill()
    trains.join()
    gives_up = time.monotonic() + 10
    while any(runs(pid) for pid in (pids[0], pids[2])) and time.monotonic() < gives_up:
        time.sleep(0.02)
    alive = [runs(pid) for pid in pids]
    os.kill(pids[1], signal.SIGKILL)
    assert alive == [False, True, False]


def runs(pid: int) -> bool:
    """Whether a process is there, and not only its exit code."""
    with suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


class Broken(Mixed):
    def __init__(self, number: int) -> None:
        if number == 2:
            raise FileNotFoundError("no such level")
        super().__init__(number)


def test_an_environment_that_cannot_be_made_is_named_with_its_own_traceback():
    with pytest.raises(WorkerFailedError, match="FileNotFoundError: no such level") as failed:
        WorkersVectorEnv([partial(Broken, number) for number in range(4)], 2)
    assert "test_workers.py" in failed.value.report
    assert not [process for process in multiprocessing.active_children() if "WorkersVectorEnv" in process.name]


class Interrupted(Mixed):
    def step(self, action: Any) -> Any:
        raise KeyboardInterrupt("the simulator\nwas stopped")


def test_an_interrupt_that_an_environment_raises_is_its_failure_in_one_line(workers: Any):
    env = workers([partial(Interrupted, 0)] * 2, 1)
    env.reset(seed=1)
    with pytest.raises(WorkerFailedError, match=r"^KeyboardInterrupt: the simulator was stopped$"):
        env.step(np.zeros(2, int))


def test_other_spaces_and_too_many_workers_are_refused():
    with pytest.raises(ValueError, match="environment 1 has other spaces than environment 0"):
        WorkersVectorEnv([partial(Mixed, 0), partial(gym.make, "CartPole-v1")], 2)
    with pytest.raises(ValueError, match="3 workers for 2 environments"):
        WorkersVectorEnv([partial(Mixed, 0)] * 2, 3)


def test_ranks_of_one_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)), raising=False)
    assert default_workers(64) == 12 and default_workers(5) == 5
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert default_workers(64) == 3
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "64")
    assert default_workers(64) == 1
