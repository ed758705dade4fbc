"""GPU recurrences beside cuDNN: checked against float64 first, then timed, in one run.

    python benchmarks/gpu_recurrence.py --json benchmarks/gpu_recurrence.json --table benchmarks/gpu_recurrence.md

cuDNN runs without resets (it has none); ours with resets. Contenders alternate within a round and medians over all rounds
are compared, because at small sizes the host decides and its speed wanders. Times are CUDA-event times of eager calls
issued back to back, in ms; forward is training mode (it keeps what the backward needs).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from holdfast.kernels import gpu, reference

SHAPES = [
    (128, 64, 128),
    (1024, 64, 128),
    (8192, 64, 128),
    (128, 128, 256),
    (1024, 64, 256),
    (8192, 32, 256),
    (256, 64, 512),
    (2048, 64, 512),
    (256, 64, 1024),
]  # fmt: skip  B, T, H; the input size is H
CHECKS = [  # T, B, I, H
    (37, 333, 40, 200), (64, 128, 128, 128), (9, 17, 24, 64), (6, 5000, 40, 96), (5, 45, 13, 100), (5, 1, 8, 16),
    (64, 128, 64, 256), (20, 2500, 64, 256), (33, 300, 64, 512), (6, 1500, 64, 512), (12, 256, 64, 1024), (300, 64, 32, 128),
]  # fmt: skip
COPY_RATE = 4.3e12  # bytes/s of a device-to-device copy on one H200, read and written counted
HALF_RATE = 790e12  # FLOP/s of a large half-precision product there


def poison() -> None:
    """Leaves NaN in the memory that the next allocations will get, so that an unwritten element shows."""
    blocks = [
        torch.full((n,), float("nan"), device="cuda")
        for n in (1 << 26, 1 << 24, 1 << 22, *[1 << 17] * 8, *[1 << 10] * 64)
    ]
    del blocks


def arguments(
    kind: str, T: int, B: int, I: int, H: int, p: float | None, fill: bool, seed: int
) -> dict[str, Tensor | None]:
    gates, generator = (4 if kind == "lstm" else 3), torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return (torch.rand(*shape, generator=generator, device="cuda", dtype=torch.float64) * 2 - 1) * H**-0.5

    states = {"h0": 0.5 * normal(B, H)} | ({"c0": normal(B, H)} if kind == "lstm" else {})
    fills: dict[str, Tensor | None] = {"fill_h": 0.3 * normal(H) if fill else None}
    if kind == "lstm":
        fills["fill_c"] = 0.3 * normal(H) if fill else None
    resets = None if p is None else torch.rand(T, B, generator=generator, device="cuda") < p
    weights = {"w_ih": uniform(gates * H, I), "w_hh": uniform(gates * H, H)}
    return {
        "x": normal(T, B, I),
        **states,
        "resets": resets,
        **fills,
        **weights,
        "b_ih": uniform(gates * H),
        "b_hh": uniform(gates * H),
    }


def run_layer(
    function: Callable[..., Any], values: dict[str, Tensor | None], dtype: torch.dtype, cut: bool, **options: str
) -> dict[str, Tensor]:
    """Outputs, and gradients of a fixed random weighting of all of them, of the size that a mean loss has."""
    inputs = {k: v if v is None or v.dtype == torch.bool else v.detach().to(dtype).clone().requires_grad_() for k, v in values.items()}
    outputs = function(**inputs, cut=cut, **options)
    generator = torch.Generator("cuda").manual_seed(7)
    weights = [1e-5 * torch.randn(o.shape, generator=generator, device="cuda", dtype=torch.float64) for o in outputs]
    torch.autograd.backward(outputs, [w.to(o.dtype) for w, o in zip(weights, outputs)])
    result = dict(zip(("y", "h_n", "c_n"), (o.detach() for o in outputs)))
    return result | {"d_" + k: v.grad for k, v in inputs.items() if v is not None and v.grad is not None}


def errors(
    kind: str, size: tuple[int, int, int, int], p: float | None, precision: str, fill: bool = False, cut: bool = False
) -> dict[str, float]:
    """Per tensor: largest absolute error over largest absolute value of the float64 reference."""
    values = {
        k: v if v is None or v.dtype == torch.bool else v.float().double()
        for k, v in arguments(kind, *size, p, fill, sum(size)).items()
    }
    expected = run_layer(getattr(reference, kind), values, torch.float64, cut)
    poison()
    got = run_layer(getattr(gpu, kind), values, torch.float32, cut, precision=precision)
    found = {}
    for name, value in expected.items():
        scale = float(value.abs().max())
        difference = float((got[name].double() - value).abs().max())
        found[name] = difference / scale if scale > 0 else difference
    return found


def check(kind: str, precision: str) -> dict[str, float]:
    """Worst error per tensor over all sizes, reset rates, fills and cuts."""
    worst: dict[str, float] = {}
    for size in CHECKS if precision == "fast" else CHECKS[:4] + CHECKS[8:9]:
        variants: list[dict[str, Any]] = [{"p": None}, {"p": 0.01}, {"p": 0.1}, {"p": 1.0}]
        if size in CHECKS[:2] + CHECKS[6:7]:
            variants += [{"p": 0.1, "fill": True}, {"p": 0.1, "cut": True}]
        for variant in variants:
            for name, error in errors(kind, size, precision=precision, **variant).items():
                worst[name] = float("nan") if math.isnan(error) else max(worst.get(name, 0.0), error)
    return worst


class Contender:
    """One way to run a layer: forward, and forward + backward."""

    def __init__(
        self, kind: str, shape: tuple[int, int, int], dtype: torch.dtype, rate: float | None, ours: bool
    ) -> None:
        B, T, H = shape
        torch.manual_seed(0)
        module = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}[kind](H, H).cuda().to(dtype)
        x = torch.randn(T, B, H, device="cuda", dtype=dtype, requires_grad=True)
        gradient = torch.randn(T, B, H, device="cuda", dtype=dtype)
        weights = [module.weight_ih_l0, module.weight_hh_l0, module.bias_ih_l0, module.bias_hh_l0]
        state = torch.zeros(B, H, device="cuda")
        resets = None if rate is None else torch.rand(T, B, device="cuda") < rate
        if not ours:
            self.forward = lambda: module(x)[0]
        elif kind == "lstm":
            self.forward = lambda: gpu.lstm(x, state, state, resets, None, None, *weights)[0]
        else:
            self.forward = lambda: gpu.gru(x, state, resets, None, *weights)[0]
        self.both = lambda: torch.autograd.grad(self.forward(), [x, *weights], gradient)


def median_times(functions: dict[str, Callable[[], Any]], rounds: int, repeats: int) -> dict[str, float]:
    """Median ms of each, contenders alternating."""
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
            if round_:  # the first round warms up
                samples[name] += [start.elapsed_time(end) for start, end in events]
    return {name: statistics.median(values) for name, values in samples.items()}


def peak_bytes(function: Callable[[], Any]) -> int:
    """Memory that one call takes at its peak, above what was held before."""
    function()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = function()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del result
    return peak


def floor_ms(kind: str, shape: tuple[int, int, int], backward: bool) -> float:
    """The larger of bytes that must move and products that must be done, at the rates of this GPU.

    Forward: x in, y out, what the backward needs (fp16 gates, state and x) out. Backward: those and dy in, dx out.
    """
    B, T, H = shape
    gates = 4 if kind == "lstm" else 3
    cells = B * T * H
    kept = 2 * (gates + 3)
    moved = cells * (4 + 4 + kept) + (cells * (4 + kept + 4) if backward else 0)
    products = 2 * cells * gates * H * (2 + (4 if backward else 0))
    return 1e3 * max(moved / COPY_RATE, products / HALF_RATE)


def time_shapes(kind: str, rounds: int) -> list[dict[str, Any]]:
    rows = []
    for shape in SHAPES:
        single, half = torch.float32, torch.bfloat16
        contenders = {
            "cudnn": Contender(kind, shape, single, None, False),
            "cudnn_bf16": Contender(kind, shape, half, None, False),
            "ours_0": Contender(kind, shape, single, 0.0, True),
            "ours_1": Contender(kind, shape, single, 0.01, True),
            "ours_10": Contender(kind, shape, single, 0.1, True),
            "ours_bf16_1": Contender(kind, shape, half, 0.01, True),
        }
        row: dict[str, Any] = {"kind": kind, "B": shape[0], "T": shape[1], "H": shape[2]}
        for mode in ("forward", "both"):
            row[mode] = median_times({n: getattr(c, mode) for n, c in contenders.items()}, rounds, 10)
            row[mode]["floor"] = floor_ms(kind, shape, mode == "both")
        row["peak_bytes"] = {n: peak_bytes(contenders[n].both) for n in ("cudnn", "ours_1")}
        rows.append(row)
        print_row(row)
        del contenders
        torch.cuda.empty_cache()
    return rows


def print_row(row: dict[str, Any]) -> None:
    f, b = row["forward"], row["both"]
    print(
        f"{row['kind']} {row['B']:5d} {row['T']:4d} {row['H']:5d} | {f['cudnn']:7.3f} {b['cudnn']:7.3f} | "
        f"{f['ours_1']:7.3f} {b['ours_1']:7.3f} | {f['cudnn'] / f['ours_1']:5.2f}x {b['cudnn'] / b['ours_1']:5.2f}x | 10%/0: "
        f"{b['ours_10'] / b['ours_0']:.2f} | bf16 {min(f['cudnn_bf16'], f['cudnn']) / f['ours_bf16_1']:.2f}x "
        f"{min(b['cudnn_bf16'], b['cudnn']) / b['ours_bf16_1']:.2f}x | memory {row['peak_bytes']['ours_1'] / row['peak_bytes']['cudnn']:.2f}",
        flush=True,
    )  # fmt: skip


def time_steps(kind: str, H: int = 128) -> list[dict[str, Any]]:
    """One step without gradients at hidden and input size H: eager, and as replayed CUDA graphs."""
    rows = []
    module = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}[kind](H, H).cuda()
    weights = [w.detach() for w in (module.weight_ih_l0, module.weight_hh_l0, module.bias_ih_l0, module.bias_hh_l0)]
    for B in (1, 16, 64, 256, 1024, 4096, 8192):
        x, h, c = (torch.randn(B, H, device="cuda") for _ in range(3))
        resets = torch.rand(B, device="cuda") < 0.05

        def ours() -> Any:
            if kind == "lstm":
                return gpu.lstm_step(x, h, c, resets, None, None, *weights)
            return (gpu.gru_step(x, h, resets, None, *weights),)

        def cudnn() -> Any:
            mask = resets.unsqueeze(-1)
            if kind == "lstm":
                state: Any = (h.masked_fill(mask, 0.0).unsqueeze(0), c.masked_fill(mask, 0.0).unsqueeze(0))
                return module(x.unsqueeze(0), state)[1]
            return (module(x.unsqueeze(0), h.masked_fill(mask, 0.0).unsqueeze(0))[1],)

        with torch.no_grad():
            difference = max(float((a - b.reshape(a.shape)).abs().max()) for a, b in zip(ours(), cudnn()))
            row: dict[str, Any] = {"kind": kind, "B": B, "H": H, "largest_difference": difference}
            row["eager"] = median_times({"cudnn": cudnn, "ours": ours}, 3, 50)
            graphs = {}
            for name, function in (("cudnn", cudnn), ("ours", ours)):
                function()
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    for _ in range(20):
                        function()
                graphs[name] = graph.replay
            row["graph"] = {n: t / 20 for n, t in median_times(graphs, 3, 10).items()}
        rows.append(row)
        print(
            f"{kind} step B={B:5d}: eager {row['eager']['ours'] * 1e3:6.1f} us, cuDNN + mask {row['eager']['cudnn'] * 1e3:6.1f} us "
            f"({row['eager']['ours'] / row['eager']['cudnn']:.2f}) | graph {row['graph']['ours'] * 1e3:6.1f}, {row['graph']['cudnn'] * 1e3:6.1f} "
            f"({row['graph']['ours'] / row['graph']['cudnn']:.2f}) | difference {difference:.1e}", flush=True,
        )  # fmt: skip
    return rows


def captures() -> dict[str, Any]:
    """Forward + backward under a CUDA graph and under torch.compile(fullgraph=True), against eager."""
    found: dict[str, Any] = {}
    for kind, shape in (("lstm", (64, 16, 128)), ("gru", (64, 16, 256)), ("lstm", (256, 8, 512))):
        contender = Contender(kind, shape, torch.float32, 0.05, True)
        eager = contender.both()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            contender.both()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = contender.both()
        for tensor in captured:
            tensor.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        name = f"{kind} {shape}"
        found[name] = {"cuda_graph_equal": all(torch.equal(a, b) for a, b in zip(eager, captured))}
        compiled = torch.compile(contender.forward, fullgraph=True)
        found[name]["compile_equal"] = torch.equal(compiled(), contender.forward())
        found[name]["times"] = median_times({"eager": contender.both, "cuda_graph": graph.replay}, 2, 10)
    print("captures", found, flush=True)
    return found


_FIRST_CALL = """
import sys, time, torch
from holdfast.kernels import gpu
kind, B, T, H = sys.argv[1], *map(int, sys.argv[2:5])
module = (torch.nn.LSTM if kind == "lstm" else torch.nn.GRU)(H, H).cuda()
x = torch.randn(T, B, H, device="cuda", requires_grad=True)
h, resets = torch.zeros(B, H, device="cuda"), torch.rand(T, B, device="cuda") < 0.01
torch.mm(h, h.t()); torch.cuda.synchronize()
w = [module.weight_ih_l0, module.weight_hh_l0, module.bias_ih_l0, module.bias_hh_l0]
start = time.perf_counter()
y = gpu.lstm(x, h, h, resets, None, None, *w)[0] if kind == "lstm" else gpu.gru(x, h, resets, None, *w)[0]
y.sum().backward(); torch.cuda.synchronize()
print(time.perf_counter() - start)
"""


def first_calls() -> list[dict[str, Any]]:
    """Seconds of the first forward + backward of a process: with an empty cache of compiled kernels, and with a warm one."""
    rows = []
    for kind, shape in (("lstm", (128, 64, 128)), ("gru", (1024, 64, 256)), ("lstm", (2048, 64, 512))):
        with tempfile.TemporaryDirectory() as cache:
            environment = os.environ | {"HOLDFAST_CACHE": cache}
            command = [sys.executable, "-c", _FIRST_CALL, kind, *map(str, shape)]
            cold, warm = (
                float(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
                for _ in range(2)
            )
        rows.append({"kind": kind, "shape": shape, "cold_s": cold, "warm_s": warm})
        print("first call", rows[-1], flush=True)
    return rows


def table(results: dict[str, Any]) -> str:
    """The figures as Markdown."""
    lines = [f"{results['device']}, torch {results['torch']}, CUDA {results['cuda']}. {results['command']}", ""]
    lines += ["Worst error against float64 over all checks (max abs error / max abs reference):", ""]
    lines += ["| recurrence, precision | worst | at |", "|---|---|---|"]
    for name, worst in results["errors"].items():
        tensor = max(worst, key=lambda k: worst[k])
        lines.append(f"| {name} | {worst[tensor]:.1e} | {tensor} |")
    for kind in ("lstm", "gru"):
        rows = [r for r in results["shapes"] if r["kind"] == kind]
        if not rows:
            continue
        lines += [
            "",
            f"{kind.upper()}, ms as forward / forward + backward; ours with 1% resets, cuDNN without resets:",
            "",
        ]
        lines += [
            "| B, T, H | floor | ours | cuDNN (TF32) | ratio | ours bf16 | cuDNN bf16 | ratio to faster cuDNN | 10% resets / none | memory / cuDNN's |"
        ]
        lines += ["|---|---|---|---|---|---|---|---|---|---|"]
        for r in rows:
            f, b = r["forward"], r["both"]
            half = [min(m["cudnn_bf16"], m["cudnn"]) / m["ours_bf16_1"] for m in (f, b)]
            lines.append(
                f"| {r['B']}, {r['T']}, {r['H']} | {f['floor']:.3f} / {b['floor']:.3f} | {f['ours_1']:.3f} / {b['ours_1']:.3f} "
                f"| {f['cudnn']:.3f} / {b['cudnn']:.3f} | **{f['cudnn'] / f['ours_1']:.2f} / {b['cudnn'] / b['ours_1']:.2f}** "
                f"| {f['ours_bf16_1']:.3f} / {b['ours_bf16_1']:.3f} | {f['cudnn_bf16']:.3f} / {b['cudnn_bf16']:.3f} "
                f"| {half[0]:.2f} / {half[1]:.2f} | {f['ours_10'] / f['ours_0']:.2f} / {b['ours_10'] / b['ours_0']:.2f} "
                f"| {r['peak_bytes']['ours_1'] / r['peak_bytes']['cudnn']:.2f} |"
            )  # fmt: skip
        means = [
            math.exp(statistics.mean(math.log(r[m]["cudnn"] / r[m]["ours_1"]) for r in rows))
            for m in ("forward", "both")
        ]
        lines += [
            "",
            f"Geometric mean of the ratios: **{means[0]:.2f}** forward, **{means[1]:.2f}** forward + backward.",
        ]
    lines += [
        "",
        "One step without gradients, H = 128, us:",
        "",
        "| recurrence, B | ours | cuDNN T=1 + mask | ratio | ours, CUDA graph | cuDNN, CUDA graph |",
        "|---|---|---|---|---|---|",
    ]
    for r in results["steps"]:
        e, g = r["eager"], r["graph"]
        lines.append(
            f"| {r['kind']}, {r['B']} | {e['ours'] * 1e3:.1f} | {e['cudnn'] * 1e3:.1f} | {e['ours'] / e['cudnn']:.2f} | {g['ours'] * 1e3:.1f} | {g['cudnn'] * 1e3:.1f} |"
        )
    lines += [
        "",
        "First forward + backward of a process, s:",
        "",
        "| recurrence, (B, T, H) | nothing compiled | kernels in the cache |",
        "|---|---|---|",
    ]
    lines += [
        f"| {r['kind']}, {tuple(r['shape'])} | {r['cold_s']:.2f} | {r['warm_s']:.2f} |" for r in results["first_calls"]
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="errors,steps,captures,first,lstm,gru", help="parts to run, by comma")
    options = parser.parse_args()
    parts = options.only.split(",")
    started = time.time()
    torch.backends.cudnn.allow_tf32 = True
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda,
                               "command": "python " + " ".join(sys.argv), "errors": {}, "shapes": [], "steps": [], "first_calls": []}  # fmt: skip
    if "errors" in parts:
        for kind in ("lstm", "gru"):
            for precision in ("fast", "exact"):
                worst = check(kind, precision)
                results["errors"][f"{kind}, {precision}"] = worst
                print(
                    kind,
                    precision,
                    {k: f"{v:.1e}" for k, v in worst.items()},
                    f"{time.time() - started:.0f} s",
                    flush=True,
                )
    for kind in ("lstm", "gru"):
        if "steps" in parts:
            results["steps"] += time_steps(kind)
    if "captures" in parts:
        results["captures"] = captures()
    if "first" in parts:
        results["first_calls"] = first_calls()
    for kind in ("lstm", "gru"):
        if kind in parts:
            results["shapes"] += time_shapes(kind, options.rounds)
    results["seconds"] = time.time() - started
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    text = table(results)
    if options.table:
        options.table.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
