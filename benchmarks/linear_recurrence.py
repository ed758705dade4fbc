"""The linear recurrence and its layers next to torch.nn.GRU: forward + backward, on a CPU or a GPU.

    python benchmarks/linear_recurrence.py                            # CPU, one thread, the grid of cpu_recurrence.py
    python benchmarks/linear_recurrence.py --device cuda              # nine shapes, and the operator next to its bytes
    python benchmarks/linear_recurrence.py --hidden 64 --repeats 3    # a part of the grid

Ours run with resets, nn.GRU without (it has none), all with input = hidden size. Before anything is timed, the cores' output
and gradients are compared with the same core on the reference kernel in float64; a mismatch ends the run with exit status
1. Contenders take turns, and each figure is the minimum: on a CPU of the process's time, on a GPU of its event timer.
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

import holdfast as hf
from holdfast import state as state_ops
from holdfast.kernels.linear import linear_recurrence

RESULTS = Path(__file__).parent / "results"
CPU_SHAPES = [(b, t, p) for b, t in ((1, 128), (8, 16), (8, 128), (64, 128), (256, 64), (8, 2048)) for p in (0.01, 0.1)]
# Those of gpu_recurrence.py: B, T, H.
GPU_SHAPES = [
    (128, 64, 128), (1024, 64, 128), (8192, 64, 128), (128, 128, 256), (1024, 64, 256), (8192, 32, 256), (256, 64, 512),
    (2048, 64, 512), (256, 64, 1024),
]  # fmt: skip
CELLS = {"mingru": hf.MinGRU, "lru": hf.LRU, "ffm": hf.FFM}
TOLERANCE = 2e-3  # of the largest element; TF32 on a GPU
H200_BYTES_PER_SECOND = 4.3e12


def check(core: hf.Core, x: torch.Tensor, resets: torch.Tensor) -> None:
    """Output and gradients of the timed core against its reference kernel in float64, at a part of the size."""
    x, resets = x[:16, :8], resets[:16, :8]
    dtype = next(core.parameters()).dtype
    answers = []
    for kernel, kind in (("auto", dtype), ("reference", torch.float64)):
        core.kernel = kernel
        core.to(kind)
        inputs = x.detach().to(kind).requires_grad_()
        y, _ = core(inputs, None, resets)
        gradients = torch.autograd.grad(y.square().mean(), [inputs, *core.parameters()])
        answers.append([y.detach().double(), *[g.double() for g in gradients]])
    core.to(dtype).kernel = "auto"
    for number, (got, expected) in enumerate(zip(*answers)):
        error = float((got - expected).abs().max() / expected.abs().max())
        if not error <= TOLERANCE:
            raise SystemExit(
                f"mismatch: {type(core).__name__} differs from the reference by {error:.1e} (tensor {number})"
            )


def timed(run: Callable[[], Any], device: str) -> float:
    """Seconds."""
    if device == "cpu":
        begin = time.process_time()
        run()
        return time.process_time() - begin
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def minimum_in_turns(runs: dict[str, Callable[[], Any]], repeats: int, device: str) -> dict[str, float]:
    for run in runs.values():
        run()
    best = dict.fromkeys(runs, math.inf)
    for _ in range(repeats):
        for name, run in runs.items():
            best[name] = min(best[name], timed(run, device))
    return best


def forward_backward(
    function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, dy: torch.Tensor
) -> Callable[[], None]:
    def run() -> None:
        function(x.detach().requires_grad_()).backward(dy)

    return run


def layers(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for hidden in args.hidden:
        shapes = CPU_SHAPES if args.device == "cpu" else [(b, t, 0.01) for b, t, h in GPU_SHAPES if h == hidden]
        for batch, steps, p in shapes:
            torch.manual_seed(0)
            x = torch.randn(steps, batch, hidden, device=args.device)
            dy, resets = torch.randn_like(x) / steps, torch.rand(steps, batch, device=args.device) < p
            gru = torch.nn.GRU(hidden, hidden).to(args.device)
            runs = {"nn.GRU": forward_backward(lambda v, gru=gru: gru(v)[0], x, dy)}
            for name in args.cells:
                core = CELLS[name](hidden, hidden).to(args.device)
                check(core, x, resets)
                start = state_ops.clone(core.initial_state(batch))
                runs[name] = forward_backward(lambda v, c=core, s=start, r=resets: c(v, s, r)[0], x, dy)
            best = minimum_in_turns(runs, args.repeats, args.device)
            row = {
                "hidden": hidden,
                "batch": batch,
                "steps": steps,
                "p": p,
                "ms": {k: 1e3 * s for k, s in best.items()},
            }
            rows.append(row)
            faster = "  ".join(
                f"{k} {1e3 * s:9.3f} ms {best['nn.GRU'] / s:6.2f}x" for k, s in best.items() if k != "nn.GRU"
            )
            print(
                f"H={hidden:3} B={batch:5} T={steps:5} p={p:<5} nn.GRU {1e3 * best['nn.GRU']:9.3f} ms  {faster}",
                flush=True,
            )
    for name in args.cells:
        ratios = [row["ms"]["nn.GRU"] / row["ms"][name] for row in rows]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        print(f"{name}: {mean:.2f}x nn.GRU's speed (geometric mean of {len(ratios)}), worst {min(ratios):.2f}x")
    return rows


def operator(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The operator alone, forward + backward, next to the time that its bytes need at 4.3 TB/s."""
    rows = []
    for batch, steps in ((1024, 128), (8192, 64), (8192, 128)):
        for form, per_channel in (("real", False), ("real", True), ("complex", True)):
            width = 128 if form == "real" else 256
            shape = (steps, batch, width)
            b, h0 = (
                torch.randn(shape, device=args.device, requires_grad=True),
                torch.zeros(shape[1:], device=args.device),
            )
            a = torch.rand(shape[2:] if per_channel else shape, device=args.device).mul_(0.7).requires_grad_()
            resets, dh = torch.rand(steps, batch, device=args.device) < 0.01, torch.randn(shape, device=args.device)

            def run(a=a, b=b, h0=h0, resets=resets, dh=dh, form=form) -> None:
                a.grad = b.grad = None
                linear_recurrence(a, b, h0, resets, form=form)[0].backward(dh)

            seconds = minimum_in_turns({"operator": run}, args.repeats, args.device)["operator"]
            # Forward reads b (and a), writes h; backward reads dh, h (and a), writes db (and da).
            arrays = 5 if per_channel else 8
            least = arrays * b.numel() * 4 / H200_BYTES_PER_SECOND
            rows.append(
                {
                    "batch": batch,
                    "steps": steps,
                    "form": form,
                    "per_channel": per_channel,
                    "ms": 1e3 * seconds,
                    "least_ms": 1e3 * least,
                }
            )
            print(
                f"operator {form:7} a per {'channel' if per_channel else 'step   '} B={batch} T={steps} W={width}: {1e3 * seconds:.3f} ms, {seconds / least:.2f}x the time of its bytes",
                flush=True,
            )
    return rows


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
    figures: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version(), "device": args.device}
    figures["processor"] = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor()
    figures["layers"] = layers(args)
    if args.device == "cuda":
        figures["operator"] = operator(args)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
