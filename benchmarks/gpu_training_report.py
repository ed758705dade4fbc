"""Tables and plot of the results of gpu_training.py: benchmarks/results/gpu_training.md and gpu_training.png next to it.

python benchmarks/gpu_training_report.py
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
COLORS = {"lstm": "#1f6fb4", "gru": "#d9822b"}
MARKERS = {"lstm": "o", "gru": "s"}


def compare_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| task | cell | environments | steps/s | JAX steps/s | ratio | solved after | JAX solved after | rollout / update / rest "
        "| GPU busy | JAX: GPU busy | power | JAX: power | peak memory |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ours, jax = row["holdfast"], row["jax"]
        if "error" in ours or "error" in jax:
            lines.append(
                f"| {row['env']} | {row['cell'].upper()} | {row['num_envs']:,} | failed: {ours.get('error') or jax['error']} |"
            )
            continue
        rest = 1 - ours["rollout_share"] - ours["update_share"]
        cells = [
            row["env"], row["cell"].upper(), f"{row['num_envs']:,}", millions(ours), millions(jax),
            f"{ours['steps_per_second'] / jax['steps_per_second']:.2f}x", solved(ours), solved(jax),
            f"{ours['rollout_share']:.0%} / {ours['update_share']:.0%} / {rest:.0%}", percent(ours), percent(jax), watts(ours),
            watts(jax), f"{ours['peak_reserved_gib']:.1f} GiB",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def growth_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| cell | environments | hidden | steps/s | ms per update | rollout / update | GPU busy | power | memory |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "error" in row:
            lines.append(f"| {row['cell'].upper()} | {row['num_envs']:,} | {row['hidden']} | failed: {row['error']} |")
            continue
        cells = [
            row["cell"].upper(), f"{row['num_envs']:,}", str(row["hidden"]), millions(row), f"{row['ms_per_update']:.1f}",
            f"{row['rollout_share']:.0%} / {row['update_share']:.0%}", percent(row), watts(row), f"{row['memory_gib']:.2f} GiB",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def millions(row: dict[str, Any]) -> str:
    rate = row["steps_per_second"] / 1e6
    return f"{rate:.1f}M" if rate >= 1 else f"{rate:.2f}M"


def solved(row: dict[str, Any]) -> str:
    return "-" if row["solved_after_seconds"] is None else f"{row['solved_after_seconds']:.1f} s"


def percent(row: dict[str, Any]) -> str:
    return "-" if row.get("gpu_busy") is None else f"{row['gpu_busy']:.0%}"


def watts(row: dict[str, Any]) -> str:
    return "-" if row.get("watts") is None else f"{row['watts']:.0f} W"


def plot(results: dict[str, Any], path: Path) -> None:
    """Steps per second and memory, against environments and against hidden size."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in results["growth"] if "error" not in row]
    figure, axes = plt.subplots(2, 2, figsize=(9.6, 6.4), sharex="col", sharey="row", constrained_layout=True)
    panels = [
        ("num_envs", "environments", lambda row: row["hidden"] == 128),
        ("hidden", "hidden size", lambda row: row["num_envs"] == 8192),
    ]
    for column, (name, label, chosen) in enumerate(panels):
        for cell in sorted({row["cell"] for row in rows}, reverse=True):
            part = sorted((row for row in rows if row["cell"] == cell and chosen(row)), key=lambda row: row[name])
            x = [row[name] for row in part]
            style: dict[str, Any] = dict(
                color=COLORS[cell], marker=MARKERS[cell], markersize=5, linewidth=1.8, label=cell.upper()
            )
            speeds = [row["steps_per_second"] / 1e6 for row in part]
            axes[0, column].plot(x, speeds, **style)
            axes[1, column].plot(x, [row["memory_gib"] for row in part], **style)
        ticks = sorted({row[name] for row in rows if chosen(row)})
        for axis in axes[:, column]:
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks], rotation=35 if column == 0 else 0)
            axis.minorticks_off()
            axis.grid(alpha=0.25)
            axis.spines[["top", "right"]].set_visible(False)
        axes[1, column].set_xlabel(label)
    jax = [
        row for row in results.get("compare", []) if row["env"] == "RepeatPreviousEasy" and "error" not in row["jax"]
    ]
    for cell in sorted({row["cell"] for row in jax}, reverse=True):
        part = [row for row in jax if row["cell"] == cell]
        axes[0, 0].plot(
            [row["num_envs"] for row in part], [row["jax"]["steps_per_second"] / 1e6 for row in part], linestyle="none",
            marker="x", markersize=7, markeredgewidth=1.8, color=COLORS[cell], label=f"JAX program, {cell.upper()}",
        )  # fmt: skip
    nice_ticks(axes[0, 0], [0.5, 1, 2, 5, 10, 20, 50], "M")
    nice_ticks(axes[0, 1], [0.5, 1, 2, 5, 10, 20, 50], "M")
    nice_ticks(axes[1, 0], [0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50], "")
    nice_ticks(axes[1, 1], [0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50], "")
    axes[0, 0].set_ylabel("environment steps per second")
    axes[1, 0].set_ylabel("GPU memory, GiB")
    axes[0, 0].set_title("hidden 128", fontsize=11)
    axes[0, 1].set_title("8,192 environments", fontsize=11)
    axes[0, 0].legend(frameon=False, fontsize=9)
    gpu = results.get("gpu", "GPU").removeprefix("NVIDIA ")
    figure.suptitle(f"PPO on one {gpu}: T = 64, 4 epochs x 4 minibatches, RepeatPreviousEasy", fontsize=12)
    figure.savefig(path, dpi=130)


def nice_ticks(axis: Any, candidates: list[float], unit: str) -> None:
    """Round numbers on a logarithmic axis, those inside its limits."""
    low, high = axis.get_ylim()
    shown = [tick for tick in candidates if low <= tick <= high]
    axis.set_yticks(shown, [f"{tick:g}{unit}" for tick in shown])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=FOLDER / "results" / "gpu_training.json")
    parser.add_argument("--table", type=Path, default=FOLDER / "results" / "gpu_training.md")
    parser.add_argument("--plot", type=Path, default=FOLDER / "results" / "gpu_training.png")
    args = parser.parse_args()
    results = json.loads(args.results.read_text())
    parts = [
        f"{results['gpu']}, torch {results['torch']}; `python benchmarks/gpu_training.py`",
        compare_table(results["compare"]),
    ]
    args.table.write_text("\n\n".join([*parts, growth_table(results["growth"])]) + "\n")
    plot(results, args.plot)


if __name__ == "__main__":
    main()
