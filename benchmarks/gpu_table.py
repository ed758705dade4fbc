"""The figures of `gpu_recurrence.py` as Markdown, next to their roofline."""

from __future__ import annotations

import math
import statistics
from typing import Any

COPY_RATE = 4.3e12  # bytes/s of a device-to-device copy on one H200, read and written counted
HALF_RATE = 790e12  # FLOP/s of a large half-precision product there


def floor_ms(kind: str, shape: tuple[int, int, int], backward: bool) -> float:
    """The larger of the bytes that must move and the products that must be done, at this GPU's rates, in ms.

    Forward: x in, y out, and what the backward needs out (fp16: gates, one more value per unit, h, x). Backward: those
    and dy in, dx out. Products: two forward, four backward. Nothing else is counted, as if no temporary left the chip.
    """
    B, T, H = shape
    gates = 4 if kind == "lstm" else 3
    cells = B * T * H
    kept = 2 * (gates + 3)
    moved = cells * (4 + 4 + kept) + (cells * (4 + 4 + kept) if backward else 0)
    products = 2 * cells * gates * H * (6 if backward else 2)
    return 1e3 * max(moved / COPY_RATE, products / HALF_RATE)


def _half_ratios(row: dict[str, Any]) -> list[float]:
    """bf16: the faster of cuDNN's bf16 and fp32, over ours; forward, and forward + backward."""
    return [min(m["cudnn_bf16"], m["cudnn"]) / m["ours_bf16_1"] for m in (row["forward"], row["both"])]


def print_row(row: dict[str, Any]) -> None:
    f, b, g, half, memory = row["forward"], row["both"], row["graph"], _half_ratios(row), row["peak_bytes"]
    print(
        f"{row['kind']} {row['B']:5d} {row['T']:4d} {row['H']:5d} | cuDNN {f['cudnn']:7.3f} {b['cudnn']:7.3f} | "
        f"ours {f['ours_1']:7.3f} {b['ours_1']:7.3f} |",
        f"{f['cudnn'] / f['ours_1']:5.2f}x {b['cudnn'] / b['ours_1']:5.2f}x | bf16 {half[0]:.2f}x {half[1]:.2f}x |",
        f"graphs {g['cudnn']:.3f} {g['ours_10']:.3f} | 10%/0 {g['ours_10'] / g['ours_0']:.3f} | memory",
        f"{memory['ours_1'] / memory['cudnn']:.2f}",
        flush=True,
    )


def _shapes(kind: str, rows: list[dict[str, Any]]) -> list[str]:
    lines = ["", f"{kind.upper()}, ms as forward / forward + backward; ours with 1% resets, cuDNN without:", ""]
    lines += ["| B, T, H | floor | ours | cuDNN, TF32 | ratio | ours, bf16 | cuDNN, bf16 | ratio to the faster cuDNN |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for r in rows:
        f, b, half = r["forward"], r["both"], _half_ratios(r)
        cells = [f"{f[k]:.3f} / {b[k]:.3f}" for k in ("floor", "ours_1", "cudnn")]
        cells += [f"**{f['cudnn'] / f['ours_1']:.2f} / {b['cudnn'] / b['ours_1']:.2f}**"]
        cells += [f"{f[k]:.3f} / {b[k]:.3f}" for k in ("ours_bf16_1", "cudnn_bf16")] + [
            f"{half[0]:.2f} / {half[1]:.2f}"
        ]
        lines.append(f"| {r['B']}, {r['T']}, {r['H']} | {' | '.join(cells)} |")
    means = [
        math.exp(statistics.mean(math.log(r[m]["cudnn"] / r[m]["ours_1"]) for r in rows)) for m in ("forward", "both")
    ]
    lines += ["", f"Geometric mean of the ratios: **{means[0]:.2f}** forward, **{means[1]:.2f}** forward + backward."]
    lines += [
        "",
        f"{kind.upper()}, forward + backward without the host (replayed CUDA graphs, ms) and peak memory:",
        "",
    ]
    lines += [
        "| B, T, H | floor | ours, no resets | ours, 10% resets | 10% / none | cuDNN | ratio | memory / cuDNN's |"
    ]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for r in rows:
        g, memory = r["graph"], r["peak_bytes"]
        lines.append(
            f"| {r['B']}, {r['T']}, {r['H']} | {r['both']['floor']:.3f} | {g['ours_0']:.3f} | {g['ours_10']:.3f} "
            f"| {g['ours_10'] / g['ours_0']:.3f} | {g['cudnn']:.3f} | {g['cudnn'] / g['ours_10']:.2f} "
            f"| {memory['ours_1'] / memory['cudnn']:.2f} |"
        )
    return lines


_WHO = {"ours_1": "ours, 1% resets", "torchrl": "TorchRL's Triton, 1% resets", "cudnn": "cuDNN, TF32, no resets"}


def _smallest(row: dict[str, Any]) -> list[str]:
    lines = ["", f"LSTM at {tuple(row['shape'])}, ms, over more rounds; `one thread`: the backward in the caller's", ""]
    lines[-2] += " (`torch.autograd.set_multithreading_enabled(False)`):"
    lines += ["| | forward | forward + backward | one thread |", "|---|---|---|---|"]
    for name, who in _WHO.items():
        if name in row["both"]:
            times = (f"{row[mode][name]:.3f}" for mode in ("forward", "both", "one_thread"))
            lines.append(f"| {who} | {' | '.join(times)} |")
    return [*lines, f"| ours, as a CUDA graph | | {row['graph']['ours_1']:.3f} | |"]


def table(results: dict[str, Any]) -> str:
    """All figures as Markdown."""
    lines = [f"{results['device']}, torch {results['torch']}; `python benchmarks/gpu_recurrence.py`.", ""]
    lines += ["Worst error against float64 over all checks, max abs error / max abs reference:", ""]
    lines += ["| recurrence, precision | worst | at |", "|---|---|---|"]
    for name, worst in results["errors"].items():
        tensor = max(worst, key=lambda k: worst[k])
        lines.append(f"| {name} | {worst[tensor]:.1e} | {tensor} |")
    for kind in ("lstm", "gru"):
        rows = [r for r in results["shapes"] if r["kind"] == kind]
        lines += _shapes(kind, rows) if rows else []
    lines += _smallest(results["smallest"]) if results["smallest"] else []
    if results["first_calls"]:
        lines += [
            "",
            "First forward + backward of a process through `hf.LSTM` or `hf.GRU`, s; before it come the imports",
            "",
        ]
        lines[-2] += " (torch's nearly all) and the start of CUDA and cuBLAS:"
        lines += ["| recurrence, (B, T, H) | nothing compiled | kernels in the cache | imports | start of CUDA |"]
        lines += ["|---|---|---|---|---|"]
    for r in results["first_calls"]:
        times = (f"{r[n]:.2f}" for n in ("cold_s", "warm_s", "imports_s", "cuda_start_s"))
        lines.append(f"| {r['kind']}, {tuple(r['shape'])} | {' | '.join(times)} |")
    return "\n".join(lines) + "\n"
