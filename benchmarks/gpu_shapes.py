"""LSTM and GRU layers with resets beside cuDNN without, on 40 shapes that nothing is tuned on.

    python benchmarks/gpu_shapes.py                    # benchmarks/results/gpu_shapes.json
    python benchmarks/gpu_shapes.py --seconds 60 --workers 12

A seeded generator draws the shapes: B from 1 to 8192, H from 48 to 1024 and T from 8 to 512, each log-uniform. H is a multiple of 8,
as the tensor cores want on both sides. Where a [T, B, H] tensor would have more than 2**27 elements (512 MiB), T is cut down to fit.
Do not choose tiles by these shapes: they say how layers behave at sizes that nobody looked at.

Times are of forward + backward, ours with 1% resets, contenders taking turns. "eager" has calls issued back to back; "graph" is what the
GPU needs, as a CUDA graph. cuDNN multiplies in TF32.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from this_commit import this_commit

RESULTS = Path(__file__).parent / "results" / "gpu_shapes.json"
SEED, COUNT = 20, 40
LARGEST = 2**27  # elements of a [T, B, H] tensor
KINDS = ("lstm", "gru")


class Shape(NamedTuple):
    B: int
    T: int
    H: int


def log_uniform(generator: random.Random, low: int, high: int) -> int:
    """A whole number between low and high, both possible."""
    return round(math.exp(generator.uniform(math.log(low), math.log(high))))


def shapes(seed: int = SEED, count: int = COUNT) -> list[Shape]:
    """The shapes of this seed."""
    generator = random.Random(seed)
    found = []
    for _ in range(count):
        B, H, T = log_uniform(generator, 1, 8192), log_uniform(generator, 48, 1024), log_uniform(generator, 8, 512)
        H = 8 * round(H / 8)
        found.append(Shape(B, min(T, LARGEST // (B * H)), H))
    return found


def time_shape(kind: str, shape: Shape, seconds: float) -> dict[str, Any]:
    """Median ms of ours and cuDNN's; about `seconds` are spent on it."""
    import torch
    from gpu_problem import Contender, captured, median_times

    contenders = {
        "cudnn": Contender(kind, tuple(shape), torch.float32, None, False),
        "ours": Contender(kind, tuple(shape), torch.float32, 0.01, True),
    }
    row: dict[str, Any] = {"kind": kind, **shape._asdict()}
    for mode in ("eager", "graph"):
        calls = {n: c.both if mode == "eager" else captured(c.both)[0].replay for n, c in contenders.items()}
        once = sum(median_times(calls, 1, 1).values()) / 1e3
        repeats = min(10, max(2, int(seconds / 8 / once)))
        row[mode] = median_times(calls, 3, repeats)
        row[mode]["ratio"] = row[mode]["cudnn"] / row[mode]["ours"]
    return row


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Geometric mean and smallest ratio of each cell, and the shapes below 1."""
    found: dict[str, Any] = {}
    for kind in KINDS:
        mine = [row for row in rows if row["kind"] == kind and "error" not in row]
        for mode in ("eager", "graph") if mine else ():
            ratios = [row[mode]["ratio"] for row in mine]
            below = [f"{r['B']} x {r['T']} x {r['H']}: {r[mode]['ratio']:.2f}" for r in mine if r[mode]["ratio"] < 1]
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            found[f"{kind}, {mode}"] = {"geometric_mean": mean, "smallest": min(ratios), "shapes": len(ratios), "below_1": below}  # fmt: skip
    return found


def compile_ahead(workers: int) -> None:
    """Fill the cache of compiled kernels, in processes side by side: most of the time of a first run would be compilation."""
    part = "import gpu_shapes, sys; gpu_shapes.compile_part(int(sys.argv[1]), int(sys.argv[2]))"
    folder = str(Path(__file__).parent)
    paths = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths}
    jobs = [
        subprocess.Popen([sys.executable, "-c", part, str(i), str(workers)], env=environment) for i in range(workers)
    ]
    for job in jobs:
        job.wait()


def compile_part(index: int, workers: int) -> None:
    """Every `workers`-th shape, for a few steps: the number of steps is not compiled in."""
    import torch
    from gpu_problem import Contender

    for kind in KINDS:
        for shape in shapes()[index::workers]:
            Contender(kind, (shape.B, 2, shape.H), torch.float32, 0.01, True).both()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seconds", type=float, default=240.0, help="for all shapes; the rest is left out when they are over"
    )
    parser.add_argument("--workers", type=int, default=0, help="processes that compile the kernels ahead")
    parser.add_argument("--missing", action="store_true", help="only shapes that the file of results has not")
    parser.add_argument("--commit", default=None, help="where there is no git")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    import torch

    began = time.perf_counter()
    torch.backends.cudnn.allow_tf32 = True
    if args.workers:
        compile_ahead(args.workers)
        print(f"compiled in {time.perf_counter() - began:.1f} s", flush=True)
    rows: list[dict[str, Any]] = json.loads(args.out.read_text())["rows"] if args.missing else []
    known = {(row["kind"], row["B"], row["T"], row["H"]) for row in rows}
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": args.commit or this_commit()}
    about |= {"command": f"python benchmarks/gpu_shapes.py --seconds {args.seconds:g}", "seed": SEED}
    cases = [(kind, shape) for shape in shapes() for kind in KINDS if (kind, *shape) not in known]
    for i, (kind, shape) in enumerate(cases):
        left = args.seconds - (time.perf_counter() - began)
        if left <= 0:
            print(f"out of time: {len(cases) - i} of {len(cases)} cases are left out", flush=True)
            break
        try:
            row = time_shape(kind, shape, min(2.0, left / (len(cases) - i)))
        except RuntimeError as error:
            row = {"kind": kind, **shape._asdict(), "error": str(error).splitlines()[0]}
        rows.append(row if not args.missing else {**row, "commit": about["commit"]})
        torch.cuda.empty_cache()
        times = [
            f"{m} {row[m]['ratio']:.2f} ({row[m]['ours']:.3f} ms, cuDNN {row[m]['cudnn']:.3f})"
            for m in ("eager", "graph")
            if m in row
        ]
        print(f"{kind} {shape.B} x {shape.T} x {shape.H}: {row.get('error') or ', '.join(times)}", flush=True)
        args.out.parent.mkdir(exist_ok=True, parents=True)
        args.out.write_text(json.dumps({**about, "summary": summary(rows), "rows": rows}, indent=1) + "\n")
    print(json.dumps(summary(rows), indent=1))


if __name__ == "__main__":
    main()
