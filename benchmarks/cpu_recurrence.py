"""LSTM and GRU over segments with resets on the CPU: Holdfast next to torch.nn, TorchRL and hand-written loops.

    python benchmarks/cpu_recurrence.py                       # the tables of docs/performance/cpu.md
    python benchmarks/cpu_recurrence.py --shapes 64,128,.01 --columns nn,hoisted,portable
    python benchmarks/cpu_recurrence.py --grid                # the native kernel at many sizes; --hidden 64 for a part

One thread, unless a column says otherwise. Before anything is timed, every contender's output and gradients are
compared with the float64 reference; a mismatch ends the run with exit status 1. The contenders of a shape take turns,
and each cell is the minimum.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from recurrence_contenders import CONTENDERS, Column
from recurrence_problem import TOLERANCE, Contender, Mismatch, Problem, Shape
from recurrence_steps import step_rows, step_table
from rich.console import Console
from rich.table import Table

from holdfast.kernels.cpu import recurrence as native

SHAPES = ("64,128,0", "64,128,.01", "64,128,.1", "8,128,.01", "8,128,.1", "8,2048,.01")
GRID = [f"{b},{t},{p}" for b, t in ((1, 128), (8, 16), (8, 128), (64, 128), (256, 64), (8, 2048)) for p in (0.01, 0.1)]
RESULTS = Path(__file__).parent / "results" / "cpu_recurrence.json"
GRID_RESULTS = RESULTS.with_name("cpu_native.json")


def check(problem: Problem, columns: list[Column]) -> dict[str, Contender]:
    """Build the contenders of one shape; each must give the reference's output and gradients."""
    answers = {True: problem.answer(True), False: problem.answer(False)}
    contenders = {}
    for column in columns:
        contender = column.build(problem)
        name, difference = contender.answer(problem).worst_difference(answers[column.resets])
        if not difference <= TOLERANCE:
            raise Mismatch(
                f"{column.key} at {problem.cell} {problem.shape}: {name} differs by {difference:.2e} of its maximum"
            )
        contenders[column.key] = contender
    return contenders


def timed(run: Callable[[], Any], threads: int) -> float:
    """Seconds. One thread: the process's CPU time, which is the wall time of a quiet machine, also on a busy one."""
    clock = time.process_time if threads == 1 else time.perf_counter
    begin = clock()
    run()
    return clock() - begin


def interleaved_minimum(
    runs: dict[str, Callable[[], Any]], repeats: dict[str, int], threads: dict[str, int] | None = None
) -> dict[str, float]:
    """Seconds: the minimum over each contender's repeats, taken in turns so that a slow moment hits all.

    A contender that takes less than 20 ms runs once untimed before its turn, to warm the caches.
    """
    best = dict.fromkeys(runs, float("inf"))
    gc.collect()
    gc.disable()
    for round_ in range(max(repeats.values())):
        for key, run in runs.items():
            if round_ < repeats[key]:
                number = (threads or {}).get(key, 1)
                torch.set_num_threads(number)
                if best[key] < 0.02:
                    run()
                best[key] = min(best[key], timed(run, number))
    gc.enable()
    torch.set_num_threads(1)
    return best


def sequence_rows(args: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """Forward + backward of every cell and shape."""
    rows = []
    for cell in args.cells:
        for text in args.shapes:
            shape = Shape.parse(text)
            columns = [c for c in args.columns if shape.steps <= c.max_steps]
            problem = Problem(cell, shape)
            contenders = check(problem, columns)
            runs = {key: (lambda c=c, p=problem: c.run(p)) for key, c in contenders.items()}
            repeats = {c.key: args.slow_repeats if c.slow else args.repeats for c in columns}
            seconds = interleaved_minimum(runs, repeats, {c.key: c.threads for c in columns})
            rows.append({"cell": cell, "shape": str(shape), "ms": {k: 1e3 * s for k, s in seconds.items()}})
            console.print(f"  {cell} {shape}: outputs and gradients agree, timed", style="dim")
    return rows


def sequence_table(rows: list[dict[str, Any]], columns: list[Column], args: argparse.Namespace) -> Table:
    title = f"forward + backward: ms, and the ratio to torch.nn without resets on one thread; minimum of {args.repeats}"
    table = Table(title=title)
    for heading in ("cell", "B, T, P(reset)"):
        table.add_column(heading)
    for column in columns:
        note = f" (of {args.slow_repeats})" if column.slow and args.slow_repeats != args.repeats else ""
        table.add_column(column.title + note, justify="right")
    for row in rows:
        base = row["ms"].get("nn")
        cells = []
        for column in columns:
            ms = row["ms"].get(column.key)
            ratio = "" if ms is None or base is None or column.key == "nn" else f"  [b]{ms / base:.2f}[/b]"
            cells.append("-" if ms is None else f"{ms:.1f}{ratio}")
        table.add_row(row["cell"], row["shape"], *cells)
    return table


def summary(rows: list[dict[str, Any]]) -> str:
    """The native kernel's ratios, mean and worst: to torch.nn, of two threads to one, of our GRU to our LSTM."""
    lines = []
    lstm = {row["shape"]: row["ms"] for row in rows if row["cell"] == "lstm"}
    for cell in ("lstm", "gru"):
        times = {row["shape"]: row["ms"] for row in rows if row["cell"] == cell}
        if not times:
            continue
        ratios = [ms["native"] / ms["nn"] for ms in times.values()]
        threads = [ms["native-2"] / ms["native"] for ms in times.values()]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        text = f"{cell}, {len(ratios)} sizes, to torch.nn: geometric mean {mean:.2f}, worst {max(ratios):.2f}"
        text += f"; two threads to one: worst {max(threads):.2f}"
        if cell == "gru" and lstm:
            own = [ms["native"] / lstm[shape]["native"] for shape, ms in times.items() if shape in lstm]
            text += f"; to our own LSTM: worst {max(own):.2f}"
        lines.append(text)
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    keys = [c.key for c in CONTENDERS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", action="store_true", help="the native kernel at many sizes, next to torch.nn")
    parser.add_argument("--hidden", nargs="+", type=int, default=[64, 128, 256], help="of the grid")
    parser.add_argument("--shapes", nargs="*", default=SHAPES, help="B,T,P or B,T,P,H; several; none: steps only")
    parser.add_argument("--columns", help=f"of {','.join(keys)}")
    parser.add_argument("--cells", nargs="+", default=["lstm", "gru"], choices=["lstm", "gru"])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--slow-repeats", type=int, default=3, help="for the contenders that take many times longer")
    parser.add_argument("--no-step", action="store_true", help="leave out the table of single steps")
    parser.add_argument("--output", type=Path, help="where the figures go, as JSON; sizes not run now stay in it")
    args = parser.parse_args()
    wanted = args.columns.split(",") if args.columns else None
    unknown = set(wanted or ()) - set(keys)
    if unknown:
        parser.error(f"unknown columns {sorted(unknown)}; choose from {keys}")
    if args.grid:
        args.shapes, args.no_step = [f"{shape},{hidden}" for hidden in args.hidden for shape in GRID], True
        args.columns = [c for c in CONTENDERS if c.in_grid]
    else:
        args.columns = [c for c in CONTENDERS if (c.key in wanted if wanted else not c.only_in_grid)]
    if not native.in_use():  # no compiler and no prebuilt library here
        args.columns = [c for c in args.columns if not c.key.startswith("native")]
    args.output = args.output or (GRID_RESULTS if args.grid else RESULTS)
    return args


def main() -> int:
    args = parse()
    torch.set_num_threads(1)
    console = Console(width=200 if not sys.stdout.isatty() else None)
    try:
        rows = sequence_rows(args, console)
        steps = [] if args.no_step else [row for cell in args.cells for row in step_rows(cell, args.repeats)]
    except Mismatch as mismatch:
        console.print(f"mismatch: {mismatch}", style="bold red")
        return 1
    console.print(sequence_table(rows, args.columns, args))
    if steps:
        console.print(step_table(steps))
    before = json.loads(args.output.read_text()) if args.output.exists() else {"sequences": [], "steps": []}
    again = {(row["cell"], row["shape"]) for row in rows}
    rows = [row for row in before["sequences"] if (row["cell"], row["shape"]) not in again] + rows
    if args.grid:
        console.print(summary(rows))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    figures = {"machine": machine(), "sequences": rows, "steps": steps or before["steps"]}
    args.output.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


def machine() -> dict[str, Any]:
    return {"processor": processor(), "torch": torch.__version__, "python": platform.python_version(), "threads": 1}


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


if __name__ == "__main__":
    sys.exit(main())
