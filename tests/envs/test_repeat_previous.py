"""RepeatPrevious as one launch against the torch one: in the interpreter, and on a GPU where there is one."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

import triton_interpreter
from holdfast.envs.repeat_previous import RepeatPrevious
from holdfast.state import named_leaves

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


def test_a_step_in_one_launch_is_bit_for_bit_the_torch_step():
    found = triton_interpreter.run(Path(__file__).with_name("interpreted_repeat_previous.py"))
    assert set(found) == {"easy", "last card", "long"}
    for case, (differ, ended) in found.items():
        assert differ == [] and ended >= 6, case


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(("num_envs", "decks", "k", "seed"), [(1000, 1, 4, 1), (130, 2, 32, 2)])
def test_on_a_gpu_too(num_envs: int, decks: int, k: int, seed: int):
    one, many = RepeatPrevious(num_envs, decks, k, device="cuda"), RepeatPrevious(num_envs, decks, k, device="cuda")
    many.one_launch = False
    for env in (one, many):
        env.reset(seed=seed)
    for _ in range(120):
        actions = torch.randint(4, (num_envs,), device="cuda")
        for env in (one, many):
            env.last = env.step(actions)  # type: ignore[attr-defined]
        parts = [named_leaves({"out": env.last, "state": env.state}) for env in (one, many)]  # type: ignore[attr-defined]
        assert len(parts[0]) == 8 and all(torch.equal(parts[0][name], parts[1][name]) for name in parts[1])
