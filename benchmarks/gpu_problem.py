"""What `gpu_recurrence.py` checks and times: errors against float64, contenders, medians."""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from holdfast.kernels import gpu, portable, reference
from holdfast.kernels.operands import Resets, Weights

Size = tuple[int, int, int, int]  # T, B, I, H
CHECKS: list[Size] = [
    (37, 333, 40, 200), (64, 128, 128, 128), (64, 128, 64, 256), (33, 300, 64, 512),  # these with every variant
    (9, 17, 24, 64), (6, 5000, 40, 96), (5, 45, 13, 100), (5, 1, 8, 16), (20, 2500, 64, 256), (6, 1500, 64, 512),
    (12, 256, 64, 1024), (300, 64, 32, 128),
]  # fmt: skip
THOROUGH = 4
Values = dict[str, Tensor | None]


def poison() -> None:
    """Fills the memory of the next allocations with NaN, so that an unwritten element shows."""
    sizes = (1 << 26, 1 << 24, 1 << 22, *[1 << 17] * 8, *[1 << 10] * 64)
    blocks = [torch.full((n,), float("nan"), device="cuda") for n in sizes]
    del blocks


def random_values(kind: str, size: Size, rate: float | None, learned: bool) -> Values:
    """Arguments of a layer, float64 with values that float32 has; a start state that is not zero."""
    T, B, I, H = size
    gates, generator = (4 if kind == "lstm" else 3), torch.Generator("cuda").manual_seed(sum(size))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").double()

    def uniform(*shape: int) -> Tensor:
        return ((torch.rand(*shape, generator=generator, device="cuda") * 2 - 1) * H**-0.5).double()

    values: Values = {"x": normal(T, B, I), "h0": normal(B, H)}
    if kind == "lstm":
        values["c0"] = normal(B, H)
    values["resets"] = None if rate is None else torch.rand(T, B, generator=generator, device="cuda") < rate
    values["reset_h"] = normal(H) if learned else None
    if kind == "lstm":
        values["reset_c"] = normal(H) if learned else None
    weights = {"w_ih": uniform(gates * H, I), "w_hh": uniform(gates * H, H)}
    return values | weights | {"b_ih": uniform(gates * H), "b_hh": uniform(gates * H)}


def run_layer(folder: Any, kind: str, values: Values, dtype: torch.dtype, detach: bool) -> dict[str, Tensor]:
    """Outputs, and gradients of a fixed random weighting of all of them, of the size that a mean loss has."""
    inputs = {
        k: v if v is None or v.dtype == torch.bool else v.to(dtype, copy=True).requires_grad_()
        for k, v in values.items()
    }
    resets = Resets(inputs["resets"], inputs["reset_h"], inputs.get("reset_c"), detach)
    state = [inputs[name] for name in ("h0", "c0") if name in inputs]
    weights = Weights(*[inputs[name] for name in Weights._fields])  # type: ignore[arg-type]
    outputs = getattr(folder, kind).sequence(inputs["x"], *state, resets, weights)
    generator = torch.Generator("cuda").manual_seed(7)
    factors = [1e-5 * torch.randn(o.shape, generator=generator, device="cuda", dtype=torch.float64) for o in outputs]
    torch.autograd.backward(outputs, [f.to(o.dtype) for f, o in zip(factors, outputs)])
    result = dict(zip(("y", "h_n", "c_n"), (o.detach() for o in outputs)))
    return result | {"d_" + k: v.grad for k, v in inputs.items() if v is not None and v.grad is not None}


def errors(kind: str, size: Size, rate: float | None, precision: str, learned: bool, detach: bool) -> dict[str, float]:
    """Per tensor: largest absolute error over largest absolute value of the float64 reference."""
    values = random_values(kind, size, rate, learned)
    expected = run_layer(reference, kind, values, torch.float64, detach)
    poison()
    got = run_layer(gpu if precision == "fast" else portable, kind, values, torch.float32, detach)
    found = {}
    for name, value in expected.items():
        scale = float(value.abs().max())
        difference = float((got[name].double() - value).abs().max())
        found[name] = difference / scale if scale > 0 else difference
    return found


def worst_errors(kind: str, precision: str) -> dict[str, float]:
    """Worst error per tensor over sizes, reset rates (none, 1%, 10%, all), learned starts and detached gradients."""
    plain = [(rate, False, False) for rate in (None, 0.01, 0.1, 1.0)]
    worst: dict[str, float] = {}
    for i, size in enumerate(CHECKS if precision == "fast" else CHECKS[:THOROUGH]):
        variants = [*plain, (0.1, True, False), (0.1, False, True)] if i < THOROUGH else plain[1:2]
        for rate, learned, detach in variants:
            for name, error in errors(kind, size, rate, precision, learned, detach).items():
                worst[name] = float("nan") if math.isnan(error) else max(worst.get(name, 0.0), error)
    return worst


class Contender:
    """One way to run a layer: forward, and forward + backward."""

    def __init__(
        self, kind: str, shape: tuple[int, int, int], dtype: torch.dtype, rate: float | None, ours: bool
    ) -> None:
        B, T, H = shape
        torch.manual_seed(0)
        module: Any = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}[kind](H, H).cuda().to(dtype)
        module.flatten_parameters()  # a change of dtype scatters cuDNN's weights
        x = torch.randn(T, B, H, device="cuda", dtype=dtype, requires_grad=True)
        gradient = torch.randn(T, B, H, device="cuda", dtype=dtype)
        weights = Weights(module.weight_ih_l0, module.weight_hh_l0, module.bias_ih_l0, module.bias_hh_l0)
        state = torch.zeros(B, H, device="cuda")
        resets = Resets(None if rate is None else torch.rand(T, B, device="cuda") < rate)
        self.forward: Callable[[], Tensor]
        if not ours:
            self.forward = lambda: module(x)[0]
        elif kind == "lstm":
            self.forward = lambda: gpu.lstm.sequence(x, state, state, resets, weights)[0]
        else:
            self.forward = lambda: gpu.gru.sequence(x, state, resets, weights)[0]
        self.inputs, self.gradient = [x, *weights], gradient

    def both(self) -> tuple[Tensor, ...]:
        """Gradients of the input and all weights."""
        return torch.autograd.grad(self.forward(), self.inputs, self.gradient)


def median_times(functions: dict[str, Callable[[], Any]], rounds: int, repeats: int) -> dict[str, float]:
    """Median ms of each, contenders taking turns; the first round warms up."""
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for round_ in range(rounds + 1):
        for name, function in functions.items():
            events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
            function()
            for start, end in events:
                start.record()
                function()
                end.record()
            torch.cuda.synchronize()
            if round_:
                samples[name] += [start.elapsed_time(end) for start, end in events]
    return {name: statistics.median(values) for name, values in samples.items()}


def captured(function: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of one call (what the GPU does, without the host) and the call's result."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph, result


def peak_bytes(function: Callable[[], Any]) -> int:
    """Memory that one call takes at its peak, above what was held before."""
    function()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = function()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del result
    return peak
