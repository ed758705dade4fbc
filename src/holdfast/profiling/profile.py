"""`Profile`: where the time of a run goes, as a table and as a trace; `holdfast train --profile`.

    hf.Trainer(config, callbacks=[hf.Profile()]).run()

After warm-up some updates are timed span by span; then a few more are traced with torch.profiler. The table is not made
from the trace, because tracing slows small operations down. Afterwards the run continues unobserved.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from holdfast.profiling import report
from holdfast.profiling.clock import SpanClock
from holdfast.profiling.recording import TraceRecorder, prepare_for_graphs
from holdfast.profiling.trace import Trace
from holdfast.runs.writing import write_whole
from holdfast.spans import listening
from holdfast.training.callbacks import Callback

if TYPE_CHECKING:
    from holdfast.training.trainer import Trainer

TABLE_NAME, TRACE_NAME = "profile.txt", "trace.json.gz"
WARM_UP, TIMED, TIMED_SECONDS = 10, 20, 30.0
"""Updates before the first timed one; updates timed; fewer are timed if they take longer than this together."""
TRACED, TRACED_SECONDS = 4, 0.3
"""Updates traced; fewer if they take longer than this together, but at least one."""


class Profile(Callback):
    """Observes some updates of a run. `report` is the result as text, `table` and `trace` are the files."""

    only_watches = True

    def __init__(self) -> None:
        self.report = ""
        self.table: Path | None = None
        self.trace: Path | None = None
        self._stage: _Stage | None = None

    def on_run_start(self, trainer: Trainer) -> None:
        if not trainer.ranks.leads:
            return
        if trainer.device.type == "cuda":
            prepare_for_graphs()
        self._lines: list[str] = []
        self._updates_left = trainer.config.num_updates - trainer.update
        self._stage = _WarmUp(trainer, min(WARM_UP, self._updates_left // 4))
        self._advance(trainer)

    def on_update_end(self, trainer: Trainer, row: dict[str, float]) -> None:
        if self._stage is not None:
            self._updates_left -= 1
            self._advance(trainer)

    def on_run_end(self, trainer: Trainer) -> None:
        if self._stage is not None:  # the run ended early: report what there is
            self._lines += self._stage.end(trainer)
            self._finish(trainer, self._stage)

    def _advance(self, trainer: Trainer) -> None:
        """Go to the next stage if the present one is over."""
        stage = self._stage
        assert stage is not None
        if not stage.is_over(trainer):
            return
        seconds_each = stage.start.seconds() / max(1, stage.start.updates(trainer))
        self._lines += stage.end(trainer)
        if isinstance(stage, _WarmUp) and self._updates_left > 0:
            self._stage = _Timing(trainer, max(1, min(TIMED, self._updates_left - 1)), stage.speed)
        elif isinstance(stage, _Timing) and self._updates_left > 0:
            updates = min(TRACED, self._updates_left, max(1, int(TRACED_SECONDS / seconds_each)))
            self._stage = _Tracing(trainer, updates)
        else:
            self._finish(trainer, stage)

    def _finish(self, trainer: Trainer, last: _Stage) -> None:
        self._stage, self.trace = None, last.trace
        folder = trainer.config.folder
        self.report = "\n".join(self._lines) or "the run ended before an update could be timed"
        trainer.notify(self.report)
        try:
            write_whole(folder / TABLE_NAME, [f"{self.report}\n".encode()])
            self.table = folder / TABLE_NAME
        except OSError as error:
            trainer.notify(f"the table could not be written: {error}")


# --- the stages, in order ---------------------------------------------------------------------------------------------


class _Stage:
    """A number of updates, starting now. `end` stops observing and returns lines for the report."""

    trace: Path | None = None

    def __init__(self, trainer: Trainer, updates: int) -> None:
        self.start, self._updates = _Moment(trainer), updates

    def is_over(self, trainer: Trainer) -> bool:
        return self.start.updates(trainer) >= self._updates

    def end(self, trainer: Trainer) -> list[str]:
        return []


class _WarmUp(_Stage):
    speed: float | None = None
    """Steps per second in the second half."""

    def is_over(self, trainer: Trainer) -> bool:
        if self.start.updates(trainer) == self._updates // 2:
            self._middle = _Moment(trainer)
        return super().is_over(trainer)

    def end(self, trainer: Trainer) -> list[str]:
        if self.start.updates(trainer) >= 4:
            self.speed = self._middle.speed(trainer)
        return []


class _Timing(_Stage):
    def __init__(self, trainer: Trainer, updates: int, unobserved_speed: float | None) -> None:
        self._unobserved_speed = unobserved_speed if trainer.device.type == "cuda" else None
        self._clock = SpanClock(trainer.device)
        self._observing = ExitStack()
        self._observing.enter_context(listening(self._clock.span))
        super().__init__(trainer, updates)

    def is_over(self, trainer: Trainer) -> bool:
        return super().is_over(trainer) or self.start.seconds() > TIMED_SECONDS

    def end(self, trainer: Trainer) -> list[str]:
        self._observing.close()
        self._clock.synchronize()
        start, updates = self.start, self.start.updates(trainer)
        if updates < 1:
            return []
        steps = trainer.steps - start.steps
        timed = report.Timed(start.update + 1, updates, steps, start.seconds(), self._clock.spent)
        return [*report.spans_table(timed, self._unobserved_speed), *_not_seen(trainer, timed), ""]


class _Tracing(_Stage):
    def __init__(self, trainer: Trainer, updates: int) -> None:
        self._recorder = TraceRecorder(trainer.device)
        self._observing = ExitStack()
        self._observing.enter_context(listening(self._recorder.span))
        super().__init__(trainer, updates)
        self._recorder.start()

    def end(self, trainer: Trainer) -> list[str]:
        seconds = self._recorder.stop()
        self._observing.close()
        updates, path = self.start.updates(trainer), trainer.config.folder / TRACE_NAME
        if updates < 1:
            return []
        try:
            path.unlink(missing_ok=True)  # it may be a link
            self._recorder.save(path)
            trace, megabytes = Trace.load(path), path.stat().st_size / 2**20
        except (OSError, RuntimeError) as error:
            return [f"the trace could not be written: {error}"]
        self.trace = path
        table = report.costs_table(trace, trainer.device.type == "cuda", updates, seconds)
        return [*table, "", f"trace  {path} ({megabytes:.1f} MB); open it at https://ui.perfetto.dev"]


class _Moment:
    """A moment of a run."""

    def __init__(self, trainer: Trainer) -> None:
        if trainer.device.type == "cuda":
            torch.cuda.synchronize()
        self.update, self.steps, self._clock = trainer.update, trainer.steps, time.perf_counter()

    def seconds(self) -> float:
        """Seconds since then."""
        return time.perf_counter() - self._clock

    def updates(self, trainer: Trainer) -> int:
        """Updates since then."""
        return trainer.update - self.update

    def speed(self, trainer: Trainer) -> float:
        """Steps per second since then."""
        return (trainer.steps - self.steps) / self.seconds()


def _not_seen(trainer: Trainer, timed: report.Timed) -> list[str]:
    """Spans that occur every so many updates, and did not occur in these."""
    config = trainer.config
    seen = {path[-1] for path in timed.spent}
    every = {
        "checkpoint": config.checkpoint_every,
        "replay check": config.replay_check_every,
        "evaluation": config.eval_every,
    }
    missing = [
        f"{name} (every {f'{n} updates' if n > 1 else 'update'})" for name, n in every.items() if n and name not in seen
    ]
    return ["", f"  not in these updates: {', '.join(missing)}"] if missing else []
