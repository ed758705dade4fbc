"""`Profile`: where the time of a run goes, as a table and as a trace; `holdfast train --profile`.

    hf.Trainer(config, callbacks=[hf.Profile()]).run()

Some updates after warm-up are timed part by part, then a few more are traced with torch.profiler: a trace slows small
operations down, so the table is not made from it. Afterwards the run goes on, and is not watched any more.
"""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from holdfast.distributed import metrics as rank_metrics
from holdfast.engines.native import NativeGradient
from holdfast.profiling import report as profile_report
from holdfast.profiling.clock import PartClock, Place, named, wrapped
from holdfast.profiling.report import Timed
from holdfast.profiling.trace import Trace
from holdfast.training import replay_check, telemetry
from holdfast.training.callbacks import Callback

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from holdfast.training.trainer import Trainer

TABLE_NAME, TRACE_NAME = "profile.txt", "trace.json.gz"
WARM_UP, TIMED, TIMED_SECONDS = 10, 20, 30.0
"""Updates let pass, and updates timed; fewer of those if they take longer."""
TRACED, TRACED_SECONDS = 4, 0.3
"""Updates traced; fewer if they take longer, but one at least."""
PART_SECONDS = 1.0
"""Of a traced update at most so much of its rollout and so much of the rest is recorded: a trace stays small."""


class Profile(Callback):
    """Watches a window of a run; `report` is what it found, as text."""

    def __init__(self) -> None:
        self.report = ""
        self.table: Path | None = None
        self.trace: Path | None = None
        self._stage: _Stage | None = None

    def on_run_start(self, trainer: Trainer) -> None:
        if not trainer.ranks.leads:
            return
        if trainer.device.type == "cuda":
            _prepare_for_graphs()
        self._lines: list[str] = []
        self._left = trainer.config.num_updates - trainer.update
        self._stage = _WarmUp(trainer, min(WARM_UP, self._left // 4))
        self._go_on(trainer)

    def on_update_end(self, trainer: Trainer, row: dict[str, float]) -> None:
        if self._stage is not None:
            self._left -= 1
            self._go_on(trainer)

    def on_run_end(self, trainer: Trainer) -> None:
        if self._stage is not None:  # inside the window: what there is
            self._lines += self._stage.end(trainer)
            self._finish(trainer, self._stage)

    def _go_on(self, trainer: Trainer) -> None:
        """To the next stage, if this one is over."""
        stage = self._stage
        assert stage is not None
        if not stage.is_over(trainer):
            return
        seconds_each = stage.began.seconds() / max(1, stage.began.updates(trainer))
        self._lines += stage.end(trainer)
        if isinstance(stage, _WarmUp) and self._left > 0:
            self._stage = _Timing(trainer, max(1, min(TIMED, self._left - 1)), stage.speed)
        elif isinstance(stage, _Timing) and self._left > 0:
            self._stage = _Tracing(trainer, min(TRACED, self._left, max(1, int(TRACED_SECONDS / seconds_each))))
        else:
            self._finish(trainer, stage)

    def _finish(self, trainer: Trainer, last: _Stage) -> None:
        self._stage, self.trace = None, last.trace
        folder = trainer.config.folder
        self.report = "\n".join(self._lines) or "the run ended before an update could be timed"
        trainer._say(self.report)
        try:
            (folder / TABLE_NAME).write_text(self.report + "\n")
            self.table = folder / TABLE_NAME
        except OSError as error:
            trainer._say(f"the table could not be written: {error}")


# --- one after the other ---------------------------------------------------------------------------------------------


class _Stage:
    """Some updates of a run, from now on. `end` undoes what the beginning did, and gives lines for the report."""

    trace: Path | None = None

    def __init__(self, trainer: Trainer, updates: int) -> None:
        self.began, self._updates = _Mark(trainer), updates

    def is_over(self, trainer: Trainer) -> bool:
        return self.began.updates(trainer) >= self._updates

    def end(self, trainer: Trainer) -> list[str]:
        return []


class _WarmUp(_Stage):
    speed: float | None = None
    """Steps per second in the last half of it."""

    def is_over(self, trainer: Trainer) -> bool:
        if self.began.updates(trainer) == self._updates // 2:
            self._settled = _Mark(trainer)
        return super().is_over(trainer)

    def end(self, trainer: Trainer) -> list[str]:
        if self.began.updates(trainer) >= 4:
            self.speed = self._settled.speed(trainer)
        return []


class _Timing(_Stage):
    def __init__(self, trainer: Trainer, updates: int, unwatched: float | None) -> None:
        self._unwatched = unwatched if trainer.device.type == "cuda" else None
        self._clock = PartClock(trainer.device)
        self._places = _places(trainer)
        self._methods = wrapped(self._places, self._clock.around)
        self._methods.__enter__()
        super().__init__(trainer, updates)

    def is_over(self, trainer: Trainer) -> bool:
        return super().is_over(trainer) or self.began.seconds() > TIMED_SECONDS

    def end(self, trainer: Trainer) -> list[str]:
        self._methods.__exit__(None, None, None)
        self._clock.wait()
        began, updates = self.began, self.began.updates(trainer)
        if updates < 1:
            return []
        order = [name for _, _, name in self._places]
        parts = dict(sorted(self._clock.parts.items(), key=lambda part: [order.index(name) for name in part[0]]))
        timed = Timed(began.update + 1, updates, trainer.steps - began.steps, began.seconds(), parts)
        return [*profile_report.parts_table(timed, self._unwatched), *_not_seen(trainer, timed), ""]


class _Tracing(_Stage):
    def __init__(self, trainer: Trainer, updates: int) -> None:
        self._recording = _Recording(trainer.device)
        self._methods = wrapped(_places(trainer), self._recording.around)
        self._methods.__enter__()
        super().__init__(trainer, updates)
        self._recording.start()

    def end(self, trainer: Trainer) -> list[str]:
        seconds = self._recording.stop()
        self._methods.__exit__(None, None, None)
        updates, path = self.began.updates(trainer), trainer.config.folder / TRACE_NAME
        if updates < 1:
            return []
        try:
            self._recording.profiler.export_chrome_trace(str(path))
            trace, size = Trace.load(path), path.stat().st_size / 2**20
        except (OSError, RuntimeError) as error:
            return [f"the trace could not be written: {error}"]
        self.trace = path
        table = profile_report.costs_table(trace, trainer.device.type == "cuda", updates, seconds)
        return [*table, "", f"trace  {path} ({size:.1f} MB); open it at https://ui.perfetto.dev"]


class _Mark:
    """A moment of a run."""

    def __init__(self, trainer: Trainer) -> None:
        if trainer.device.type == "cuda":
            torch.cuda.synchronize()
        self.update, self.steps, self._clock = trainer.update, trainer.steps, time.perf_counter()

    def seconds(self) -> float:
        return time.perf_counter() - self._clock

    def updates(self, trainer: Trainer) -> int:
        """Since then."""
        return trainer.update - self.update

    def speed(self, trainer: Trainer) -> float:
        return (trainer.steps - self.steps) / self.seconds()


class _Recording:
    """torch.profiler, with the names of the parts, and a bound on what it records of long ones."""

    def __init__(self, device: torch.device) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # its remarks would tear up the display
        activity = torch.profiler.ProfilerActivity
        self._activities = [activity.CPU, *([activity.CUDA] if device.type == "cuda" else [])]
        self._gpu = device.type == "cuda"
        self.profiler = torch.profiler.profile(activities=self._activities, acc_events=True)  # else it warns
        self._on = False
        self._seconds = self._since = self._part_began = 0.0

    def start(self) -> None:
        self.profiler.start()
        self._on = True
        self._since = self._part_began = time.perf_counter()

    def stop(self) -> float:
        """End the recording; the seconds that are in it."""
        if self._gpu:
            torch.cuda.synchronize()
        self._pause()
        self.profiler.stop()
        return self._seconds

    def around(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        annotated = named(name, method)

        def bounded(*args: Any, **options: Any) -> Any:
            if name in ("rollout", "update"):
                self._part_began = time.perf_counter()
                self._toggle(True)
            elif self._on and time.perf_counter() - self._part_began > PART_SECONDS:
                self._toggle(False)
            return annotated(*args, **options)

        return bounded

    def _pause(self) -> None:
        if self._on:
            self._seconds += time.perf_counter() - self._since
            self._on = False

    def _toggle(self, on: bool) -> None:
        if on == self._on:
            return
        with _stderr_silent():  # it warns each time
            self.profiler.toggle_collection_dynamic(on, self._activities)
        self._pause()
        if on:
            self._on, self._since = True, time.perf_counter()


def _places(trainer: Trainer) -> list[Place]:
    """What is timed. Which of it lies inside what else shows when it runs."""
    collector, ppo, policy, feed = trainer.collector, trainer.ppo, trainer.policy, trainer.collector.adapter
    rollout_graph, minibatch_graph = getattr(collector, "_graph", None), getattr(ppo, "_graph", None)
    in_graph, after = getattr(minibatch_graph, "_graph", None), getattr(minibatch_graph, "_rest", None)
    several = trainer.ranks.size > 1
    places: list[tuple[Any, str, str, bool]] = [
        (collector, "rollout", "rollout", True),
        (policy, "act", "policy", True),
        (feed, "step", "environment", True),
        (policy, "peek_value", "values for bootstrapping", True),
        (collector, "_advantages", "advantages (GAE)", True),
        (rollout_graph, "replay", "policy, environment, GAE (one CUDA graph)", rollout_graph is not None),
        (collector, "_episodes", "returns of the episodes that ended", True),
        (replay_check, "check", "replay check", True),
        (ppo, "update", "update", True),
        (minibatch_graph, "load", "copying the rollout into the graph", minibatch_graph is not None),
        (
            in_graph,
            "replay",
            f"forward, backward{', optimiser' if after is None else ''} (one CUDA graph)",
            in_graph is not None,
        ),
        (minibatch_graph, "_average", "averaging gradients over ranks", after is not None),
        (after, "replay", "optimiser (one CUDA graph)", after is not None),
        (ppo, "_step", "minibatch", True),
        (NativeGradient, "__call__", "forward and backward (without autograd)", True),
        (ppo, "_gradients", "forward and backward", True),
        (
            ppo.training_leg,
            "forward",
            "forward",
            ppo._native_gradient() is None,
        ),  # a policy with other methods is not its kind
        (ppo, "_descend", "clipping and optimiser step", True),
        (trainer, "_staleness", "staleness of states", True),
        (trainer.reward_scale, "update", "reward statistics", trainer.reward_scale is not None),
        (policy, "update_normalizer", "observation statistics", hasattr(policy, "update_normalizer")),
        (telemetry, "memory_metrics", "telemetry of memory", True),
        (rank_metrics, "episodes", "exchange of episodes", several),
        (rank_metrics, "combine", "exchange of metrics", several),
        (trainer, "evaluate", "evaluation", True),
        (trainer.log, "write", "log", trainer.log is not None),
        (trainer.display, "update", "display", trainer.display is not None),
        (trainer, "_try_to_save", "checkpoint", True),
    ]
    return [(owner, method, name) for owner, method, name, there in places if there]


def _not_seen(trainer: Trainer, timed: Timed) -> list[str]:
    """What a run does now and then, and did not do in the window."""
    config = trainer.config
    seen = {path[-1] for path in timed.parts}
    every = {
        "checkpoint": config.checkpoint_every,
        "replay check": config.replay_check_every,
        "evaluation": config.eval_every,
    }
    missing = [f"{name} (every {n} updates)" for name, n in every.items() if n and name not in seen]
    return ["", f"  not in these updates: {', '.join(missing)}"] if missing else []


def _prepare_for_graphs() -> None:
    """Kernels of a CUDA graph appear in a trace only if the tracer was there when the graph was captured."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True):
        pass


@contextmanager
def _stderr_silent() -> Iterator[None]:
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
