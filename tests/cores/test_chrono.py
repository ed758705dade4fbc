"""`memory_span`: memories that last for as many steps before anything is learned."""

from __future__ import annotations

import math

import pytest
import torch
from gymnasium import spaces

import holdfast as hf
from holdfast.cores.chrono import chrono_init_
from holdfast.cores.named import make_core


@pytest.mark.parametrize("span", [8, 64])
def test_modes_of_an_lru_fade_over_the_span_to_four_times_it(span):
    core = hf.LRU(3, 16)
    chrono_init_(core, span)
    re, im = core.eigenvalues().chunk(2)
    steps = -1 / torch.log(torch.hypot(re, im))
    torch.testing.assert_close(steps.sort().values, span * 4 ** torch.linspace(0, 1, 32), rtol=1e-3, atol=0)


def test_phases_of_an_lru_are_evenly_spaced_but_for_a_quarter_that_hardly_turns():
    core = hf.LRU(3, 4, modes=8)
    re, im = core.eigenvalues().chunk(2)
    expected = torch.tensor([1e-4, 1e-4, *[(j + 0.5) / 6 for j in range(6)]]) * math.pi
    torch.testing.assert_close(torch.atan2(im, re), expected)


@pytest.mark.parametrize("span", [10, 300])
def test_states_of_a_mingru_vary_as_much_as_what_enters_them(span):
    torch.manual_seed(0)
    core = hf.MinGRU(16, 256)
    chrono_init_(core, span)
    with torch.no_grad():
        core.weight_l0[:256] = 0  # gates that do not depend on the input
        y, _ = core(torch.randn(10 * span, 8, 16))
    assert 0.4 < float(y[2 * span :].std()) < 0.8  # candidates of the fastest units: 1 / sqrt(3) = 0.58


def test_an_ffm_gets_as_many_pitches_as_tell_the_steps_apart():
    assert [make_core("ffm", 3, 8, 1, "zero", n).core.context_size for n in (4, 20, 64, 500)] == [4, 10, 32, 32]
    core = hf.FFM(3, 8, memory_size=2, context_size=2)
    chrono_init_(core, 10)
    torch.testing.assert_close(core.log_omega.exp(), torch.tensor([1e-4, 0.5]) * math.pi)
    torch.testing.assert_close(core.log_alpha.exp().sort().values, torch.tensor([1 / 40, 1 / 10]))


def test_heads_of_an_mlstm_forget_over_the_span_to_four_times_it():
    core = hf.MLSTM(3, 8, num_heads=2)
    chrono_init_(core, 10)
    forget = core.gates.bias[2:].sigmoid()
    torch.testing.assert_close((1 / (1 - forget)).sort().values, torch.tensor([11.0, 41.0]))


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("core", ["lru", "ffm", "mlstm"])
def test_what_was_seen_sixteen_steps_ago_is_learned_in_forty_updates(core, seed):
    """Supervised: one of four symbols, to be named 16 steps later. Guessing has a loss of 1.39."""
    torch.manual_seed(seed)
    k, T, B = 16, 48, 16
    policy = hf.ActorCritic(spaces.Discrete(4), spaces.Discrete(4), core=core, hidden_size=32, memory_span=k)
    adam = torch.optim.Adam(policy.parameters(), lr=5e-3)
    losses = []
    for _ in range(40):
        x = torch.randint(0, 4, (T, B))
        logits = policy.unroll(x, policy.initial_state(B)).dist.logits.view(T, B, 4)
        loss = torch.nn.functional.cross_entropy(logits[k:].flatten(0, 1), x[:-k].flatten())
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(float(loss.detach()))
    assert sum(losses[-5:]) / 5 < 0.7
