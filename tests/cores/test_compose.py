"""`Parallel(inputs=...)`: each core reads its features, and nothing of the others'."""

from __future__ import annotations

import pytest
import torch

import holdfast as hf
from accumulator import Accumulator
from conformance.episodes import assert_close
from holdfast import state as state_ops

T, B = 7, 3


def sliced():
    torch.manual_seed(0)
    actor, critic = hf.LSTM(4, 5), hf.GRU(6, 3)
    return hf.Parallel(actor=actor, critic=critic, inputs={"actor": slice(0, 4), "critic": slice(2, 8)})


def test_each_core_reads_its_slice():
    core, x, resets = sliced(), torch.randn(T, B, 8), torch.rand(T, B) < 0.3
    assert core.input_size == 8 and core.output_size == 8
    y, state = core(x, None, resets)
    for name, part in (("actor", x[..., :4]), ("critic", x[..., 2:])):
        alone, alone_state = core.cores[name](part.contiguous(), None, resets)
        assert_close(y[..., core.slices[name]], alone)
        assert all(torch.equal(state[name][leaf], alone_state[leaf]) for leaf in alone_state)


def test_a_core_without_a_slice_reads_everything():
    core = hf.Parallel(inputs={"b": slice(1, 4)}, a=hf.GRU(5, 2), b=Accumulator(3))
    x = torch.randn(B, 5)
    y, _ = core(x)
    assert core.input_size == 5 and torch.equal(y[:, :2], core.cores["a"](x)[0])
    assert torch.equal(y[:, 2:], core.cores["b"](x[:, 1:4])[0])
    assert hf.Parallel(a=hf.GRU(5, 2), b=hf.GRU(5, 2)).inputs == {}


def test_gradients_of_one_core_reach_its_features_only():
    core, x = sliced(), torch.randn(T, B, 8, requires_grad=True)
    y, _ = core(x)
    (of_actor,) = torch.autograd.grad(y[..., core.slices["actor"]].sum(), x, retain_graph=True)
    (of_critic,) = torch.autograd.grad(y[..., core.slices["critic"]].sum(), x)
    assert (of_actor[..., 4:] == 0).all() and (of_actor[..., :4] != 0).any()
    assert (of_critic[..., :2] == 0).all() and (of_critic[..., 2:] != 0).any()


@pytest.mark.parametrize("cuts", [[T], [1] * T, [3, 4]])
def test_any_chunking_gives_the_same(cuts):
    core, x, resets = sliced(), torch.randn(T, B, 8), torch.rand(T, B) < 0.3
    whole, end = core(x, None, resets)
    state, ys, first = core.initial_state(B), [], 0
    for cut in cuts:
        y, state = core(x[first : first + cut], state, resets[first : first + cut])
        ys.append(y)
        first += cut
    assert_close(torch.cat(ys), whole)
    for a, b in zip(state_ops.leaves(state), state_ops.leaves(end)):
        assert_close(a, b)
    _, final, _ = core.trace(x, core.initial_state(B), resets)
    assert_close(final["critic"]["h"], end["critic"]["h"])


def test_it_compiles_to_one_graph():
    core, x, resets = sliced(), torch.randn(T, B, 8), torch.rand(T, B) < 0.3
    compiled = torch.compile(core, fullgraph=True, backend="aot_eager")
    for part, flags in ((x, resets), (x[0], resets[0])):
        assert_close(compiled(part, core.initial_state(B), flags)[0], core(part, core.initial_state(B), flags)[0])


@pytest.mark.parametrize(
    "inputs, message",
    [
        ({"actr": slice(0, 4)}, "inputs names 'actr', but the cores are actor, critic"),
        ({"actor": slice(0, 5)}, r"inputs\['actor'\] gives 5 features \(0 to 5\), but core 'actor' takes 4"),
        ({"actor": slice(0, 8, 2)}, r"inputs\['actor'\] is slice\(0, 8, 2\), expected a slice of the features"),
        ({"actor": slice(2, None)}, r"slice\(2, None, None\), expected a slice of the features"),
        ({"actor": slice(-4, 4)}, "expected a slice of the features"),
        ({"actor": 4}, r"inputs\['actor'\] is 4, expected a slice of the features"),
        ({"actor": slice(3, 7)}, "inputs reaches up to feature 7, but 'critic' reads all of the input and takes 6"),
    ],
)
def test_slices_that_do_not_fit_are_refused(inputs, message):
    with pytest.raises(ValueError, match=message):
        hf.Parallel(actor=hf.LSTM(4, 5), critic=hf.GRU(6, 3), inputs=inputs)


def test_sizes_that_differ_point_to_inputs_and_a_core_named_inputs_is_refused():
    with pytest.raises(ValueError, match=r"input sizes differ: .*give each its features with inputs="):
        hf.Parallel(actor=hf.LSTM(4, 5), critic=hf.GRU(6, 3))
    with pytest.raises(TypeError, match="give the core another name"):
        hf.Parallel(inputs=hf.LSTM(4, 5))
    with pytest.raises(ValueError, match=r"expected \[T, B, 8\]"):
        sliced()(torch.zeros(B, 4))
