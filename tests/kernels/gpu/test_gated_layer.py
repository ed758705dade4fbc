"""The GPU kernels on a GPU, against the float64 reference. Skipped where there is none."""

import pytest
import torch
from torch import Tensor

from holdfast.kernels import gpu, reference
from holdfast.kernels.operands import Resets, Weights

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

SIZES = [
    (5, 9, 8, 16),
    (37, 333, 40, 200),
    (9, 45, 13, 100),
    (6, 3000, 24, 128),
    (12, 300, 64, 512),
    (4, 130, 32, 1024),
    (11, 130, 24, 256),  # clusters of 8, 17 of them, the last with two rows
    (6, 9, 8, 136),  # of 5; the last block has 8 units
    (5, 7, 6, 1),  # padded, as is 100: to 16
    (7, 40, 13, 20),  # to 24
]


def _inputs(kind: str, size: tuple[int, int, int, int], rate: float, learned: bool) -> dict[str, Tensor | None]:
    T, B, I, H = size
    gates = 4 if kind == "lstm" else 3
    g = torch.Generator("cuda").manual_seed(B)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, device="cuda")

    def uniform(*shape: int) -> Tensor:
        return (2 * torch.rand(*shape, generator=g, device="cuda") - 1) * H**-0.5

    values: dict[str, Tensor | None] = {"x": normal(T, B, I), "h0": 0.5 * normal(B, H)}
    if kind == "lstm":
        values["c0"] = normal(B, H)
    values |= {"resets": torch.rand(T, B, generator=g, device="cuda") < rate, "reset_h": normal(H) if learned else None}
    if kind == "lstm":
        values["reset_c"] = normal(H) if learned else None
    return values | {
        "w_ih": uniform(gates * H, I), "w_hh": uniform(gates * H, H),
        "b_ih": uniform(gates * H), "b_hh": uniform(gates * H),
    }  # fmt: skip


def _run(folder, kind: str, values, detach: bool = False):  # type: ignore[no-untyped-def]
    """One layer by a folder of `holdfast.kernels`, from its arguments by name."""
    resets = Resets(values["resets"], values["reset_h"], values.get("reset_c"), detach)
    weights = Weights(*[values[name] for name in Weights._fields])
    state = [values[name] for name in ("h0", "c0") if name in values]
    return getattr(folder, kind).sequence(values["x"], *state, resets, weights)


def _outcome(folder, kind, values, dtype, detach=False):  # type: ignore[no-untyped-def]
    leaves = {
        k: v if v is None or v.dtype == torch.bool else v.to(dtype, copy=True).requires_grad_()
        for k, v in values.items()
    }
    outputs = _run(folder, kind, leaves, detach)
    g = torch.Generator("cuda").manual_seed(1)
    torch.autograd.backward(outputs, [torch.randn(o.shape, generator=g, device="cuda").to(o.dtype) for o in outputs])
    return [*(o.detach() for o in outputs), *(v.grad for v in leaves.values() if v is not None and v.grad is not None)]


@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "variant", [{"rate": 0.1}, {"rate": 1.0}, {"rate": 0.1, "learned": True}, {"rate": 0.1, "detach": True}]
)
def test_outputs_and_gradients_agree_with_float64(
    kind: str, size: tuple[int, int, int, int], variant: dict[str, float]
) -> None:
    detach = bool(variant.get("detach", False))
    values = _inputs(kind, size, variant["rate"], bool(variant.get("learned", False)))
    expected = _outcome(reference, kind, values, torch.float64, detach)
    got = _outcome(gpu, kind, values, torch.float32, detach)
    for value, target in zip(got, expected, strict=True):
        assert float((value.double() - target).abs().max()) <= 2e-3 * float(target.abs().max())


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("lstm", (5, 2300, 16, 256)), ("lstm", (9, 700, 24, 512)), ("lstm", (7, 70, 16, 768)), ("lstm", (30, 256, 8, 1024)),
        ("gru", (30, 256, 8, 1024)), ("gru", (7, 70, 16, 768)),
    ],
)  # fmt: skip
def test_blocks_that_divide_their_columns_repeat_bit_for_bit(kind: str, size: tuple[int, int, int, int]) -> None:
    from holdfast.kernels.cuda.tiles import choose_tile

    assert choose_tile(4 if kind == "lstm" else 3, size[3], size[1], backward=True).share > 1
    values = _inputs(kind, size, 0.1, True)
    expected = _outcome(reference, kind, values, torch.float64)
    first = _outcome(gpu, kind, values, torch.float32)
    for value, target in zip(first, expected, strict=True):
        assert float((value.double() - target).abs().max()) <= 2e-3 * float(target.abs().max())
    for _ in range(5):
        assert all(map(torch.equal, first, _outcome(gpu, kind, values, torch.float32)))


@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize("size", [(40, 128, 16, 256), (1, 240, 8, 200), (2, 3, 8, 160)])
def test_clusters_compute_what_blocks_without_them_do_and_repeat_bit_for_bit(
    kind: str, size: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.kernels.cuda import plans, tiles

    def forget() -> None:
        for cached in (plans.recurrence, plans.forward_plan, plans.backward_plan):
            cached.cache_clear()

    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("needs a GPU with clusters")
    forget()
    chosen = tiles.choose_tile(4 if kind == "lstm" else 3, size[3], size[1], backward=False)
    assert chosen.cluster
    values = _inputs(kind, size, 0.1, True)
    first = _outcome(gpu, kind, values, torch.float32)
    for _ in range(5):
        assert all(map(torch.equal, first, _outcome(gpu, kind, values, torch.float32)))
    monkeypatch.setattr(tiles, "choose_tile", lambda *_: chosen._replace(cluster=False))
    forget()
    without = _outcome(gpu, kind, values, torch.float32)
    forget()
    outputs = 3 if kind == "lstm" else 2
    assert all(map(torch.equal, first[:outputs], without[:outputs]))
    for a, b in zip(first[outputs:], without[outputs:], strict=True):  # sums of gradients have another order
        assert float((a - b).abs().max()) <= 2e-3 * float(b.abs().max())


@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize(
    "size",
    [(12, 64, 13, 128), (12, 300, 64, 512), (8, 1100, 24, 256), (9, 100, 24, 256), (6, 2000, 16, 64), (9, 30, 8, 20)],
)
def test_steps_of_one_replay_a_training_sequence_bit_for_bit(kind: str, size: tuple[int, int, int, int]) -> None:
    values = _inputs(kind, size, 0.1, True)
    y = _run(gpu, kind, {**values, "x": values["x"].clone().requires_grad_()})[0]  # type: ignore[union-attr]
    state = {name: values[name] for name in ("h0", "c0") if name in values}
    for t in range(size[0]):
        now = {name: values[name][t : t + 1] for name in ("x", "resets")}  # type: ignore[index]
        y_t, *final = _run(gpu, kind, {**values, **state, **now})
        state = dict(zip(state, final, strict=True))
        assert torch.equal(y_t[0], y[t]), t


@pytest.mark.parametrize(
    ("kind", "size"), [("lstm", (7, 33, 24, 128)), ("gru", (5, 20, 16, 256)), ("gru", (4, 9, 8, 20))]
)
def test_a_cuda_graph_and_a_compiled_layer_compute_what_eager_mode_does(
    kind: str, size: tuple[int, int, int, int]
) -> None:
    values = _inputs(kind, size, 0.2, True)
    values["x"].requires_grad_()  # type: ignore[union-attr]
    values["w_hh"].requires_grad_()  # type: ignore[union-attr]

    def run() -> Tensor:
        return _run(gpu, kind, values)[0]

    def outcome(layer) -> list[Tensor]:  # type: ignore[no-untyped-def]
        y = layer()
        return [y.detach(), *torch.autograd.grad(y, [values["x"], values["w_hh"]], torch.ones_like(y))]

    eager = outcome(run)
    compiled = outcome(torch.compile(run, fullgraph=True))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        outcome(run)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = outcome(run)
    for tensor in captured:
        tensor.fill_(float("nan"))
    graph.replay()
    for a, b, c in zip(eager, compiled, captured, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


@pytest.mark.parametrize("name", ["LSTM", "GRU"])
def test_a_core_compiles_without_a_break_and_computes_what_eager_mode_does(name: str) -> None:
    import holdfast as hf

    core = getattr(hf, name)(24, 64).cuda()
    x, resets = torch.randn(5, 6, 24, device="cuda"), torch.rand(5, 6, device="cuda") < 0.3
    state = core.initial_state(6)
    y, _ = core(x, state, resets)
    compiled, _ = torch.compile(core, fullgraph=True)(x, state, resets)
    assert torch.equal(y, compiled)


def test_sequences_of_many_lengths_share_their_kernels() -> None:
    from holdfast.kernels.cuda import kernels

    values = _inputs("gru", (3, 40, 8, 32), 0.1, False)
    _run(gpu, "gru", values)
    loaded = kernels.load.cache_info().currsize
    for steps in (1, 2, 7, 30):
        flags = None if steps == 1 else torch.zeros(steps, 40, dtype=torch.bool, device="cuda")
        _run(gpu, "gru", {**values, "x": torch.randn(steps, 40, 8, device="cuda"), "resets": flags})
    assert kernels.load.cache_info().currsize <= loaded + 1  # one more: without resets


def test_a_poisoned_row_leaves_the_others_bit_identical_and_a_reset_clears_it() -> None:
    values = _inputs("lstm", (6, 20, 8, 64), 0.0, False)
    clean = _run(gpu, "lstm", values)[0]
    values["h0"][3] = float("nan")  # type: ignore[index]
    values["resets"][2, 3] = True  # type: ignore[index]
    poisoned = _run(gpu, "lstm", values)[0]
    others = [b for b in range(20) if b != 3]
    assert torch.equal(poisoned[:, others], clean[:, others])
    assert poisoned[:2, 3].isnan().all() and poisoned[2:, 3].isfinite().all()


def test_repeated_runs_are_bit_identical() -> None:
    values = _inputs("lstm", (20, 600, 32, 512), 0.05, True)
    first, second = (_outcome(gpu, "lstm", values, torch.float32) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_second_derivative_is_refused_with_what_to_do() -> None:
    values = _inputs("gru", (3, 4, 8, 32), 0.1, False)
    values["x"].requires_grad_()  # type: ignore[union-attr]
    y = _run(gpu, "gru", values)[0]
    with pytest.raises(RuntimeError, match='kernel="reference"'):
        torch.autograd.grad(y.sum(), values["x"], create_graph=True)
