"""The linear recurrence and its cores on a GPU. Skipped where there is none, except for what a CPU can check."""

import pytest
import torch
import torch.nn.functional as F

from cores.all_cores import core_of
from holdfast import state as state_ops
from holdfast.kernels.gpu import linear, products
from holdfast.kernels.operands import Resets
from kernels.linear_problems import FORMS, Problem

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
SIZES = [(5, 9, 16), (37, 333, 200), (130, 3, 100), (6, 3000, 128), (128, 1, 2)]
CORES = ("mingru", "lru", "ffm")


@needs_gpu
@pytest.mark.parametrize(("form", "per_channel"), FORMS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", ["none", "zero", "learned", "detach"])
def test_outputs_and_gradients_agree_with_float64(form, per_channel, size, mode):
    rate = None if mode == "none" else 0.1
    problem = Problem(form, per_channel, size, rate, mode == "learned", mode == "detach", device="cuda")
    error, name = problem.worst_error(linear.sequence, torch.float32)
    assert error < 2e-5, name


@needs_gpu
@pytest.mark.parametrize(("form", "per_channel"), FORMS)
def test_steps_give_the_bits_of_the_sequence_and_a_reset_clears_nan(form, per_channel):
    problem = Problem(form, per_channel, (9, 33, 40), 0.2, learned=True)
    named = {n: t.float().cuda() for n, t in problem.tensors.items()}
    named["h0"][3, 5] = float("nan")
    mask = problem.mask.cuda()
    mask[0, 3] = True
    whole, last = linear.sequence(named.get("a"), named["b"], named["h0"], Resets(mask, named["fill"]), form)
    assert whole.isfinite().all()
    state = named["h0"]
    for t in range(9):
        one = slice(t, t + 1)
        a = named.get("a") if per_channel or form == "gated" else named["a"][one]
        h, state = linear.sequence(a, named["b"][one], state, Resets(mask[one], named["fill"]), form)
        assert torch.equal(h[0], whole[t])
    assert torch.equal(state, last)


@needs_gpu
@pytest.mark.parametrize("kind", CORES)
@pytest.mark.parametrize(("precision", "tolerance"), [("exact", 1e-5), ("fast", 1e-3)])
def test_a_core_replays_its_steps_and_agrees_with_float64_on_the_cpu(kind, precision, tolerance):
    torch.manual_seed(0)
    core = core_of(kind, size=24)
    for part in core.modules():
        part.precision = precision
    twin = core_of(kind, size=24).double()
    twin.load_state_dict(core.state_dict())
    core = core.cuda()
    x, resets = torch.randn(40, 50, 24), torch.rand(40, 50) < 0.1
    y, final = core(x.cuda(), None, resets.cuda())
    state = None
    with torch.no_grad():
        for t in range(40):
            step, state = core(x[t].cuda(), state, resets[t].cuda())
            torch.testing.assert_close(step, y[t], atol=tolerance, rtol=0)
    for one, other in zip(state_ops.leaves(state), state_ops.leaves(final)):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=0)
    expected, _ = twin(x.double(), None, resets)
    torch.testing.assert_close(y.double().cpu(), expected, atol=5 * tolerance, rtol=0)
    y.square().mean().backward()
    expected.square().mean().backward()
    for (name, p), q in zip(core.named_parameters(), twin.parameters()):
        error = (p.grad.double().cpu() - q.grad).abs().max() / q.grad.abs().max()
        assert error < 5 * tolerance, f"{name}: {error:.1e}"


@needs_gpu
@pytest.mark.parametrize("kind", CORES)
def test_forward_and_backward_of_a_core_are_captured_in_a_cuda_graph(kind):
    torch.manual_seed(0)
    core = core_of(kind, "learned", 16).cuda()
    x, resets = torch.randn(12, 20, 16, device="cuda"), torch.rand(12, 20, device="cuda") < 0.2
    start = core.initial_state(20)
    start = state_ops.clone(state_ops.detach(start))

    def run():
        y, _ = core(x, start, resets)
        return torch.autograd.grad(y.square().sum(), list(core.parameters()))

    expected = run()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    graph.replay()
    for one, other in zip(got, expected):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bias", [True, False])
def test_a_tf32_product_is_a_linear_layer_and_leaves_the_setting_as_it_was(bias):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    inputs = [torch.randn(s, device=device, requires_grad=True) for s in ((3, 4, 8), (5, 8), *([(5,)] if bias else []))]
    before = torch.backends.cuda.matmul.allow_tf32
    results = []
    for function in (products.linear, F.linear, torch.compile(products.linear, fullgraph=True, backend="aot_eager")):
        y = function(*inputs) if bias else function(*inputs, None)
        results.append([y, *torch.autograd.grad(y.square().sum(), inputs)])
    assert torch.backends.cuda.matmul.allow_tf32 == before
    for values in results[1:]:
        for one, other in zip(results[0], values):
            # TF32 rounds each factor by up to 5e-4 of its size; gradients are products of rounded products.
            assert (one - other).norm() <= (2e-3 if device == "cuda" else 1e-6) * other.norm()
