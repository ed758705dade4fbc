"""Attention over a window: the portable form against the reference in float64, forward and backward."""

from __future__ import annotations

import pytest
import torch

from holdfast.kernels import portable, reference
from holdfast.kernels.operands import Ring
from holdfast.kernels.portable import band

HEADS, SIZE = 2, 3


def operands(T, B, R, seed, dtype=torch.float64):
    """q, k, v, a ring with rows of all ages, and a bias; all but the ages take gradients."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    q, k, v = (draw(T, B, HEADS, SIZE).requires_grad_() for _ in range(3))
    age = torch.randint(0, 2 * R, (B,), generator=generator, dtype=torch.int32)
    reached = torch.arange(R) < age.unsqueeze(1)  # [B, R]
    slots = [torch.where(reached[:, None, :, None], draw(B, HEADS, R, SIZE), 0.0).requires_grad_() for _ in range(2)]
    return q, k, v, Ring(slots[0], slots[1], age), draw(HEADS, R + 1).requires_grad_()


def resets_of(kind, T, B, seed):
    if kind == "none":
        return None
    return torch.rand(T, B, generator=torch.Generator().manual_seed(seed)) < {"some": 0.1, "all": 1.0}[kind]


@pytest.mark.parametrize("resets", ["none", "some", "all"])
@pytest.mark.parametrize(("T", "B", "R"), [(1, 2, 1), (5, 3, 4), (17, 2, 3), (50, 2, 5), (20, 3, 40), (45, 1, 41)])
def test_sequences_equal_the_reference_with_their_gradients(T, B, R, resets):
    *inputs, ring, bias = operands(T, B, R, seed=T + R)
    mask = resets_of(resets, T, B, seed=T)
    leaves = [*inputs, ring.keys, ring.values, bias]
    results = []
    for kernel in (reference.window, portable.window):
        y, after = kernel.sequence(*inputs, ring, mask, bias)
        weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype)
        loss = (y * weight).sum() + after.keys.square().sum() + after.values.sin().sum()
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        results.append((y, *after, *gradients))
    for expected, got in zip(*results):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("length", [23, 50])
def test_results_do_not_depend_on_the_length_of_a_block(length, monkeypatch):
    *inputs, ring, bias = operands(50, 2, 7, seed=length)
    mask = resets_of("some", 50, 2, seed=length)
    results = []
    for _ in range(2):
        y, _ = portable.window.sequence(*inputs, ring, mask, bias)
        results.append((y, *torch.autograd.grad(y.square().sum(), [*inputs, ring.keys, ring.values, bias])))
        monkeypatch.setattr(band, "block_length", lambda *sizes: length)
    for expected, got in zip(*results):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    ("rows", "T", "R", "on_gpu", "length"),
    [(64, 128, 63, False, 31), (64, 128, 63, True, 128), (8192, 128, 63, True, 31), (512, 128, 63, True, 31), (256, 128, 63, True, 62),
     (4, 9, 3, True, 16), (4, 2048, 199, True, 396)],
)  # fmt: skip
def test_blocks_are_longer_on_a_gpu_where_there_are_few_rows(rows, T, R, on_gpu, length):
    assert band.block_length(rows, T, R, on_gpu) == length


def test_float32_is_as_exact_as_its_digits():
    *inputs, ring, bias = operands(60, 2, 12, seed=3, dtype=torch.float32)
    mask = resets_of("some", 60, 2, seed=5)
    y, _ = portable.window.sequence(*inputs, ring, mask, bias)
    wide = Ring(ring.keys.double(), ring.values.double(), ring.age)
    expected, _ = reference.window.sequence(*[part.double() for part in inputs], wide, mask, bias.double())
    torch.testing.assert_close(y.double(), expected, atol=2e-6, rtol=0)
    dy = torch.randn(y.shape)
    for got, right in zip(torch.autograd.grad(y, inputs, dy), torch.autograd.grad(expected, inputs, dy.double())):
        torch.testing.assert_close(got.double(), right.double(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("leaf", [0, 1, 2], ids=["query", "key", "value"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_reaches_only_the_queries_that_see_it(leaf, poison):
    T, B, R, at = 30, 2, 6, 10
    *inputs, ring, bias = operands(T, B, R, seed=0)
    resets = torch.zeros(T, B, dtype=torch.bool)
    resets[13, 0] = True
    clean, _ = portable.window.sequence(*inputs, ring, resets, bias)
    bad = [part.detach().clone() for part in inputs]
    bad[leaf][at, :, 1, 2] = poison
    for part in bad:
        part.requires_grad_()
    y, after = portable.window.sequence(*bad, ring, resets, bias)
    seen = torch.zeros(T, B, dtype=torch.bool)
    seen[at:13, 0] = True  # to the end of its episode
    seen[at : at + R + 1, 1] = True  # to the end of the window
    assert torch.equal(y.isnan().all(-1).all(-1), seen) and torch.equal(y.isnan().any(-1).any(-1), seen)
    torch.testing.assert_close(y[~seen], clean[~seen])
    assert all(part.isfinite().all() for part in after)
    gradients = torch.autograd.grad(y[~seen].sum(), [*bad, bias])
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_a_poisoned_ring_reaches_only_the_queries_that_see_it():
    T, B, R = 12, 2, 4
    *inputs, ring, bias = operands(T, B, R, seed=0)
    ring = Ring(ring.keys.detach().clone(), ring.values.detach(), torch.full((B,), R, dtype=torch.int32))
    ring.keys[:, 0, 3] = torch.nan  # the last step before the sequence
    resets = torch.zeros(T, B, dtype=torch.bool)
    resets[2, 1] = True
    y, after = portable.window.sequence(*inputs, ring, resets, bias)
    assert y.isnan().any(-1).any(-1).sum(0).tolist() == [R, 2]
    assert all(part.isfinite().all() for part in after)
