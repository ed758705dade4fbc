"""The portable kernel is the reference, faster: outputs and gradients, every dtype, every kind of reset."""

from __future__ import annotations

from itertools import product

import pytest
import torch

import holdfast as hf
from holdfast.kernels import portable, reference
from kernels.recurrences import RESETS, Layer, assert_matches_reference, relative_error

CELLS = ("lstm", "gru")
OPS = {"lstm": torch.ops.holdfast.lstm_portable, "gru": torch.ops.holdfast.gru_portable}


def small(cell, **options):
    return Layer.random(cell, 4, 3, 2, 3, **options).to(torch.float64)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize(
    ("resets", "learned", "bias", "detach"),
    [*product(RESETS, (False, True), (True,), (False,)), ("random", False, False, False), ("random", True, True, True)],
)
def test_gradients_pass_gradcheck(cell, resets, learned, bias, detach):
    layer = small(cell, resets=resets, learned=learned, bias=bias, detach=detach)
    if detach:  # values cross a reset and gradients do not, so finite differences cannot check it; the reference does
        assert_matches_reference(portable, layer, torch.float64, 1e-10)
        return
    inputs = layer.tensors()

    def run(*values):
        return layer.with_tensors(dict(zip(inputs, values))).run(portable)

    assert torch.autograd.gradcheck(run, tuple(inputs.values()))


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize(
    ("resets", "learned", "detach"), [*product(RESETS, (False, True), (False,)), ("random", False, True)]
)
def test_float32_over_128_steps_agrees_with_the_float64_reference(cell, resets, learned, detach):
    layer = Layer.random(cell, 128, 5, 13, 19, resets=resets, learned=learned, detach=detach)  # sizes that fit no tile
    assert_matches_reference(portable, layer, torch.float32, 1e-5)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize(("T", "B", "I", "H"), [(1, 1, 1, 1), (3, 1, 5, 2), (2, 7, 1, 33), (70, 9, 3, 64)])
def test_odd_sizes(cell, T, B, I, H):
    assert_matches_reference(portable, Layer.random(cell, T, B, I, H), torch.float64, 1e-10)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("resets", RESETS)
@pytest.mark.parametrize(
    ("dtype", "state_dtype", "tolerance"),
    [
        (torch.bfloat16, None, 2e-2),
        (torch.float16, None, 3e-3),
        (torch.bfloat16, torch.float32, 1.5e-2),
        (torch.float16, torch.float32, 3e-3),
    ],
    ids=["bf16", "fp16", "bf16 autocast", "fp16 autocast"],
)
def test_half_precision_stays_near_the_reference(cell, resets, dtype, state_dtype, tolerance):
    layer = Layer.random(cell, 16, 5, 8, 12, resets=resets, learned=True)
    assert_matches_reference(portable, layer, dtype, tolerance, state_dtype)


@pytest.mark.parametrize("cell", CELLS)
def test_the_state_keeps_its_dtype_under_autocast_and_the_output_takes_the_products(cell):
    y, *state = Layer.random(cell, 3, 2, 4, 5).to(torch.bfloat16, torch.float32).run(portable)
    assert y.dtype == torch.bfloat16 and all(s.dtype == torch.float32 for s in state)


@pytest.mark.parametrize("cell", CELLS)
def test_no_resets_and_all_false_are_the_same(cell):
    layer = Layer.random(cell, 6, 3, 4, 5, resets="none").to(torch.float32)
    flagged = layer.with_mask(torch.zeros(6, 3, dtype=torch.bool))
    for a, b in zip(layer.answer(portable).values(), flagged.answer(portable).values()):
        assert torch.equal(a, b)


@pytest.mark.parametrize("cell", CELLS)
def test_nan_before_a_reset_does_not_survive_it(cell):
    layer = Layer.random(cell, 5, 3, 4, 5, resets="none").to(torch.float32)
    clean = [o.clone() for o in layer.run(portable)]
    layer = layer.with_mask(torch.zeros(5, 3, dtype=torch.bool))
    layer.resets.mask[0, 1] = True
    with torch.no_grad():
        for s in layer.state:
            s[1] = float("nan")
    outputs = layer.run(portable)
    assert all(torch.isfinite(o).all() for o in outputs)
    for got, expected in zip(outputs, clean):
        rows = [0, 2]
        assert torch.equal(got[..., rows, :], expected[..., rows, :])
    outputs[0].sum().backward()
    assert all(torch.isfinite(t.grad).all() for t in layer.tensors().values())


@pytest.mark.parametrize("cell", CELLS)
def test_the_reset_value_gets_the_gradient_of_the_rows_and_steps_that_were_reset(cell):
    layer = Layer.random(cell, 4, 2, 3, 3, resets="none", learned=True).to(torch.float64)
    assert layer.answer(portable)["d reset_h"].abs().sum() == 0
    layer = layer.with_mask(torch.zeros(4, 2, dtype=torch.bool))
    layer.resets.mask[2, 1] = True
    got, expected = layer.answer(portable), layer.answer(reference)
    for name in ("d reset_h", "d reset_c")[: len(layer.state)]:
        assert expected[name].abs().sum() > 0
        assert relative_error(got[name], expected[name]) < 1e-12


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("wanted", ["x", "h0", "w_ih", "w_hh", "b_hh", "reset_h"])
def test_each_gradient_alone_is_the_same_as_with_all_the_others(cell, wanted):
    layer = small(cell, learned=True)
    everything = layer.answer(portable)[f"d {wanted}"]
    alone = small(cell, learned=True)
    for name, value in alone.tensors().items():
        value.requires_grad_(name == wanted)
    outputs = alone.run(portable)
    generator = torch.Generator().manual_seed(7)
    loss = sum((o * torch.randn(o.shape, generator=generator, dtype=o.dtype)).sum() for o in outputs) / 4
    (grad,) = torch.autograd.grad(loss, [alone.tensors()[wanted]])
    torch.testing.assert_close(grad, everything)


@pytest.mark.parametrize("cell", CELLS)
def test_gradients_of_the_final_state_alone(cell):
    def final_state_gradient(kernel):
        layer = small(cell)
        (sum(s.sum() for s in layer.run(kernel)[1:])).backward()
        return [t.grad for t in layer.tensors().values()]

    for got, expected in zip(final_state_gradient(portable), final_state_gradient(reference)):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("cell", CELLS)
def test_inputs_in_any_memory_layout_give_the_same(cell):
    layer = small(cell)
    expected = layer.answer(portable)
    layer.x = layer.x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    w_ih, w_hh = (w.detach().t().contiguous().t().requires_grad_() for w in layer.weights[:2])
    layer.weights = layer.weights._replace(w_ih=w_ih, w_hh=w_hh)
    for name, value in layer.answer(portable).items():
        torch.testing.assert_close(value, expected[name])


@pytest.mark.parametrize("cell", CELLS)
def test_nothing_that_comes_in_is_changed(cell):
    layer = small(cell, learned=True)
    before = {name: t.detach().clone() for name, t in layer.tensors().items()}
    layer.answer(portable)
    assert all(torch.equal(t, before[name]) for name, t in layer.tensors().items())


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("mixed", [False, True])
def test_the_operator_is_registered_as_torch_wants_it(cell, mixed):
    """Schema, fake kernel and autograd registration, as torch itself checks them."""
    layer = small(cell, learned=True).to(*((torch.bfloat16, torch.float32) if mixed else (torch.float32,)))
    state = (*layer.state, None)[:2]
    arguments = (layer.x, *state, layer.resets.mask, layer.resets.h, layer.resets.c, *layer.weights, False, True)
    torch.library.opcheck(
        OPS[cell], arguments, test_utils=("test_schema", "test_autograd_registration", "test_faketensor")
    )


@pytest.mark.parametrize("cell", CELLS)
def test_a_second_derivative_is_refused_and_not_wrong(cell):
    layer = small(cell)
    with pytest.raises(RuntimeError, match='kernel="reference"'):
        torch.autograd.grad(layer.run(portable)[0].sum(), [layer.x], create_graph=True)


@pytest.mark.parametrize("core_class", [hf.LSTM, hf.GRU])
def test_flags_of_any_layout_give_the_same_gradients_with_a_learned_start(core_class):
    """Flags that come as [B, T] and are transposed decide the layout of what is selected by them."""
    torch.manual_seed(3)
    core, x = core_class(3, 4, reset="learned", kernel="portable"), torch.randn(7, 2, 3)
    flags = (torch.rand(2, 7) < 0.4).t()
    gradients = []
    for resets in (flags, flags.contiguous()):
        core.zero_grad()
        core(x, core.initial_state(2), resets)[0].square().sum().backward()
        gradients.append([p.grad.clone() for p in core.parameters()])
    assert not flags.is_contiguous() and all(map(torch.equal, *gradients))
