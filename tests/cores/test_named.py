"""Cores by name, and in words."""

from __future__ import annotations

import pytest
from torch import nn

import holdfast as hf
from holdfast.cores.named import made_of, make_core


def test_a_core_is_described_with_every_layer_that_is_inside():
    gru, lstm = "GRU(8, 8, reset='zero')", "LSTM(8, 8, reset='zero')"
    assert made_of(hf.Stack([hf.GRU(8, 8), hf.GRU(8, 8)])) == f"2 times {gru}"
    assert made_of(hf.Stack([hf.GRU(8, 8), hf.GRU(8, 8), hf.LSTM(8, 8)])) == f"Stack(2 times {gru}, {lstm})"
    assert made_of(hf.Block(hf.Stack([hf.Block(hf.GRU(8, 8))]))) == f"Block of Block of {gru}"
    both = hf.Parallel(actor=hf.Stack([hf.LSTM(8, 8), hf.GRU(8, 8)]), critic=hf.GRU(8, 8))
    assert made_of(both) == f"Parallel(actor=Stack({lstm}, {gru}), critic={gru})"


@pytest.mark.parametrize("core", [nn.LSTM, "torch.nn:LSTM"])
def test_a_class_that_is_no_core_is_refused_before_it_is_called(core: str | type):
    with pytest.raises(ValueError, match=r'the class LSTM is no hf\.Core; .* core="lstm", or .* hf\.LSTM'):
        make_core(core, 4, 8, 1, "zero")
