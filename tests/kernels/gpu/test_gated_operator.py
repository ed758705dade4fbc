"""Operators, autograd and padding around the CUDA kernels, with the float64 reference in their place: no GPU needed."""

from types import SimpleNamespace

import pytest
import torch

from holdfast.kernels import gpu
from holdfast.kernels.cuda import gated_layer
from holdfast.kernels.gpu import gated_operator
from kernels.gpu.cuda_stand_in import StandIn
from kernels.recurrences import GATES, RESETS, Layer, assert_matches_reference, relative_error

CASES = [
    {"resets": resets, "learned": learned, "bias": bias, "detach": detach}
    for resets in RESETS
    for learned, bias, detach in ((False, True, False), (True, False, False), (False, True, True))
]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    one = StandIn()
    monkeypatch.setattr(gated_operator, "gated_layer", one)
    return one


@pytest.mark.parametrize("cell", GATES)
@pytest.mark.parametrize(("hidden", "size"), [(5, 16), (16, 16), (20, 24)])
def test_eager_layers_have_the_gradients_of_the_reference(cell, hidden, size, stand_in):
    for case in CASES:
        layer = Layer.random(cell, 4, 3, 5, hidden, **case)
        assert_matches_reference(gpu, layer, torch.float64, 1e-12)
    assert set(stand_in.sizes) == {size}


@pytest.mark.parametrize("cell", GATES)
@pytest.mark.parametrize("hidden", [5, 16])
def test_compiled_layers_are_one_graph_and_have_the_gradients_of_eager_ones(cell, hidden, stand_in):
    layer = Layer.random(cell, 4, 3, 5, hidden, learned=True).to(torch.float64)
    eager = layer.answer(gpu)
    compiled = torch.compile(getattr(gpu, cell).sequence, fullgraph=True, backend="aot_eager")
    got = layer.answer(SimpleNamespace(**{cell: SimpleNamespace(sequence=compiled)}))
    assert len(stand_in.sizes) == 2
    for name, value in eager.items():
        assert relative_error(got[name], value) <= 1e-12, name


@pytest.mark.parametrize("cell", GATES)
def test_without_gradients_nothing_is_kept_and_steps_are_the_sequence(cell, stand_in):
    layer = Layer.random(cell, 6, 3, 5, 7, learned=True)
    y, *final = layer.run(gpu)
    state = layer.state
    for t in range(6):
        now = {"x": layer.x[t : t + 1], "resets": layer.resets._replace(mask=layer.resets.mask[t : t + 1])}
        step, *state = Layer(cell, now["x"], tuple(state), now["resets"], layer.weights).run(gpu)
        torch.testing.assert_close(step[0], y[t])
    for one, other in zip(state, final):
        torch.testing.assert_close(one, other)
        assert one.is_contiguous() and one.shape == (3, 7)
    assert not stand_in._kept


@pytest.mark.parametrize("cell", GATES)
@pytest.mark.parametrize("hidden", [7, 16])
def test_gradients_that_nobody_asked_for_are_left_out(cell, hidden, stand_in):
    layer = Layer.random(cell, 4, 3, 5, hidden, learned=True)
    w_hh = layer.weights.w_hh.clone().requires_grad_()
    y, *_ = layer.with_tensors({**layer.tensors(), "w_hh": w_hh}).run(gpu)
    (got,) = torch.autograd.grad(y.sum(), w_hh)
    everything = layer.to(torch.float64)
    (expected,) = torch.autograd.grad(everything.run(gpu)[0].sum(), everything.weights.w_hh)
    assert relative_error(got, expected) <= 1e-12


def test_a_second_derivative_is_refused_for_padded_sizes_too(stand_in):
    for hidden in (7, 16):
        layer = Layer.random("gru", 3, 2, 5, hidden).to(torch.float64)
        with pytest.raises(RuntimeError, match='kernel="reference"'):
            torch.autograd.grad(layer.run(gpu)[0].sum(), layer.x, create_graph=True)


@pytest.mark.parametrize("gates", GATES.values())
@pytest.mark.parametrize(
    ("hidden", "capability", "expected"),
    [
        (1, 80, True),
        (20, 80, True),
        (128, 90, True),
        (1020, 90, True),
        (1025, 90, False),
        (20, 75, False),
        (128, 75, False),
    ],
)
def test_sizes_up_to_1024_on_compute_capability_8_and_above_are_taken(gates, hidden, capability, expected, monkeypatch):
    x = SimpleNamespace(dtype=torch.float32, is_cuda=True, numel=lambda: 1, get_device=lambda: -capability)
    monkeypatch.setattr(gated_layer, "limits", lambda device: (132, 232448, -device))
    for library in (gated_layer.nvrtc, gated_layer.cublaslt):
        monkeypatch.setattr(library, "is_available", lambda: True)
    gated_layer._supports.cache_clear()
    assert gpu.supports(gates, x, hidden, torch.float32) == expected
    assert not gpu.supports(gates, x, hidden, torch.float64)
    gated_layer._supports.cache_clear()
