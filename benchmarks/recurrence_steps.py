"""One step without gradients, B = 64, I = H = 128: our cores next to torch.nn's cells.

A step takes a fraction of a millisecond, so each call is timed on its own: the minimum over the rounds of each of 40
patterns of flags, averaged over the patterns. That is stable even on a busy machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from recurrence_problem import Mismatch
from rich.table import Table
from torch import nn

import holdfast as hf
from holdfast.kernels.cpu import recurrence as native

BATCH, HIDDEN, PATTERNS = 64, 128, 40
ROUNDS_PER_REPEAT = 4


def step_rows(cell: str, repeats: int) -> list[dict[str, Any]]:
    """Microseconds per call of torch.nn's cell and of our core with each kernel, without flags and with."""
    torch.manual_seed(0)
    theirs = (nn.LSTMCell if cell == "lstm" else nn.GRUCell)(HIDDEN, HIDDEN)
    x = torch.randn(BATCH, HIDDEN)
    flags = {p: (torch.rand(PATTERNS, BATCH) < p).unbind(0) for p in (0.01, 0.1)}
    runs: dict[tuple[str, str], list[Callable[[], Any]]] = {}
    for kernel in ("portable", "native") if native.in_use() else ("portable",):
        core = (hf.LSTM if cell == "lstm" else hf.GRU)(HIDDEN, HIDDEN, kernel=kernel)
        core.load_state_dict({f"{name}_l0": p for name, p in theirs.state_dict().items()})
        state = core.initial_state(BATCH)
        inner = [leaf.squeeze(1) for leaf in state.values()]
        start = tuple(inner) if cell == "lstm" else inner[0]
        check(core, state, theirs, start, x)
        runs["torch.nn", "none"] = [lambda s=start: theirs(x, s)] * PATTERNS
        runs[kernel, "none"] = [lambda c=core, s=state: c(x, s)] * PATTERNS
        for p, patterns in flags.items():
            runs[kernel, f"{p:g}"] = [lambda c=core, s=state, r=r: c(x, s, r) for r in patterns]
    seconds = each_calls_minimum(runs, ROUNDS_PER_REPEAT * repeats)
    base = seconds["torch.nn", "none"]
    return [
        {"cell": cell, "kernel": kernel, "p": p, "us": 1e6 * s, "ratio": s / base} for (kernel, p), s in seconds.items()
    ]


@torch.no_grad()
def check(core: hf.Core, state: Any, theirs: nn.Module, start: Any, x: torch.Tensor) -> None:
    expected = theirs(x, start)
    if not torch.allclose(core(x, state)[0], expected[0] if isinstance(expected, tuple) else expected, atol=1e-6):
        raise Mismatch(f"a step of {core} differs from torch.nn's")


@torch.no_grad()
def each_calls_minimum(
    runs: dict[tuple[str, str], list[Callable[[], Any]]], rounds: int
) -> dict[tuple[str, str], float]:
    """Seconds per call; contenders take turns."""
    best = {key: [float("inf")] * len(calls) for key, calls in runs.items()}
    now = time.perf_counter
    for _ in range(rounds):
        for key, calls in runs.items():
            times = best[key]
            for i, call in enumerate(calls):
                begin = now()
                call()
                taken = now() - begin
                if taken < times[i]:
                    times[i] = taken
    return {key: sum(times) / len(times) for key, times in best.items()}


def step_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title=f"one step without gradients, B = {BATCH}, H = {HIDDEN}: us, and the ratio to torch.nn's cell")
    columns = list(dict.fromkeys((row["kernel"], row["p"]) for row in rows))
    table.add_column("cell")
    for kernel, p in columns:
        what = (
            "torch.nn cell"
            if kernel == "torch.nn"
            else f"Holdfast {kernel}, " + ("no flags" if p == "none" else f"P(reset) {p}")
        )
        table.add_column(what, justify="right")
    for cell in dict.fromkeys(row["cell"] for row in rows):
        mine = {(row["kernel"], row["p"]): row for row in rows if row["cell"] == cell}
        texts = []
        for column in columns:
            ratio = "" if column[0] == "torch.nn" else f"  [b]{mine[column]['ratio']:.2f}[/b]"
            texts.append(f"{mine[column]['us']:.0f}{ratio}")
        table.add_row(cell, *texts)
    return table
