"""Tests run one thread per process, and so do the processes they start: the runner has a process per core.

They share a GPU, if there is one: JAX may not take three quarters of its memory for one process.

Every run draws the same numbers, in any order of the tests: generators are seeded before each test, and Hypothesis draws
the same examples. A test that fails fails again.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import gc
import importlib.util
import multiprocessing
import random
import signal
from collections.abc import Iterator

import numpy as np
import pytest
import torch

torch.set_num_threads(1)

# Ignored where a shell started pytest in the background. Commands that tests interrupt would never end.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

if importlib.util.find_spec("hypothesis") is not None:  # `make test-peers` has none
    import hypothesis

    hypothesis.settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
    hypothesis.settings.load_profile("repeatable")


def seed_generators() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def all_garbage_at_the_end() -> Iterator[None]:
    yield
    gc.unfreeze()  # libraries report what Python leaves at its end as leaks


@pytest.fixture(autouse=True, scope="module")
def seeded_module(all_garbage_at_the_end: None) -> None:
    """Before the fixtures of a module."""
    gc.collect()
    gc.freeze()  # else each search for garbage goes through what all tests before left, and so do processes that fork
    multiprocessing.set_start_method(None, force=True)  # Python's own; importing torchrl makes it spawn: seconds each
    seed_generators()


@pytest.fixture(autouse=True)
def seeded_test(seeded_module: None) -> None:
    seed_generators()
