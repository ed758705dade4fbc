"""What stays spoiled after an update that was not finite is found and cleared."""

from __future__ import annotations

import torch

import holdfast as hf
from accumulator import Accumulator
from holdfast.training.nonfinite import clear_memory


def test_only_rows_that_hold_nan_or_inf_become_fresh_whatever_the_dtypes_of_the_leaves():
    core = Accumulator()
    memory = hf.Memory(core)
    x = torch.ones(4, 4)
    x[1, 2], x[3, 0] = float("nan"), float("inf")
    memory.write(core(x)[1])
    assert clear_memory(memory) == [1, 3]
    assert memory.read()["age"].tolist() == [1, 0, 1, 0] and memory.read()["sum"].isfinite().all()
    assert clear_memory(hf.Memory(hf.Memoryless(3))) == []
