"""`SideBySide` shows runs that train at the same time: a table in a terminal, plain lines elsewhere, nothing if quiet.

The runs are other processes; what is shown is the last row of each run's progress.csv.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.config import RunConfig
from holdfast.display import chart, dashboard
from holdfast.runs.log import CSV_NAME
from holdfast.shown_text import show

PLAIN_LINES = 10
"""Lines per run without a terminal."""
_TAIL = 8192
"""Bytes at the end of a file that hold its last row."""


class SideBySide:
    """Shows runs that differ in their seeds. `console`: where to; by default standard output."""

    def __init__(self, configs: Sequence[RunConfig], *, console: Any = None) -> None:
        self._configs, self._quiet = list(configs), configs[0].quiet
        self._next_line = {config.seed: 1.0 for config in configs}
        self._ended: dict[int, str] = {}
        self._live: Any = None
        if self._quiet and console is None:
            return
        from holdfast.display.terminal import Terminal

        self._console = Terminal(highlight=False, soft_wrap=True) if console is None else console
        self._is_live = self._console.is_terminal and not self._console.is_dumb_terminal

    def refresh(self) -> None:
        """Show how far the runs are."""
        if self._quiet:
            return
        if not self._is_live:
            self._print_plain()
            return
        if self._live is None:
            from rich.live import Live

            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        self._live.update(self._table(), refresh=True)

    def ended(self, config: RunConfig, text: str) -> None:
        """A run is over, and `text` is its result or its error: a line that stays."""
        self._ended[config.seed] = text
        if self._live is not None:
            self._live.console.print(f"seed {config.seed}  {text}", markup=False, soft_wrap=True)
        else:
            show(*f"seed {config.seed}  {text}".splitlines())

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _print_plain(self) -> None:
        for config in self._configs:
            row = last_row(config.folder)
            update, last = row.get("update", 0.0), config.num_updates
            if config.seed not in self._ended and update >= self._next_line[config.seed]:
                self._next_line[config.seed] = update + last / PLAIN_LINES
                line = dashboard.plain_line(row, last, _remaining(row, last))
                self._console.print(f"seed {config.seed}  {line}", markup=False, soft_wrap=True)

    def _table(self) -> Any:
        from rich.table import Table

        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style=f"bold {dashboard.ACCENT}")
        table.add_column("seed", justify="right")
        table.add_column("")
        for name in ("steps", "return", "length", "steps/s", "left"):
            table.add_column(name, justify="right", no_wrap=True)
        for config in self._configs:
            table.add_row(*self._cells(config))
        return table

    def _cells(self, config: RunConfig) -> list[str]:
        row, last = last_row(config.folder), config.num_updates
        if not row:
            return [str(config.seed), "failed" if config.seed in self._ended else "waiting"]
        remaining = _remaining(row, last)
        return [
            str(config.seed),
            chart.bar(min(1.0, row["update"] / last), 20),
            dashboard.compact(row.get("steps", 0.0)),
            dashboard.number(row.get("rollout/ep_rew_mean", math.nan)),
            dashboard.number(row.get("rollout/ep_len_mean", math.nan), digits=0),
            f"{row.get('time/fps', 0):,.0f}",
            "done" if config.seed in self._ended else dashboard.clock(remaining) if remaining is not None else "-",
        ]


def last_row(run: Path) -> dict[str, float]:
    """The last whole row of a run's progress.csv; {} while there is none."""
    try:
        with open(run / CSV_NAME, "rb") as file:
            header = file.readline()
            begin = file.tell()
            file.seek(max(begin, file.seek(0, 2) - _TAIL))
            lines = file.read().split(b"\n")[:-1]  # what follows the last line break is torn
    except OSError:
        return {}
    if not lines or not header.endswith(b"\n"):
        return {}
    names, texts = (next(csv.reader([line.decode(errors="replace").strip()])) for line in (header, lines[-1]))
    if len(names) != len(texts):
        return {}
    try:
        return {name: float(text) for name, text in zip(names, texts) if text}
    except ValueError:
        return {}


def _remaining(row: dict[str, float], num_updates: int) -> float | None:
    """Seconds, at the speed so far."""
    update, elapsed = row.get("update", 0.0), row.get("time/elapsed")
    return None if not update or elapsed is None else elapsed / update * max(0.0, num_updates - update)
