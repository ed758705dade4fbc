"""Padding to a hidden size of the CUDA kernels, with other kernels in float64 in their place: no GPU needed."""

from types import SimpleNamespace

import pytest
import torch

from holdfast.kernels import portable, reference
from holdfast.kernels.cuda.padding import pad, padded_size, run_padded
from kernels.recurrences import GATES, RESETS, Layer, assert_matches_reference

SIZES = (1, 3, 5, 7, 8, 12, 20)
FOLDERS = {"reference": reference, "portable": portable}


def padded(folder):
    """A folder of kernels that pads its layers, as `gpu` does."""

    def lstm(x, h0, c0, resets, weights):
        return run_padded(folder.lstm.sequence, x, h0, c0, resets, weights)

    def gru(x, h0, resets, weights):
        def run(x, h0, c0, resets, weights):
            assert c0 is None and h0.shape[1] == padded_size(h0.shape[1])
            return (*folder.gru.sequence(x, h0, resets, weights), None)

        y, h_n, c_n = run_padded(run, x, h0, None, resets, weights)
        assert c_n is None
        return y, h_n

    return SimpleNamespace(lstm=SimpleNamespace(sequence=lstm), gru=SimpleNamespace(sequence=gru))


def test_sizes_of_the_kernels_stay_and_others_get_the_next():
    assert [padded_size(n) for n in (1, 8, 15, 16, 17, 20, 24, 100, 1020, 1024)] == [
        16, 16, 16, 16, 24, 24, 24, 104, 1024, 1024,
    ]  # fmt: skip


@pytest.mark.parametrize("cell", GATES)
@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("hidden", SIZES)
@pytest.mark.parametrize("batch", [1, 3, 9])
def test_a_padded_layer_has_the_outputs_and_gradients_of_the_layer(cell, folder, hidden, batch):
    """Exact up to the order of sums; every reset pattern, zero and learned starts, detached gradients, with and without bias."""
    for resets in RESETS:
        for learned, detach, bias in (
            (False, False, True),
            (True, False, True),
            (True, False, False),
            (False, True, True),
        ):
            layer = Layer.random(
                cell, 4, batch, 5, hidden, resets=resets, learned=learned, detach=detach, bias=bias, seed=hidden
            )
            assert_matches_reference(padded(FOLDERS[folder]), layer, torch.float64, 1e-12)


@pytest.mark.parametrize("cell", GATES)
@pytest.mark.parametrize("hidden", SIZES)
def test_padded_units_stay_zero_and_what_they_hold_reaches_no_other_unit(cell, hidden):
    layer = Layer.random(cell, 6, 3, 5, hidden, learned=True)
    h0, c0, resets, weights = pad(
        layer.state[0], layer.state[1] if cell == "lstm" else None, layer.resets, layer.weights
    )
    size = padded_size(hidden)
    assert weights.w_hh.shape == (GATES[cell] * size, size) and weights.w_ih.shape == (GATES[cell] * size, 5)
    assert weights.b_ih.shape == weights.b_hh.shape == (GATES[cell] * size,) and resets.h.shape == (size,)
    state = (h0,) if c0 is None else (h0, c0)
    sequence = getattr(reference, cell).sequence
    y, *final = sequence(layer.x, *state, resets, weights)
    assert all((output[..., hidden:] == 0).all() for output in (y, *final))
    touched = [torch.cat([leaf[:, :hidden], torch.ones_like(leaf[:, hidden:])], 1) for leaf in state]
    other, *_ = sequence(layer.x, *touched, resets, weights)
    assert torch.equal(other[..., :hidden], y[..., :hidden])
