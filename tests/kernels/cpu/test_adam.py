"""Adam in C against torch's, for every instruction set this CPU has."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from holdfast.kernels.cpu import library
from holdfast.kernels.cpu.update import NativeAdam

pytestmark = pytest.mark.skipif(library.load().handle is None, reason=f"no native kernel: {library.load().reason}")


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
    native = NativeAdam.try_create(optimizer, ours)
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
    native = NativeAdam.try_create(optimizer, parameters)
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
        assert NativeAdam.try_create(optimizer, [parameter]) is None, "no state yet"
        optimizer.step()
        assert NativeAdam.try_create(optimizer, [parameter]) is None
    optimizer = torch.optim.Adam([parameter])
    optimizer.step()
    assert NativeAdam.try_create(optimizer, [parameter]) is not None


@pytest.mark.parametrize("moment", ["exp_avg", "exp_avg_sq"])
def test_moments_of_another_size_never_reach_c(moment: str):
    parameter = nn.Parameter(torch.randn(300))
    optimizer = torch.optim.Adam([parameter])
    parameter.grad = torch.ones(300)
    optimizer.step()
    optimizer.state[parameter][moment] = torch.zeros(1)
    with pytest.raises(ValueError, match=rf"{moment} has shape \[1\], its parameter \[300\]"):
        NativeAdam.try_create(optimizer, [parameter])
