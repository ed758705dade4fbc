"""Linear layers in C against torch, for every instruction set this CPU has."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn

from holdfast.kernels.cpu import library
from holdfast.kernels.cpu.update import MAX_LAYERS, Perceptron, layers_of

pytestmark = pytest.mark.skipif(library.load().handle is None, reason=f"no native kernel: {library.load().reason}")


def relative_error(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))


@pytest.mark.parametrize("rows", [1, 5, 23, 24, 97, 300])
@pytest.mark.parametrize("sizes", [(1, 1), (7, 100, 3), (64, 64, 64, 2), (33, 17, 65, 130)], ids=str)
@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU])
def test_layers_and_their_gradients_are_torchs(
    isa: str, rows: int, sizes: tuple[int, ...], activation: type[nn.Module]
):
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), activation()]
    chain = nn.Sequential(*layers[:-1])
    exact = copy.deepcopy(chain).double()
    x, d = torch.randn(rows, sizes[0]), torch.randn(rows, sizes[-1])
    x64 = x.double().requires_grad_()
    y = exact(x64)
    y.backward(d.double())

    found = layers_of(chain)
    assert found is not None
    perceptron = Perceptron(found, x)
    gradients = [torch.full_like(p, torch.nan) for p in chain.parameters()]
    dx = perceptron.prepare_backward(d, gradients, True)
    perceptron.forward()
    perceptron.backward()
    assert relative_error(perceptron.out, y.detach()) < 2e-6
    assert dx is not None and x64.grad is not None and relative_error(dx, x64.grad) < 2e-6
    for found_gradient, q in zip(gradients, exact.parameters()):
        assert q.grad is not None and relative_error(found_gradient, q.grad) < 2e-6
    assert perceptron.prepare_backward(d, gradients, False) is None


def test_nan_stays_in_its_row(isa: str):
    chain = nn.Sequential(nn.Linear(3, 40), nn.ReLU(), nn.Linear(40, 2))
    x = torch.randn(50, 3)
    x[7] = torch.nan
    found = layers_of(chain)
    assert found is not None
    perceptron = Perceptron(found, x)
    perceptron.forward()
    y = perceptron.out
    assert y[7].isnan().all() and torch.cat([y[:7], y[8:]]).isfinite().all()


def test_what_is_no_plain_chain_of_layers_is_refused():
    assert layers_of(nn.Sequential(nn.Linear(2, 2, bias=False))) is None
    assert layers_of(nn.Sequential(nn.Tanh(), nn.Linear(2, 2))) is None
    assert layers_of(nn.Sequential(nn.Linear(2, 2), nn.GELU())) is None
    assert layers_of(nn.Sequential(*[nn.Linear(2, 2) for _ in range(MAX_LAYERS + 1)])) is None
    assert layers_of(nn.Sequential()) == []


def test_another_size_or_dtype_never_reaches_c():
    layers = layers_of(nn.Linear(4, 2)) or []
    with pytest.raises(ValueError, match="12 elements"):
        Perceptron(layers, torch.zeros(3, 5))
    with pytest.raises(ValueError, match=r"float64.*float32"):
        Perceptron(layers, torch.zeros(3, 4, dtype=torch.float64))
