"""How far back does each memory recall? Steps of training until the mean return of the last 100 episodes is 0.95.

    python benchmarks/memory_span.py                                        # every cell that is not done yet; days of CPU
    python benchmarks/memory_span.py --task recall --cores window lru --spans 16 64 --seeds 1
    python benchmarks/memory_span.py --report                               # table, JSON and plot of what is done

Two tasks. `recall` is RepeatPrevious: name what was seen k steps ago, at every step (k: 4 to 256). `maze` is TMaze: one sign
at the start decides a turn at the end of a corridor (20 to 500 steps). A core is told the span (`memory_span`): gates
start out open for as long, and a window has that length. All other settings are the same for all cores. A cell ends at the
threshold or at --max-steps. Its result is kept in benchmarks/results/memory_span/, so that an interrupted run continues.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import holdfast as hf
from holdfast.cores.named import CORES

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PLOT = HERE.parent / "docs" / "memory_span.png"
SPANS = {"recall": (4, 8, 16, 32, 64, 128, 256), "maze": (20, 50, 100, 200, 500)}
THRESHOLD = 0.95
TITLES = {"recall": "RepeatPrevious: what was seen k steps ago", "maze": "TMaze: a sign at the start of a corridor"}
STEP_TICKS = [factor * 10**power for power in range(4, 8) for factor in (1, 2, 5)]
CARDS_PER_DECK = 52


def config_of(task: str, core: str, span: int, seed: int, max_steps: int) -> hf.TrainConfig:
    """The same settings for all cores; only the length of segments and the discount follow the span."""
    common: dict[str, Any] = dict(
        core=core, seed=seed, hidden_size=64, num_envs=64, minibatches=4, learning_rate=2e-3, lr_schedule="constant",
        total_steps=max_steps, stop_at=THRESHOLD, threads=1, quiet=True, tensorboard=False, checkpoint_every=0,
        device="cpu",
    )  # fmt: skip
    if task == "recall":
        decks = -(-5 * span // (2 * CARDS_PER_DECK))  # k is 40% of an episode, as in POPGym's hard task, or less
        return hf.TrainConfig(
            env="holdfast/RepeatPreviousHard-v0", env_kwargs={"k": span, "num_decks": decks}, memory_span=span,
            num_steps=max(128, 2 * span), gamma=0.3, gae_lambda=0.9, entropy_coef=0.003, **common,
        )  # fmt: skip
    return hf.TrainConfig(
        env="holdfast/TMaze-v0", env_kwargs={"length": span}, memory_span=2 * span, num_steps=max(128, 2 * span),
        gamma=max(0.99, 1 - 0.5 / span), gae_lambda=0.99, entropy_coef=0.02, **common,
    )  # fmt: skip


class FirstUpdateAtThreshold(hf.Callback):
    """Steps and CPU-seconds up to the first update at which the recent returns are at the threshold."""

    def __init__(self) -> None:
        self.began, self.steps, self.cpu_seconds = time.process_time(), None, None  # type: ignore[var-annotated]

    def on_update_end(self, trainer: hf.Trainer, row: dict[str, float]) -> None:
        if self.steps is None and row.get("rollout/ep_rew_mean", -np.inf) >= THRESHOLD:
            self.steps, self.cpu_seconds = int(row["steps"]), time.process_time() - self.began


def run_cell(task: str, core: str, span: int, seed: int, max_steps: int) -> dict[str, Any]:
    folder = tempfile.mkdtemp()
    config = config_of(task, core, span, seed, max_steps)
    config.run_dir = folder + "/run"
    watch = FirstUpdateAtThreshold()
    trainer = hf.Trainer(config, callbacks=[watch])
    result = trainer.run()
    shutil.rmtree(folder)
    return {
        "task": task, "core": core, "span": span, "seed": seed, "max_steps": max_steps, "threshold": THRESHOLD,
        "steps_to_threshold": watch.steps, "cpu_seconds_to_threshold": watch.cpu_seconds, "steps": result.steps,
        "mean_return": result.mean_return, "cpu_seconds": time.process_time() - watch.began,
        "version": hf.__version__,
    }  # fmt: skip


def cell_path(task: str, core: str, span: int, seed: int) -> Path:
    return RESULTS / "memory_span" / f"{task}-{span}-{core}-seed{seed}.json"


def finished() -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((RESULTS / "memory_span").glob("*.json"))]


def entry(cells: list[dict[str, Any]]) -> str:
    """Median steps to the threshold, and how many seeds got there."""
    if not cells:
        return ""
    reached = [cell["steps_to_threshold"] for cell in cells if cell["steps_to_threshold"] is not None]
    best = max(cell["mean_return"] for cell in cells)
    if not reached:
        return f"{best:.2f} at {max(cell['steps'] for cell in cells) / 1e6:.2f}M"
    some = f" ({len(reached)} of {len(cells)})" if len(reached) < len(cells) else ""
    return f"**{np.median(reached) / 1e6:.2f}M**{some}"


def table(cells: list[dict[str, Any]]) -> str:
    """One table per task: cores by spans. Bold: steps to the threshold; otherwise the final return."""
    parts = []
    for task in SPANS:
        mine = [cell for cell in cells if cell["task"] == task]
        if not mine:
            continue
        spans = sorted({cell["span"] for cell in mine})
        cores = [core for core in CORES if any(cell["core"] == core for cell in mine)]
        lines = [f"| {task} | " + " | ".join(map(str, spans)) + " |", "|---" * (len(spans) + 1) + "|"]
        for core in cores:
            row = [entry([c for c in mine if c["core"] == core and c["span"] == span]) for span in spans]
            lines.append(f"| {core} | " + " | ".join(row) + " |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def plot(cells: list[dict[str, Any]], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, NullLocator

    tasks = [task for task in SPANS if any(cell["task"] == task for cell in cells)]
    figure, axes = plt.subplots(1, len(tasks), figsize=(6 * len(tasks), 4), squeeze=False)
    for axis, task in zip(axes[0], tasks):
        axis.set(xscale="log", yscale="log", title=TITLES[task], xlabel="steps to remember")
        axis.set_ylabel(f"steps to a return of {THRESHOLD} (x: not reached)")
        for core in CORES:
            mine = [cell for cell in cells if cell["task"] == task and cell["core"] == core]
            if not mine:
                continue
            done = [cell for cell in mine if cell["steps_to_threshold"] is not None]
            failed = [cell for cell in mine if cell["steps_to_threshold"] is None]
            spans = sorted({cell["span"] for cell in done})
            medians = [np.median([c["steps_to_threshold"] for c in done if c["span"] == span]) for span in spans]
            (line,) = axis.plot(spans, medians, "o-", label=core)
            beside = 1.05 ** list(CORES).index(core)  # crosses of several cores would cover each other
            axis.plot(
                [c["span"] * beside for c in failed], [c["steps"] for c in failed], "x", color=line.get_color(), ms=9
            )
        axis.set_xticks(sorted({cell["span"] for cell in cells if cell["task"] == task}))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        low, high = axis.get_ylim()
        axis.set_yticks([steps for steps in STEP_TICKS if low <= steps <= high])
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1e6:g}M"))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_minor_locator(NullLocator())
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out, dpi=110)
    plt.close(figure)


def report() -> None:
    cells = finished()
    if not cells:
        raise SystemExit("no cell is done yet; run without --report first")
    text = table(cells)
    print(text)
    (RESULTS / "memory_span.json").write_text(json.dumps(cells, indent=1) + "\n")
    (RESULTS / "memory_span.md").write_text(
        "# How far back each memory recalls\n\nMade by `python benchmarks/memory_span.py`. Bold: environment steps until the mean "
        "return of the last 100 training episodes is 0.95, median over seeds. Otherwise: the final return, and after how "
        f"many steps the run was ended.\n\n{text}\n"
    )
    plot(cells, PLOT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=tuple(SPANS), help="recall or maze; both by default")
    parser.add_argument("--cores", nargs="+", choices=tuple(CORES), default=tuple(CORES), help="all by default")
    parser.add_argument("--spans", nargs="+", type=int, help="steps to remember; the whole range by default")
    parser.add_argument("--seeds", nargs="+", type=int, default=[11, 12, 13])
    parser.add_argument("--max-steps", type=int, default=5_000_000, help="a cell that is not done by then is ended")
    parser.add_argument("--report", action="store_true", help="train nothing; write table, JSON and plot")
    args = parser.parse_args()
    torch.set_num_threads(1)
    (RESULTS / "memory_span").mkdir(parents=True, exist_ok=True)
    for task in () if args.report else [args.task] if args.task else SPANS:
        for span in args.spans or SPANS[task]:
            for core in args.cores:
                for seed in args.seeds:
                    path = cell_path(task, core, span, seed)
                    if not path.exists():
                        cell = run_cell(task, core, span, seed, args.max_steps)
                        path.write_text(json.dumps(cell) + "\n")
                        print(
                            f"{task} {span}, {core}, seed {seed}: {entry([cell])}, {cell['cpu_seconds']:.0f} CPU-s",
                            flush=True,
                        )
    report()


if __name__ == "__main__":
    main()
