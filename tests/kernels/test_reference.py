"""The reference is the specification: torch.nn where there are no resets, hand-made episodes where there are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from holdfast.kernels import reference
from holdfast.kernels.operands import Weights
from kernels.recurrences import Layer


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_without_resets_it_is_torch_nn(cell):
    layer = Layer.random(cell, 6, 3, 4, 5, resets="none")
    theirs = (torch.nn.LSTM if cell == "lstm" else torch.nn.GRU)(4, 5).double()
    theirs.load_state_dict(dict(zip(("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"), layer.weights)))
    start = [s.unsqueeze(0) for s in layer.state]
    y, state = theirs(layer.x, tuple(start) if cell == "lstm" else start[0])
    got = layer.run(reference)
    torch.testing.assert_close(got[0], y)
    for mine, final in zip(got[1:], state if cell == "lstm" else [state]):
        torch.testing.assert_close(mine, final.squeeze(0))


@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("learned", [False, True])
def test_a_reset_starts_again_from_the_reset_values(cell, learned):
    layer = Layer.random(cell, 5, 1, 4, 3, resets="none", learned=learned)
    layer = layer.with_mask(torch.tensor([False, False, True, False, False]).view(5, 1))
    values = (layer.resets.h, layer.resets.c)[: len(layer.state)]
    start = tuple(torch.zeros(1, 3, dtype=torch.float64) if v is None else v.expand(1, 3) for v in values)
    after = replace(layer.with_mask(None), x=layer.x[2:], state=start)
    torch.testing.assert_close(layer.run(reference)[0][2:], after.run(reference)[0])


def test_one_lstm_step_by_hand():
    """All weights 0, biases (i, f, g, o) = (0, 0, 1, 0): c = 0.5 c0 + 0.5 tanh(1), h = 0.5 tanh(c)."""
    one = torch.ones(1, dtype=torch.float64)
    zeros = torch.zeros(4, 1, dtype=torch.float64)
    bias = torch.tensor([0.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    h, c = reference.lstm.cell(one.view(1, 1), one.view(1, 1), 2 * one.view(1, 1), Weights(zeros, zeros, bias))
    expected = 1.0 + 0.5 * torch.tanh(one)
    torch.testing.assert_close(c.squeeze(0), expected)
    torch.testing.assert_close(h.squeeze(0), 0.5 * torch.tanh(expected))


def test_one_gru_step_by_hand():
    """All weights 0, input biases (r, z, n) = (0, 0, 1): h = 0.5 tanh(1) + 0.5 h0."""
    zeros = torch.zeros(3, 1, dtype=torch.float64)
    bias = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    h = reference.gru.cell(torch.ones(1, 1).double(), torch.full((1, 1), 4.0).double(), Weights(zeros, zeros, bias))
    assert h.item() == pytest.approx(0.5 * torch.tanh(torch.tensor(1.0)).item() + 2.0)
