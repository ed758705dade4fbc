"""`Display`: a training run in the terminal, live; plain lines where there is no terminal; nothing when quiet."""

from __future__ import annotations

import math
import re
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from holdfast.config import TrainConfig
from holdfast.display import dashboard
from holdfast.runs.log import read_progress

PLAIN_LINES = 25
"""Lines per run without a terminal, besides notes and warnings."""
MAX_PLAIN_WARNINGS = 8
SECONDS_BETWEEN_FRAMES = 0.4
MAX_POINTS = 2000
"""Points of a curve that are kept; of more, every second one."""
TIME_KEYS = ("time/env", "time/policy", "time/update")


class Display:
    """Shows each update of a run. `console` is for tests; by default it is the process's standard output."""

    def __init__(self, config: TrainConfig, num_updates: int, *, console: Any = None) -> None:
        self.quiet = config.quiet
        if self.quiet:
            return
        from rich.console import Console

        self._console = Console(highlight=False, soft_wrap=False) if console is None else console
        self._folder = config.folder
        self._progress = dashboard.Progress(
            title=_title(config),
            subtitle=str(config.folder),
            total_steps=num_updates * config.num_envs * config.num_steps,
            num_updates=num_updates,
        )
        self._progress.chance, self._progress.solved = _known_returns(config)
        self._began = time.monotonic()
        self._recent: deque[tuple[float, float]] = deque(maxlen=20)  # (clock, update)
        self._recent_rows: deque[Mapping[str, float]] = deque(maxlen=10)
        self._warned: set[str] = set()
        self._live: Any = None
        self._last_frame = -math.inf
        self._next_line = 0.0
        self._is_live = (
            self._console.is_terminal and not self._console.is_dumb_terminal and not self._console.is_jupyter
        )

    def update(self, row: Mapping[str, float], warnings: list[str]) -> None:
        """Show a row of metrics; values that are missing or NaN keep what was last known."""
        if self.quiet:
            return
        self._take(row)
        if self._is_live:
            self._progress.warnings += warnings
            self._draw(force=row.get("update") == self._progress.num_updates)
        else:
            self._print_plain(row, warnings)

    def note(self, text: str) -> None:
        """A line that stays: an evaluation, a checkpoint, where a run was resumed."""
        if not self.quiet:
            self._console.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the last picture on the screen and give the terminal back."""
        if not self.quiet and self._live is not None:
            self._draw(force=True)
            self._live.stop()
            self._live = None

    # --- inside -----------------------------------------------------------------------------------------

    def _take(self, row: Mapping[str, float]) -> None:
        progress = self._progress
        if not progress.row and row.get("update", 1) > 1:
            self._recall(row["update"])
        now = time.monotonic()
        self._recent.append((now, row.get("update", 0.0)))
        self._recent_rows.append(row)
        progress.elapsed = row.get("time/elapsed", now - self._began)
        progress.remaining = self._remaining()
        progress.shares = _shares(self._recent_rows)
        self._remember(row)

    def _remember(self, row: Mapping[str, float]) -> None:
        progress = self._progress
        for key, value in row.items():
            if math.isfinite(value):
                progress.row[key] = value
                progress.history.setdefault(key, []).append(value)
        progress.curve.append((row.get("steps", math.nan), row.get("rollout/ep_rew_mean", math.nan)))
        series: list[list[Any]] = [progress.curve, *progress.history.values()]
        for points in series:
            if len(points) > MAX_POINTS:
                del points[::2]

    def _recall(self, before: float) -> None:
        """A resumed run: its curve so far is in the run folder."""
        for texts in read_progress(self._folder):
            values = {key: float(text) for key, text in texts.items() if text}
            if values.get("update", math.inf) < before:
                self._remember(values)

    def _remaining(self) -> float | None:
        (first_clock, first), (last_clock, last) = self._recent[0], self._recent[-1]
        if last <= first:
            return None
        return (last_clock - first_clock) / (last - first) * max(0.0, self._progress.num_updates - last)

    def _draw(self, force: bool) -> None:
        now = time.monotonic()
        if not force and now - self._last_frame < SECONDS_BETWEEN_FRAMES:
            return
        self._last_frame = now
        width, height = self._console.size
        picture = dashboard.render(self._progress, width, height)
        if self._live is None:
            from rich.live import Live

            self._live = Live(picture, console=self._console, auto_refresh=False, redirect_stderr=False)
            self._live.start()
        self._live.update(picture, refresh=True)

    def _print_plain(self, row: Mapping[str, float], warnings: list[str]) -> None:
        update, last = row.get("update", 0.0), self._progress.num_updates
        if update >= self._next_line or update == last:
            self._next_line = update + last / PLAIN_LINES
            line = dashboard.plain_line(row, last, self._progress.remaining)
            self._console.print(line, markup=False, soft_wrap=True)
        for warning in warnings:
            kind = re.sub(r"[-+\d.,e]+", "#", warning)
            if kind not in self._warned and len(self._warned) < MAX_PLAIN_WARNINGS:
                self._warned.add(kind)
                self._console.print(f"warning: {warning}", markup=False, soft_wrap=True)


def _title(config: TrainConfig) -> str:
    memory = "no memory" if config.core == "none" else f"{config.core} {config.hidden_size}"
    layers = f" x {config.num_layers}" if config.num_layers > 1 and config.core != "none" else ""
    env = config.env.removeprefix("holdfast/")
    return f"{env} · {memory}{layers} · {config.num_envs} envs x {config.num_steps} · seed {config.seed}"


def _known_returns(config: TrainConfig) -> tuple[float | None, float | None]:
    """Return of chance and of a perfect policy, for the environments that come with Holdfast."""
    from holdfast.envs.catalog import list_envs

    for env in list_envs():
        if env.id == config.env and not config.env_kwargs:
            return env.chance_return, env.solved_return
    return None, None


def _shares(rows: deque[Mapping[str, float]]) -> dict[str, float]:
    """Share of time in env, policy and update over some rows, of what they sum to or, if longer, of the clock."""
    seconds = {key: sum(row.get(key, 0.0) for row in rows) for key in TIME_KEYS}
    clocks = [row["time/elapsed"] for row in rows if "time/elapsed" in row]
    total = max(sum(seconds.values()), (clocks[-1] - clocks[0]) * len(rows) / max(1, len(rows) - 1) if clocks else 0)
    return {key: value / total for key, value in seconds.items()} if total > 0 else {}
