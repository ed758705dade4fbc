"""`Core.trace` gives the outputs of `forward` and the state after every step."""

from __future__ import annotations

import pytest
import torch

import holdfast as hf
from cores.all_cores import KINDS, core_of, returned_state
from holdfast import state as state_ops

T, B = 9, 3
CORES = {
    **{kind: (lambda kind=kind: core_of(kind, size=4)) for kind in KINDS},
    "lstm portable": lambda: hf.LSTM(4, 5, 2, kernel="portable"),
    "lstm reference": lambda: hf.LSTM(4, 5, kernel="reference"),
    "lstm learned": lambda: hf.LSTM(4, 5, 2, reset="learned"),
    "gru detach": lambda: hf.GRU(4, 5, reset="detach"),
    "memoryless": lambda: hf.Memoryless(4),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", CORES)
def test_a_trace_holds_the_state_after_every_step(name, grad):
    torch.manual_seed(0)
    core, x, resets = CORES[name](), torch.randn(T, B, 4), torch.rand(T, B) < 0.3
    start = returned_state(core, B)
    with torch.set_grad_enabled(grad):
        y, final, states = core.trace(x, start, resets)
        whole, end = core(x, start, resets)
    torch.testing.assert_close(y, whole)
    state = start
    for t in range(T):
        _, state = core(x[t], state, resets[t])
        for seen, leaf in zip(state_ops.leaves(states), state_ops.leaves(state)):
            torch.testing.assert_close(seen[t], leaf, atol=1e-6, rtol=0)
            assert seen.requires_grad == (grad and seen.is_floating_point()), "its gradient is carried"
    for a, b in zip(state_ops.leaves(final), state_ops.leaves(end)):
        torch.testing.assert_close(a, b)
        assert a.requires_grad == (grad and a.is_floating_point())
