"""The matrix memory in chunks: against the reference in float64, forward and backward; what is not finite."""

from __future__ import annotations

import pytest
import torch

from holdfast.kernels import portable, reference
from holdfast.kernels.operands import MatrixInputs, Resets
from holdfast.kernels.portable.mlstm import CHUNK

HEADS, SIZE = 2, 3


def operands(T, B, seed, dtype=torch.float64, closed=0.0):
    """Inputs, a memory and a learned start, all taking gradients. closed: the share of forget gates that let nothing by."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k, v = (draw(T, B, HEADS, SIZE) for _ in range(3))
    log_f = torch.nn.functional.logsigmoid(draw(T, B, HEADS) + 2)
    log_f = torch.where(torch.rand(T, B, HEADS, generator=generator) < closed, -80.0, log_f)
    parts = (q, torch.nn.functional.normalize(k, dim=-1), v, draw(T, B, HEADS).sigmoid(), log_f)
    inputs = MatrixInputs(*[part.to(dtype).requires_grad_() for part in parts])
    memory, start = draw(B, HEADS, SIZE, SIZE), draw(HEADS, SIZE, SIZE)
    return inputs, memory.to(dtype).requires_grad_(), start.to(dtype).requires_grad_()


def mask_of(kind, T, B, seed):
    if kind == "none":
        return None
    return torch.rand(T, B, generator=torch.Generator().manual_seed(seed)) < {"some": 0.1, "all": 1.0}[kind]


@pytest.mark.parametrize("resets", ["none", "some", "all"])
@pytest.mark.parametrize("mode", ["zero", "learned", "detach"])
@pytest.mark.parametrize(("T", "B"), [(1, 2), (7, 3), (CHUNK, 1), (2 * CHUNK + 5, 2)])
def test_sequences_equal_the_reference_with_their_gradients(T, B, mode, resets):
    inputs, memory, start = operands(T, B, seed=T)
    rule = Resets(mask_of(resets, T, B, seed=T), start if mode == "learned" else None, None, mode == "detach")
    results = []
    for kernel in (reference.mlstm, portable.mlstm):
        y, after = kernel.sequence(inputs, memory, rule)
        weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype)
        loss = (y * weight).sum() + after.square().sum()
        leaves = [*inputs, memory, start]
        results.append((y, after, *torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)))
    for expected, got in zip(*results):
        torch.testing.assert_close(got, expected)


def test_gates_that_close_cost_no_digits_of_those_after_them():
    inputs, memory, _ = operands(4 * CHUNK, 2, seed=0, dtype=torch.float32, closed=0.3)
    y, after = portable.mlstm.sequence(inputs, memory, Resets())
    expected, right = reference.mlstm.sequence(
        MatrixInputs(*[part.double() for part in inputs]), memory.double(), Resets()
    )
    torch.testing.assert_close(y.double(), expected, atol=3e-6, rtol=0)
    torch.testing.assert_close(after.double(), right, atol=3e-6, rtol=0)


@pytest.mark.parametrize("leaf", range(5), ids=MatrixInputs._fields)
def test_a_step_that_is_not_finite_reaches_the_rest_of_its_episode_and_nothing_else(leaf):
    T, B, at = 2 * CHUNK, 2, 10
    inputs, memory, _ = operands(T, B, seed=0)
    mask = torch.zeros(T, B, dtype=torch.bool)
    mask[13, 0] = mask[CHUNK + 3, 1] = True
    clean, final = portable.mlstm.sequence(inputs, memory, Resets(mask))
    parts = [part.detach().clone() for part in inputs]
    parts[leaf][at].view(B, -1)[:, 0] = torch.nan
    bad = MatrixInputs(*[part.requires_grad_() for part in parts])
    y, after = portable.mlstm.sequence(bad, memory, Resets(mask))
    spoiled = torch.zeros(T, B, dtype=torch.bool)
    spoiled[at:13, 0] = spoiled[at : CHUNK + 3, 1] = True
    assert torch.equal(y.isnan().all(-1).all(-1), spoiled) and torch.equal(y.isnan().any(-1).any(-1), spoiled)
    torch.testing.assert_close(y[~spoiled], clean[~spoiled])
    torch.testing.assert_close(after, final)
    gradients = torch.autograd.grad(y[~spoiled].sum(), [*bad, memory])
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_a_memory_that_is_not_finite_ends_with_its_episode():
    T, B = 6, 2
    inputs, memory, start = operands(T, B, seed=0)
    poisoned = memory.detach().clone()
    poisoned[:, 1, 0, 0] = torch.nan
    mask = torch.zeros(T, B, dtype=torch.bool)
    mask[2, 1] = True
    y, after = portable.mlstm.sequence(inputs, poisoned.requires_grad_(), Resets(mask, start))
    assert y.isnan().any(-1).any(-1).sum(0).tolist() == [T, 2]
    assert after.isnan().flatten(1).any(1).tolist() == [True, False]
    gradients = torch.autograd.grad(y[2:, 1].sum(), [*inputs, poisoned])
    assert all(gradient.isfinite().all() for gradient in gradients)
