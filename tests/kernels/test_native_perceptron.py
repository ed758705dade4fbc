"""Linear layers, PPO's objective and Adam in C against torch, for every instruction set this CPU has."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn

from holdfast.engines.objective import ClippedObjective
from holdfast.kernels.cpu import library as native_library
from holdfast.kernels.cpu.adam import NativeAdam
from holdfast.kernels.cpu.objective import clipped
from holdfast.kernels.cpu.perceptron import MAX_LAYERS, Perceptron, layers_of
from holdfast.policies.heads import Categorical

pytestmark = pytest.mark.skipif(
    native_library.load().handle is None, reason=f"no native kernel: {native_library.load().reason}"
)


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
    perceptron = Perceptron(found)
    outputs = perceptron.forward(x)
    dx = perceptron.backward(d, x, outputs, True)
    assert relative_error(outputs[-1], y.detach()) < 2e-6
    assert dx is not None and x64.grad is not None and relative_error(dx, x64.grad) < 2e-6
    for p, q in zip(chain.parameters(), exact.parameters()):
        assert p.grad is not None and q.grad is not None and relative_error(p.grad, q.grad) < 2e-6
    assert perceptron.backward(d, x, outputs, False) is None


def test_nan_stays_in_its_row(isa: str):
    chain = nn.Sequential(nn.Linear(3, 40), nn.ReLU(), nn.Linear(40, 2))
    x = torch.randn(50, 3)
    x[7] = torch.nan
    found = layers_of(chain)
    assert found is not None
    y = Perceptron(found).forward(x)[-1]
    assert y[7].isnan().all() and torch.cat([y[:7], y[8:]]).isfinite().all()


def test_what_is_no_plain_chain_of_layers_is_refused():
    assert layers_of(nn.Sequential(nn.Linear(2, 2, bias=False))) is None
    assert layers_of(nn.Sequential(nn.Tanh(), nn.Linear(2, 2))) is None
    assert layers_of(nn.Sequential(nn.Linear(2, 2), nn.GELU())) is None
    assert layers_of(nn.Sequential(*[nn.Linear(2, 2) for _ in range(MAX_LAYERS + 1)])) is None
    assert layers_of(nn.Sequential()) == []


def test_another_size_or_dtype_never_reaches_c():
    perceptron = Perceptron(layers_of(nn.Linear(4, 2)) or [])
    with pytest.raises(ValueError, match="12 elements"):
        perceptron.forward(torch.zeros(3, 5))
    with pytest.raises(ValueError, match=r"float64.*float32"):
        perceptron.forward(torch.zeros(3, 4, dtype=torch.float64))


@pytest.mark.parametrize("actions", [1, 2, 16, 50])
@pytest.mark.parametrize("clip_value", [None, 0.1])
@pytest.mark.parametrize("some_valid", [False, True])
def test_the_objective_and_its_gradient_are_autograds(
    isa: str, actions: int, clip_value: float | None, some_valid: bool
):
    torch.manual_seed(1)
    n = 60
    logits, value, advantage, returns = torch.randn(n, actions), *torch.randn(3, n)
    chosen = torch.randint(actions, (n,))
    old_log_prob = Categorical(logits).log_prob(chosen) + 0.3 * torch.randn(n)
    old_value = value + 0.2 * torch.randn(n)
    valid = torch.rand(n) < 0.7 if some_valid else None
    options = (0.2, clip_value, 0.03, 0.7)
    d_logits, d_value, terms = clipped(
        logits, chosen, value, old_log_prob, old_value, advantage, returns, valid, *options
    )

    exact_logits, exact_value = logits.double().requires_grad_(), value.double().requires_grad_()
    dist = Categorical(exact_logits)
    stored = [t.double() for t in (old_log_prob, old_value, advantage, returns)]
    expected = ClippedObjective.apply(dist.log_prob(chosen), dist.entropy(), exact_value, *stored, valid, *options)
    expected[0].backward()
    assert terms.tolist() == pytest.approx([float(term.detach()) for term in expected], rel=1e-5, abs=1e-6)
    torch.testing.assert_close(d_logits.double(), exact_logits.grad, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(d_value.double(), exact_value.grad, rtol=1e-5, atol=1e-8)


def test_probabilities_far_apart_stay_finite(isa: str):
    logits = torch.tensor([[0.0, -500.0, 80.0], [1e30, 0.0, -1e30]])
    one = torch.ones(2)
    d_logits, _, terms = clipped(logits, torch.tensor([2, 0]), one, 0 * one, one, one, one, None, 0.2, None, 0.01, 0.5)
    assert d_logits.isfinite().all() and terms.isfinite().all()


def two_optimizers() -> list[tuple[list[nn.Parameter], torch.optim.Adam]]:
    """The same parameters twice, after one step of torch's."""
    torch.manual_seed(2)
    start = [torch.randn(70, 33), torch.randn(1), torch.randn(5)]
    first = [torch.randn_like(p) for p in start]
    pairs = []
    for _ in range(2):
        parameters = [nn.Parameter(p.clone()) for p in start]
        optimizer = torch.optim.Adam(parameters, lr=1e-2, eps=1e-5)
        for p, g in zip(parameters, first):
            p.grad = g.clone()
        optimizer.step()
        pairs.append((parameters, optimizer))
    return pairs


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_adam_takes_torchs_steps_and_keeps_its_state(isa: str, max_norm: float):
    (ours, optimizer), (theirs, reference) = two_optimizers()
    native = NativeAdam.of(optimizer, ours)
    assert native is not None
    for seed in range(5):
        torch.manual_seed(seed)
        for p, q in zip(ours, theirs):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        expected = nn.utils.clip_grad_norm_(theirs, max_norm)
        reference.step()
        assert native.step(max_norm) == pytest.approx(float(expected), rel=1e-5)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(dict(optimizer.state[p]), dict(reference.state[q]), rtol=1e-5, atol=1e-6)


def test_adam_takes_no_step_where_a_gradient_is_not_finite(isa: str):
    (parameters, optimizer), _ = two_optimizers()
    native = NativeAdam.of(optimizer, parameters)
    assert native is not None
    before = [p.detach().clone() for p in parameters]
    for p in parameters:
        p.grad = torch.ones_like(p)
    parameters[2].grad[3] = torch.nan  # type: ignore[index]
    assert native.step(1.0) != native.step(1.0), "the norm is NaN"
    torch.testing.assert_close(list(parameters), before, rtol=0, atol=0)
    assert float(optimizer.state[parameters[0]]["step"]) == 1


def test_adam_leaves_to_torch_what_it_does_not_know():
    parameter = nn.Parameter(torch.randn(3))
    for options in ({"weight_decay": 0.1}, {"amsgrad": True}, {"maximize": True}):
        optimizer = torch.optim.Adam([parameter], **options)
        parameter.grad = torch.ones(3)
        assert NativeAdam.of(optimizer, [parameter]) is None, "no state yet"
        optimizer.step()
        assert NativeAdam.of(optimizer, [parameter]) is None
    optimizer = torch.optim.Adam([parameter])
    optimizer.step()
    assert NativeAdam.of(optimizer, [parameter]) is not None
