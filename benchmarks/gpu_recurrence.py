"""GPU recurrences next to cuDNN: checked against float64 first, then timed, in one run.

    python benchmarks/gpu_recurrence.py            # writes benchmarks/results/gpu_recurrence.{json,md}

cuDNN runs without resets (it has none); ours with resets. Contenders take turns and medians over all rounds are
compared, because at small sizes the host dominates and its speed varies. Times are CUDA-event times of eager calls
issued back to back, in ms; forward is training mode (it keeps what the backward needs).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from gpu_problem import Contender, captured, median_times, peak_bytes, worst_errors
from gpu_table import floor_ms, print_row, table
from gpu_torchrl import torchrl_contender

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
RESULTS = Path(__file__).parent / "results" / "gpu_recurrence.json"


def time_shape(kind: str, shape: tuple[int, int, int], rounds: int) -> dict[str, Any]:
    """Eager times of all contenders, GPU-only times of three, peak memory of two."""
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
    rounds *= 2 if shape[0] * shape[1] * shape[2] <= 1 << 23 else 1  # where the host dominates, whose speed varies
    for mode in ("forward", "both"):
        row[mode] = median_times({n: getattr(c, mode) for n, c in contenders.items()}, rounds, 10)
        row[mode]["floor"] = floor_ms(kind, shape, mode == "both")
    graphs = {n: captured(contenders[n].both)[0] for n in ("cudnn", "ours_0", "ours_10")}
    row["graph"] = median_times({n: g.replay for n, g in graphs.items()}, 2 * rounds, 4)
    row["peak_bytes"] = {n: peak_bytes(contenders[n].both) for n in ("cudnn", "ours_1")}
    return row


def time_smallest(rounds: int) -> dict[str, Any]:
    """LSTM at the smallest shape, where the host dominates, over many rounds; TorchRL's too where it is installed.

    `one_thread`: with `torch.autograd.set_multithreading_enabled(False)`, so that the backward needs no second thread.
    """
    shape, single = SHAPES[0], torch.float32
    contenders: dict[str, Any] = {
        "cudnn": Contender("lstm", shape, single, None, False),
        "ours_1": Contender("lstm", shape, single, 0.01, True),
    }
    torchrl = torchrl_contender(shape, 0.01)
    if torchrl is not None:
        contenders["torchrl"] = torchrl
    row: dict[str, Any] = {"shape": shape}
    for mode in ("forward", "both"):
        row[mode] = median_times({n: getattr(c, mode) for n, c in contenders.items()}, rounds, 10)
    with torch.autograd.set_multithreading_enabled(False):
        row["one_thread"] = median_times({n: c.both for n, c in contenders.items()}, rounds, 10)
    row["graph"] = median_times({"ours_1": captured(contenders["ours_1"].both)[0].replay}, rounds, 10)
    return row


def check_captures() -> dict[str, Any]:
    """Forward + backward under a CUDA graph and under torch.compile(fullgraph=True): equal to eager?"""
    found: dict[str, Any] = {}
    for kind, shape in (("lstm", (64, 16, 128)), ("gru", (64, 16, 256)), ("lstm", (256, 8, 512))):
        contender = Contender(kind, shape, torch.float32, 0.05, True)
        eager = contender.both()
        graph, result = captured(contender.both)
        for tensor in result:
            tensor.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        y = torch.compile(contender.forward, fullgraph=True)()
        compiled = torch.autograd.grad(y, contender.inputs, contender.gradient)
        found[f"{kind} {shape}"] = {
            "cuda_graph_equal": all(map(torch.equal, eager, result)),
            "compiled_equal": torch.equal(y, contender.forward()) and all(map(torch.equal, eager, compiled)),
            "ms": median_times({"eager": contender.both, "cuda_graph": graph.replay}, 2, 10),
        }
    return found


_FIRST_CALL = """
import sys, time
start = time.perf_counter()
import torch
import holdfast as hf
imported = time.perf_counter()
kind, B, T, H = sys.argv[1], *map(int, sys.argv[2:5])
core = (hf.LSTM if kind == "lstm" else hf.GRU)(H, H).cuda()
x = torch.randn(T, B, H, device="cuda", requires_grad=True)
state, resets = core.initial_state(B), torch.rand(T, B, device="cuda") < 0.01
torch.mm(x[0], x[0].t()).sum().item()
ready = time.perf_counter()
y, _ = core(x, state, resets)
y.sum().backward()
torch.cuda.synchronize()
print(imported - start, ready - imported, time.perf_counter() - ready)
"""


def first_call(kind: str, shape: tuple[int, int, int]) -> dict[str, Any]:
    """Seconds of the first forward + backward of a process: nothing compiled before, and kernels in the cache.

    Importing torch and Holdfast, and starting CUDA and cuBLAS, come before and are listed separately.
    """
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"HOLDFAST_CACHE": cache}
        command = [sys.executable, "-c", _FIRST_CALL, kind, *map(str, shape)]
        runs = [subprocess.run(command, env=environment, capture_output=True, text=True) for _ in range(2)]
    if any(r.returncode for r in runs):
        raise RuntimeError(runs[0].stderr + runs[1].stderr)
    cold, warm = ([float(v) for v in r.stdout.split()] for r in runs)
    return {
        "kind": kind, "shape": shape, "cold_s": cold[2], "warm_s": warm[2], "imports_s": warm[0], "cuda_start_s": warm[1],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the figures go; the table goes next to it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="first,lstm,gru,smallest,errors,captures", help="parts to run, by comma")
    options = parser.parse_args()
    parts, started = options.only.split(","), time.time()
    torch.backends.cudnn.allow_tf32 = True
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    results |= {"cuda": torch.version.cuda, "errors": {}, "captures": {}, "first_calls": [], "shapes": []}
    results["smallest"] = None

    def save() -> None:
        results["seconds"] = time.time() - started
        options.json.write_text(json.dumps(results, indent=1) + "\n")
        options.json.with_suffix(".md").write_text(table(results))

    if "first" in parts:
        for kind, shape in (("lstm", SHAPES[0]), ("gru", SHAPES[7])):
            results["first_calls"].append(first_call(kind, shape))
            print("first call", results["first_calls"][-1], flush=True)
    for kind in ("lstm", "gru"):
        for shape in SHAPES if kind in parts else ():
            results["shapes"].append(time_shape(kind, shape, options.rounds))
            print_row(results["shapes"][-1])
            torch.cuda.empty_cache()
        save()
    if "smallest" in parts:
        results["smallest"] = time_smallest(4 * options.rounds)
        print("smallest", results["smallest"], flush=True)
        save()
    if "errors" in parts:
        for kind in ("lstm", "gru"):
            for precision in ("fast", "exact"):
                worst = results["errors"][f"{kind}, {precision}"] = worst_errors(kind, precision)
                print(kind, precision, {k: f"{v:.1e}" for k, v in worst.items()}, flush=True)
        save()
    if "captures" in parts:
        results["captures"] = check_captures()
        print("captures", results["captures"], flush=True)
    save()
    print(table(results))


if __name__ == "__main__":
    main()
