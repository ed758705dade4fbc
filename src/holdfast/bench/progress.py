"""How far a bench is: one bar over all runs with the time left in a terminal, a line per finished run elsewhere."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from holdfast.bench.comparison import number
from holdfast.bench.jobs import Job
from holdfast.bench.results import Row
from holdfast.bench.settings import DEFAULT
from holdfast.display.dashboard import clock, compact
from holdfast.shown_text import printable

WINDOW = 60.0
"""Seconds over which the speed is measured that gives the time left."""


class Progress:
    """done: steps and runs of earlier commands, which are skipped now. console: where to; by default standard output."""

    def __init__(self, jobs: list[Job], done: list[Job], *, quiet: bool = False, console: Any = None) -> None:
        from holdfast.display.terminal import Terminal

        self.quiet = quiet
        self._console = Terminal(highlight=False, soft_wrap=True) if console is None else console
        self._total_runs, self._total_steps = len(jobs) + len(done), sum(job.steps for job in (*jobs, *done))
        self._finished_runs, self._finished_steps = len(done), sum(job.steps for job in done)
        self._running: dict[int, tuple[Job, int]] = {}  # by worker: the job and its steps so far
        self._began = time.monotonic()
        self._marks: deque[tuple[float, int]] = deque([(self._began, self._finished_steps)])
        self._live: Any = None

    @property
    def steps(self) -> int:
        """Of finished and running runs."""
        return self._finished_steps + sum(min(steps, job.steps) for job, steps in self._running.values())

    def speed(self) -> float:
        """Steps per second of all workers together, over the last minute."""
        now = time.monotonic()
        self._marks.append((now, self.steps))
        while len(self._marks) > 2 and now - self._marks[0][0] > WINDOW:
            self._marks.popleft()
        began, steps = self._marks[0]
        return max(0.0, (self.steps - steps) / (now - began)) if now > began else 0.0

    def remaining(self) -> float | None:
        """Seconds; None while nothing is known."""
        speed = self.speed()
        return (self._total_steps - self.steps) / speed if speed > 0 else None

    def started(self, worker: int, job: Job) -> None:
        """A worker begins a job, which may be that of a worker that died."""
        self._running = {number: running for number, running in self._running.items() if running[0].id != job.id}
        self._running[worker] = job, 0

    def stepped(self, worker: int, steps: int) -> None:
        self._running[worker] = self._running[worker][0], steps

    def ended(self, worker: int, job: Job, row: Row | None, problem: str = "") -> None:
        """A run is over: a line that stays."""
        self._running.pop(worker, None)
        self._finished_runs += 1
        self._finished_steps += job.steps
        if row is None:
            result = f"failed: {problem}"
        else:
            best = "" if row["best"] is None else f"best {number(row['best'])}  "
            result = f"{best}final {number(row['final'])}  {row['wall_seconds']:.1f} s  {compact(row['steps_per_second'])} steps/s"
        setting = "" if job.setting == DEFAULT else f" {job.setting}"
        self._print(f"{self._count()}  {job.task} {job.core} seed {job.seed}{setting}  {result}{self._left()}")

    def postponed(self, worker: int, job: Job, problem: str) -> None:
        """A run failed under MPS and is tried again later."""
        self._running.pop(worker, None)
        self._print(
            f"{job.task} {job.core} seed {job.seed}  failed under MPS, where a fault in one run ends all ({problem}); "
            "it is retried without MPS after the others"
        )

    def refresh(self) -> None:
        """Draw the bar, in a terminal."""
        if self.quiet or not self._console.is_terminal or self._console.is_dumb_terminal:
            return
        if self._live is None:
            from rich.live import Live

            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        self._live.update(self._picture(), refresh=True)

    def close(self) -> None:
        if self._live is not None:
            self.refresh()
            self._live.stop()
            self._live = None

    def _picture(self) -> Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        elapsed = clock(time.monotonic() - self._began)
        facts = f"{compact(self.steps)} of {compact(self._total_steps)} steps  {compact(self.speed())}/s  {elapsed}{self._left()}"
        bar.add_row(self._count(), ProgressBar(total=self._total_steps, completed=self.steps), facts)
        runs = [
            printable(f"  {job.task} {job.core} seed {job.seed}  {steps / job.steps:.0%}")
            for job, steps in self._running.values()
        ]
        return Group(bar, Text("\n".join(runs)))

    def _count(self) -> str:
        return f"{self._finished_runs:{len(str(self._total_runs))}} of {self._total_runs} runs"

    def _left(self) -> str:
        if self._finished_runs == self._total_runs or (left := self.remaining()) is None:
            return ""
        return f"  {clock(left)} left"

    def _print(self, text: str) -> None:
        if not self.quiet:
            self._console.print(printable(text), markup=False)
