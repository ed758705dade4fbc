"""`Display` shows a training run: a live dashboard in a terminal, plain lines elsewhere, nothing with --quiet.

It decides when something is drawn or printed; what it looks like is `dashboard.py`.
"""

from __future__ import annotations

import math
import re
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from holdfast.config import RunConfig
from holdfast.display import dashboard
from holdfast.distributed.metrics import Metric
from holdfast.runs.log import read_progress

PLAIN_LINES = 25
"""Lines per run without a terminal, not counting notes and warnings."""
MAX_PLAIN_WARNINGS = 8
SECONDS_BETWEEN_FRAMES = 0.4
MAX_POINTS = 2000
"""Most points kept of a curve; beyond it, every second one is dropped."""
TIME_KEYS = ("time/env", "time/policy", "time/update")


class Display:
    """Shows a run, update by update. metrics: what its rows hold. actions: how those of "training" and "evaluation" are drawn.
    console: where to; by default standard output."""

    def __init__(
        self,
        config: RunConfig,
        num_updates: int,
        metrics: Sequence[Metric] = (),
        actions: Mapping[str, str] | None = None,
        *,
        console: Any = None,
    ) -> None:
        self.quiet = config.quiet
        if self.quiet:
            return
        from holdfast.display.terminal import Terminal

        self._console = Terminal(highlight=False, soft_wrap=False) if console is None else console
        self._folder = config.folder
        self.progress = dashboard.RunView(
            title=_title(config),
            subtitle=str(config.folder),
            total_steps=num_updates * config.num_envs * config.num_steps,
            num_updates=num_updates,
            metrics=metrics,
            actions=actions or {},
        )
        self.progress.chance, self.progress.solved = _known_returns(config)
        self._began = time.monotonic()
        self._recent: deque[tuple[float, float]] = deque(maxlen=20)  # (clock, update)
        self._recent_rows: deque[Mapping[str, float]] = deque(maxlen=10)
        self._warned: set[str] = set()
        self._live: Any = None
        self._last_frame = -math.inf
        self._next_line = 0.0
        width, height = self._console.size
        self._is_live = (
            self._console.is_terminal
            and not self._console.is_dumb_terminal
            and not self._console.is_jupyter
            and width >= dashboard.MIN_WIDTH
            and height >= dashboard.MIN_HEIGHT
        )

    def update(self, row: Mapping[str, float], warnings: list[str]) -> None:
        """Show a row of metrics. A metric that is missing or NaN keeps its last value."""
        if self.quiet:
            return
        self._record(row)
        with _output_may_fail():
            if self._is_live:
                self.progress.warnings += warnings
                self._draw(force=row.get("update") == self.progress.num_updates)
            else:
                self._print_plain(row, warnings)

    def note(self, text: str) -> None:
        """Print a line that stays above the dashboard: which engines run, where a run was resumed, a problem."""
        if not self.quiet:
            with _output_may_fail():
                self._console.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Draw the final dashboard and leave it on the screen."""
        if not self.quiet and self._live is not None:
            with _output_may_fail():
                self._draw(force=True)
                self._live.stop()
            self._live = None

    def _record(self, row: Mapping[str, float]) -> None:
        progress = self.progress
        if not progress.row and row.get("update", 1) > 1:
            self._load_earlier_rows(row["update"])
        now = time.monotonic()
        self._recent.append((now, row.get("update", 0.0)))
        self._recent_rows.append(row)
        progress.elapsed = row.get("time/elapsed", now - self._began)
        progress.remaining = self._remaining()
        progress.shares = _shares(self._recent_rows)
        self._append(row)

    def _append(self, row: Mapping[str, float]) -> None:
        progress = self.progress
        for key, value in row.items():
            if math.isfinite(value):
                progress.row[key] = value
                progress.history.setdefault(key, []).append(value)
        progress.curve.append((row.get("steps", math.nan), row.get("rollout/ep_rew_mean", math.nan)))
        series: list[list[Any]] = [progress.curve, *progress.history.values()]
        for points in series:
            if len(points) > MAX_POINTS:
                del points[::2]

    def _load_earlier_rows(self, before: float) -> None:
        """The curve of a resumed run so far, from its folder."""
        for texts in read_progress(self._folder):
            values = {key: float(text) for key, text in texts.items() if text}
            if values.get("update", math.inf) < before:
                self._append(values)

    def _remaining(self) -> float | None:
        (first_clock, first), (last_clock, last) = self._recent[0], self._recent[-1]
        if last <= first:
            return None
        return (last_clock - first_clock) / (last - first) * max(0.0, self.progress.num_updates - last)

    def _draw(self, force: bool) -> None:
        now = time.monotonic()
        if not force and now - self._last_frame < SECONDS_BETWEEN_FRAMES:
            return
        self._last_frame = now
        width, height = self._console.size
        picture = dashboard.render(self.progress, width, height)
        if self._live is None:
            from rich.live import Live

            self._live = Live(picture, console=self._console, auto_refresh=False, redirect_stderr=False)
            self._live.start()
        self._live.update(picture, refresh=True)

    def _print_plain(self, row: Mapping[str, float], warnings: list[str]) -> None:
        update, last = row.get("update", 0.0), self.progress.num_updates
        if update >= self._next_line or update == last:
            self._next_line = update + last / PLAIN_LINES
            line = dashboard.plain_line(row, last, self.progress.remaining, self.progress.metrics)
            self._console.print(line, markup=False, soft_wrap=True)
        for warning in warnings:
            kind = re.sub(r"[-+\d.,e]+", "#", warning)
            if kind not in self._warned and len(self._warned) < MAX_PLAIN_WARNINGS:
                self._warned.add(kind)
                self._console.print(f"warning: {warning}", markup=False, soft_wrap=True)


@contextmanager
def _output_may_fail() -> Iterator[None]:
    """A run goes on when a disk that takes its output is full; when the reader of a pipe has closed it, it ends."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError:
        pass


def _title(config: RunConfig) -> str:
    memory = "no memory" if config.core == "none" else f"{config.core} {config.hidden_size}"
    layers = f" x {config.num_layers}" if config.num_layers > 1 and config.core != "none" else ""
    env = config.env.removeprefix("holdfast/")
    return f"{env} · {memory}{layers} · {config.num_envs} env{'s' * (config.num_envs != 1)} x {config.num_steps} · seed {config.seed}"


def _known_returns(config: RunConfig) -> tuple[float | None, float | None]:
    """Returns of chance and of a perfect policy, for the environments that come with Holdfast."""
    from holdfast.envs.catalog import list_envs

    for env in list_envs():
        if env.id == config.env and not config.env_kwargs:
            return env.chance_return, env.solved_return
    return None, None


def _shares(rows: deque[Mapping[str, float]]) -> dict[str, float]:
    """Shares of time in env, policy and update over some rows: of their sum, or of the wall clock if that is longer."""
    seconds = {key: sum(row.get(key, 0.0) for row in rows) for key in TIME_KEYS}
    clocks = [row["time/elapsed"] for row in rows if "time/elapsed" in row]
    total = max(sum(seconds.values()), (clocks[-1] - clocks[0]) * len(rows) / max(1, len(rows) - 1) if clocks else 0)
    return {key: value / total for key, value in seconds.items()} if total > 0 else {}
