"""How gates start: an LSTM by name leans to remembering, `memory_span` spreads spans, a core of your own stays as it is."""

from __future__ import annotations

import pytest
import torch
from gymnasium import spaces

import holdfast as hf
from holdfast.cores.chrono import chrono_init_

OBS, ACTIONS = spaces.Box(-1, 1, (3,)), spaces.Discrete(2)


def forget_biases(core: hf.LSTM, layer: int = 0) -> torch.Tensor:
    H = core.hidden_size
    return (getattr(core, f"bias_ih_l{layer}") + getattr(core, f"bias_hh_l{layer}"))[H : 2 * H]


@pytest.mark.parametrize("layers", [1, 2])
def test_forget_gates_of_an_lstm_by_name_start_three_quarters_open(layers: int):
    core = hf.ActorCritic(OBS, ACTIONS, "lstm", 64, num_layers=layers).core
    for layer in range(layers):
        assert float(forget_biases(core, layer).detach().sigmoid().mean()) == pytest.approx(0.73, abs=0.02)


def test_an_lstm_that_the_user_made_keeps_torchs_initialization():
    core = hf.LSTM(64, 64)
    before = {name: p.clone() for name, p in core.named_parameters()}
    policy = hf.ActorCritic(OBS, ACTIONS, core, 64)
    assert policy.core is core
    assert all(torch.equal(p, before[name]) for name, p in core.named_parameters())


@pytest.mark.parametrize("seed", range(3))
def test_chrono_initialization_spreads_the_spans_of_an_lstm_and_a_gru(seed: int):
    torch.manual_seed(seed)
    for core in (hf.LSTM(8, 256), hf.GRU(8, 256)):
        chrono_init_(core, 100)
        spans = forget_biases(core).exp()
        assert 1 <= spans.min() < 10 and 90 < spans.max() <= 99
