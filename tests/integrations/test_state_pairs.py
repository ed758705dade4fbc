"""States as sb3-contrib passes them around: what goes into a pair comes out of it."""

from __future__ import annotations

import pytest
import torch

import holdfast as hf
from accumulator import Accumulator, dtypes
from holdfast import state as state_ops

pytest.importorskip("sb3_contrib")

from holdfast.integrations.sb3 import state_pairs

CORES = {
    "lstm": lambda: hf.LSTM(4, 5, 2),
    "gru": lambda: hf.GRU(4, 5, 2),
    "accumulator": lambda: Accumulator(4),
    "both": lambda: hf.Parallel(a=Accumulator(4), b=hf.LSTM(4, 3)),
}


@pytest.mark.parametrize("name", CORES)
def test_a_pair_holds_the_whole_state(name):
    core = CORES[name]()
    _, state = core(torch.randn(300, 3, 4), None, torch.rand(300, 3) < 0.01)
    pair = state_pairs.pack(core, state)
    assert all(part.is_floating_point() and part.shape[1] == 3 for part in pair)
    back = state_pairs.unpack(core, pair)
    core.check_state(back, 3)
    assert dtypes(back) == dtypes(core.initial_state(3))
    for path, leaf in state_ops.named_leaves(back).items():
        assert torch.equal(leaf, state_ops.named_leaves(state)[path])
    state_pairs.check(core, state_pairs.initial(core, 2), 2)


def test_a_state_of_counters_alone_is_packed_as_numbers():
    class Counter(Accumulator):
        def row_shapes(self):
            return {"age": super().row_shapes()["age"]}

    core, state = Counter(), {"age": torch.tensor([0, 2**24 - 1], dtype=torch.int32)}
    assert torch.equal(state_pairs.unpack(core, state_pairs.pack(core, state))["age"], state["age"])
