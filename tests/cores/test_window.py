"""`hf.WindowAttention`: what it sees, its ring, the step in place, what it refuses. The laws are tested for all cores."""

from __future__ import annotations

import pytest
import torch

import holdfast as hf
from holdfast import state as state_ops

B = 3


def make(window=5, reset="zero"):
    core = hf.WindowAttention(4, 6, window=window, num_heads=2, reset=reset)
    torch.nn.init.normal_(core.distance_bias, std=0.1)
    return core


@pytest.mark.parametrize("window", [2, 5, 9])
def test_it_sees_exactly_its_window(window):
    core, x = make(window), torch.randn(20, B, 4)
    y, _ = core(x)
    other = x.clone()
    other[3] += 1.0
    moved = (core(other)[0] - y).abs().amax((1, 2)) > 1e-6
    assert moved.nonzero().flatten().tolist() == list(range(3, 3 + window))


def test_positions_are_distances():
    """The same steps, later in the episode and at other slots of the ring, give the same output."""
    core, x = make(), torch.randn(6, B, 4)
    outputs = [core(torch.cat([torch.randn(n, B, 4), x]))[0][-1] for n in (4, 7, 12)]
    for other in outputs[1:]:
        torch.testing.assert_close(other, outputs[0])
    swapped = x[[0, 1, 3, 2, 4, 5]]
    assert (core(swapped)[0][-1] - core(x)[0][-1]).abs().max() > 1e-3


def test_the_age_counts_steps_of_the_episode_and_never_overflows():
    core = make(window=4)  # three slots
    state, ages = core.initial_state(1), []
    for t in range(12):
        _, state = core(torch.randn(1, 4), state, torch.tensor([t == 2]))
        ages.append(int(state["age"]))
    assert ages == [1, 2, 1, 2, 3, 4, 5, 3, 4, 5, 3, 4]
    assert core(torch.randn(1, 1, 4), state)[1]["age"].tolist() == [5]


def test_slots_that_the_episode_has_not_reached_are_zero():
    core = make()
    _, state = core(torch.randn(9, B, 4), None, torch.tensor([[t == 7] * B for t in range(9)]))
    assert state["age"].tolist() == [2] * B
    assert (state["keys"][:, :, :2] != 0).all() and (state["keys"][:, :, 2:] == 0).all()


@pytest.mark.parametrize("reset", ["zero", "never"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_advancing_in_place_equals_the_pure_step(reset, dtype):
    core = hf.Stack([hf.Block(make(reset=reset)), hf.GRU(6, 3)]).to(dtype)
    pure, owned = core.initial_state(B), core.initial_state(B)
    places = [leaf.data_ptr() for leaf in state_ops.leaves(owned)]
    assert core.supports_advance
    for t in range(15):
        x = torch.randn(B, 4).to(dtype)
        x[t % B] = torch.nan if t == 5 else x[t % B]
        resets = None if t == 4 else torch.rand(B) < 0.2
        with torch.no_grad():
            expected, pure = core(x, pure, resets)
            y = core.advance_(x, owned, resets)
        torch.testing.assert_close(y, expected, equal_nan=True, atol=0, rtol=0)
        for mine, other in zip(state_ops.leaves(owned), state_ops.leaves(pure)):
            torch.testing.assert_close(mine, other, equal_nan=True, atol=0, rtol=0)
    assert [leaf.data_ptr() for leaf in state_ops.leaves(owned)] == places


@pytest.mark.parametrize("form", ["steps", "sequence"])
def test_a_nan_observation_spoils_its_episode_within_the_window_and_nothing_else(form):
    core, T = make(window=5), 14
    x, resets = torch.randn(T, B, 4), torch.zeros(T, B, dtype=torch.bool)
    x[3, 0], x[3, 1] = torch.nan, torch.inf
    resets[6, 1] = True
    if form == "sequence":
        y, state = core(x, None, resets)
    else:
        state, ys = core.initial_state(B), []
        for t in range(T):
            y, state = core(x[t], state, resets[t])
            ys.append(y)
        y = torch.stack(ys)
    spoiled = y.isnan().any(-1)
    assert spoiled.nonzero().tolist() == [[3, 0], [3, 1], [4, 0], [4, 1], [5, 0], [5, 1], [6, 0], [7, 0]]
    assert all(leaf.isfinite().all() for leaf in state_ops.leaves(state))


def test_what_it_cannot_do_is_refused_with_the_reason():
    with pytest.raises(ValueError, match=r"no reset mode 'learned': a window starts empty"):
        hf.WindowAttention(4, 8, reset="learned")
    with pytest.raises(ValueError, match=r"no reset mode 'detach'.*use 'zero', or 'never'"):
        hf.WindowAttention(4, 8, reset="detach")
    with pytest.raises(ValueError, match="unknown reset mode 'zeros'"):
        hf.WindowAttention(4, 8, reset="zeros")
    with pytest.raises(ValueError, match=r"hidden_size 6 must be a multiple of num_heads 4"):
        hf.WindowAttention(4, 6)
    with pytest.raises(ValueError, match=r"window must be an integer of at least 2, got 1"):
        hf.WindowAttention(4, 8, window=1)
    with pytest.raises(ValueError, match=r"unknown kernel 'native'; one of 'auto', 'reference', 'portable'"):
        hf.WindowAttention(4, 8, kernel="native")
