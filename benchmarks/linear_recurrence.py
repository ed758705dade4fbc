"""The linear recurrence and its layers next to torch.nn.GRU: forward + backward, on a CPU or a GPU.

    python benchmarks/linear_recurrence.py                            # CPU, one thread, the grid of cpu_recurrence.py
    python benchmarks/linear_recurrence.py --device cuda              # the operator next to its bytes, then nine shapes
    python benchmarks/linear_recurrence.py --hidden 64 --repeats 3    # a part of the grid

Ours run with resets, nn.GRU without (it has none), all with input = hidden size. Before anything is timed, outputs and
gradients are compared with the reference kernel in float64; a mismatch ends the run with exit status 1. Contenders take
turns. On a CPU a figure is the minimum of the process's time. On a GPU it is the median of the event timer, twice: calls
issued back to back (the host included), and the same calls replayed as a CUDA graph (what the GPU does, as in training).
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from this_commit import this_commit
from torch import Tensor

import holdfast as hf
from holdfast import state as state_ops
from holdfast.kernels import dispatch
from holdfast.kernels.operands import Resets

RESULTS = Path(__file__).parent / "results"
CPU_SHAPES = [(b, t, p) for b, t in ((1, 128), (8, 16), (8, 128), (64, 128), (256, 64), (8, 2048)) for p in (0.01, 0.1)]
# Those of gpu_recurrence.py: B, T, H.
GPU_SHAPES = [
    (128, 64, 128), (1024, 64, 128), (8192, 64, 128), (128, 128, 256), (1024, 64, 256), (8192, 32, 256), (256, 64, 512),
    (2048, 64, 512), (256, 64, 1024),
]  # fmt: skip
CELLS = {"mingru": hf.MinGRU, "lru": hf.LRU, "ffm": hf.FFM}
TOLERANCES = {"exact": 2e-4, "fast": 1e-2}  # of the largest element; "fast" has products in TF32 on a GPU
OPERATOR_TOLERANCE = 2e-5
H200_BYTES_PER_SECOND = 4.3e12

# Form, `a` per channel, arrays of channels that must move: forward reads b (and a) and writes h; backward reads dh, h (a,
# and b where it holds gates) and writes db (and da).
OPERATORS = [("real", False, 8), ("real", True, 5), ("complex", True, 10), ("gated", False, 9)]

Function = Callable[[], Any]


def operator_problem(form: str, per_channel: bool, B: int, T: int, C: int, device: str) -> tuple[Function, Function]:
    """Forward + backward of the operator as it is chosen for the device, and of the reference in float64."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    W = 2 * C if form == "complex" else C
    b, h0, dh = normal(T, B, C if form == "real" else 2 * C), normal(B, W), normal(T, B, W)
    a = None if form == "gated" else normal(*((W,) if per_channel else (T, B, W))).tanh() * 0.7
    resets = torch.rand(T, B, generator=generator, device=device) < 0.01

    def both(kernel: str, dtype: torch.dtype) -> Function:
        a_, b_, h0_, dh_ = (None if v is None else v.to(dtype) for v in (a, b, h0, dh))
        inputs = [v.requires_grad_() for v in (a_, b_) if v is not None]

        def run() -> list[Tensor]:
            h, _ = dispatch.choose_linear(kernel, b_).sequence(a_, b_, h0_, Resets(resets, None, None, False), form)
            return [h.detach(), *torch.autograd.grad(h, inputs, dh_)]

        return run

    return both("auto", torch.float32), lambda: both("reference", torch.float64)()


def worst_error(got: list[Tensor], expected: list[Tensor]) -> float:
    """The largest, over all tensors, of the largest difference over the largest element."""
    return max(float((g.double() - e).abs().max() / e.abs().max()) for g, e in zip(got, expected))


def check_operator(form: str, per_channel: bool, device: str) -> float:
    error = 0.0
    for B, T, C in ((5, 9, 16), (333, 37, 200), (3, 130, 100), (1024, 66, 128)):
        timed, reference = operator_problem(form, per_channel, B, T, C, device)
        error = max(error, worst_error(timed(), reference()))
    if not error <= OPERATOR_TOLERANCE:
        raise SystemExit(f"mismatch: the operator ({form}) differs from the float64 reference by {error:.1e}")
    return error


def check_core(core: hf.Core, x: Tensor, resets: Tensor) -> None:
    """Output and gradients of the timed core against its reference kernel in float64, at a part of the size."""
    x, resets = x[:16, :8], resets[:16, :8]

    def answers(kernel: str, precision: str, dtype: torch.dtype) -> list[Tensor]:
        core.kernel, core.precision = kernel, precision
        core.to(dtype)
        inputs = x.detach().to(dtype).requires_grad_()
        y, _ = core(inputs, None, resets)
        return [y.detach(), *torch.autograd.grad(y.square().mean(), [inputs, *core.parameters()])]

    expected = answers("reference", "exact", torch.float64)
    for precision, tolerance in TOLERANCES.items():  # the last one is timed
        error = worst_error(answers("auto", precision, torch.float32), expected)
        if not error <= tolerance:
            raise SystemExit(
                f"mismatch: {type(core).__name__}, {precision}, differs from the float64 reference by {error:.1e}"
            )


def process_times(runs: dict[str, Function], repeats: int) -> dict[str, float]:
    """ms on a CPU: the minimum of the process's time."""
    for run in runs.values():
        run()
    best = dict.fromkeys(runs, math.inf)
    for _ in range(repeats):
        for name, run in runs.items():
            begin = time.process_time()
            run()
            best[name] = min(best[name], 1e3 * (time.process_time() - begin))
    return best


def gpu_times(runs: dict[str, Function], repeats: int) -> tuple[dict[str, float], dict[str, float]]:
    """ms on a GPU: of calls issued back to back, and of their CUDA graphs."""
    from gpu_problem import captured, median_times

    eager = median_times(runs, 3, repeats)
    graphs = {name: captured(run) for name, run in runs.items()}
    return eager, median_times({name: graph.replay for name, (graph, _) in graphs.items()}, 3, repeats)


def layer(args: argparse.Namespace, B: int, T: int, H: int, p: float) -> dict[str, Any]:
    torch.manual_seed(0)
    x = torch.randn(T, B, H, device=args.device, requires_grad=True)
    dy, resets = torch.randn_like(x) / T, torch.rand(T, B, device=args.device) < p
    gru = torch.nn.GRU(H, H).to(args.device)
    runs: dict[str, Function] = {
        "nn.GRU": lambda: torch.autograd.grad(gru(x)[0], [x, *gru.parameters()], dy),
    }
    for name in args.cells:
        core = CELLS[name](H, H).to(args.device)
        check_core(core, x, resets)
        start = state_ops.clone(core.initial_state(B))
        runs[name] = lambda c=core, s=start: torch.autograd.grad(c(x, s, resets)[0], [x, *c.parameters()], dy)
    row: dict[str, Any] = {"hidden": H, "batch": B, "steps": T, "p": p}
    if args.device == "cpu":
        return row | {"ms": process_times(runs, args.repeats)}
    eager, graph = gpu_times(runs, args.repeats)
    return row | {"ms": eager, "graph_ms": graph}


def print_layer(row: dict[str, Any]) -> None:
    print(f"H={row['hidden']:4} B={row['batch']:5} T={row['steps']:5} p={row['p']:<5}", end="")
    for figure in ("ms", "graph_ms"):
        ms = row.get(figure, {})
        parts = [f"{name} {v:8.3f} ms {ms['nn.GRU'] / v:6.2f}x" for name, v in ms.items()]
        print(f"  {figure.removesuffix('_ms')}: " * bool(ms) + "  ".join(parts), end="")
    print(flush=True)


def print_means(rows: list[dict[str, Any]], cells: list[str]) -> None:
    for figure in ("ms", "graph_ms"):
        for name in cells if rows and figure in rows[0] else ():
            ratios = [row[figure]["nn.GRU"] / row[figure][name] for row in rows]
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            kind = "" if figure == "ms" else " as CUDA graphs"
            print(
                f"{name}{kind}: {mean:.2f}x nn.GRU's speed (geometric mean of {len(ratios)}), worst {min(ratios):.2f}x"
            )


def operator(form: str, per_channel: bool, arrays: int, B: int, T: int, repeats: int) -> dict[str, Any]:
    """The operator alone, forward + backward, 128 channels, next to the time that its bytes need at 4.3 TB/s."""
    C = 128
    run, _ = operator_problem(form, per_channel, B, T, C, "cuda")
    eager, graph = gpu_times({"operator": run}, repeats)
    least = 1e3 * arrays * 4 * T * B * C / H200_BYTES_PER_SECOND
    row = {"batch": B, "steps": T, "channels": C, "form": form, "per_channel": per_channel, "least_ms": least}
    row |= {"ms": eager["operator"], "graph_ms": graph["operator"]}
    print(
        f"operator {form:7} a per {'channel' if per_channel else 'step   '} B={B:5} T={T:4} C={C}: {row['ms']:.3f} ms, as a "
        f"CUDA graph {row['graph_ms']:.3f} ms, {row['graph_ms'] / least:.2f}x the time of its bytes",
        flush=True,
    )
    return row


def processor(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    import cpu_recurrence  # needs rich, which a machine with a GPU may lack

    return cpu_recurrence.processor()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--hidden", nargs="+", type=int, help="default: 64 128 256 on a CPU, 128 256 512 1024 on a GPU")
    parser.add_argument("--cells", nargs="+", default=list(CELLS), choices=list(CELLS))
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--output", type=Path, help="where the figures go, as JSON")
    args = parser.parse_args()
    args.hidden = args.hidden or ([64, 128, 256] if args.device == "cpu" else [128, 256, 512, 1024])
    args.output = args.output or RESULTS / f"linear_recurrence_{args.device}.json"
    torch.set_num_threads(1)
    commit = this_commit()
    figures: dict[str, Any] = {
        "command": " ".join(["python", "benchmarks/linear_recurrence.py", *sys.argv[1:]]), "commit": commit,
        "torch": torch.__version__, "python": platform.python_version(), "device": args.device,
        "processor": processor(args.device),
        "errors": {}, "operator": [], "layers": [],
    }  # fmt: skip

    def save() -> None:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(figures, indent=1) + "\n")

    for form, per_channel, arrays in OPERATORS:
        name = f"{form}, a per {'channel' if per_channel else 'step'}"
        figures["errors"][name] = error = check_operator(form, per_channel, args.device)
        print(f"operator {name}: differs from the float64 reference by {error:.1e} at most", flush=True)
        for B, T in ((1024, 128), (8192, 64), (8192, 128)) if args.device == "cuda" else ():
            figures["operator"].append(operator(form, per_channel, arrays, B, T, args.repeats))
            save()
    shapes = [(b, t, h, 0.01) for b, t, h in GPU_SHAPES if h in args.hidden]
    if args.device == "cpu":
        shapes = [(b, t, h, p) for h in args.hidden for b, t, p in CPU_SHAPES]
    for B, T, H, p in shapes:
        figures["layers"].append(layer(args, B, T, H, p))
        print_layer(figures["layers"][-1])
        save()
    print_means(figures["layers"], args.cells)
    return 0


if __name__ == "__main__":
    sys.exit(main())
