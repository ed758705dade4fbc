"""Tests of the doctor run in one thread: its policies are small."""

from importlib.util import find_spec

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# Helpers of tests that need JAX: without it, doctest cannot import them.
collect_ignore = [] if find_spec("jax") else ["gallery/jax_pairs.py", "subjects/jax_policies.py"]
