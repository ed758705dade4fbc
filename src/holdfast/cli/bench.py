"""`holdfast bench`: the runs of a suite, resumable, and a table and a page of what they reach."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.cli.errors import UserError, user_errors
from holdfast.cli.flags import named_values, parse
from holdfast.shown_text import show

if TYPE_CHECKING:
    from holdfast.bench.jobs import Job
    from holdfast.bench.suite import Suite

JOBS_ON_A_GPU = 4
FOLDER = Path("runs") / "bench"


@dataclass
class BenchFlags:
    """Train the tasks of a suite and compare the results with published figures.

    holdfast bench popgym --cores gru window --tasks RepeatPrevious

    holdfast bench my_suite.toml --seeds 3

    Run the same command again after a kill: finished runs are skipped, the others continue from their checkpoints.
    """

    suite: str
    """popgym, popgym-labyrinth, control, out-of-the-box, or your own .toml or .json file."""
    cores: tuple[str, ...] = ()
    """Memories to compare: lstm, gru, mingru, lru, ffm, mlstm, window, none; by default the suite's."""
    tasks: tuple[str, ...] = ()
    """Tasks or families of tasks; by default all."""
    seeds: int | None = None
    """Number of seeds; by default the suite's."""
    first_seed: int | None = None
    """The first seed; by default the suite's."""
    steps: int | None = None
    """Steps of every run; by default the suite's."""
    device: str | None = None
    """cpu, cuda or auto; by default the suite's."""
    jobs: int | None = None
    """Runs at a time; by default one per CPU core, or 4 on a GPU."""
    mps: bool = False
    """On a GPU: let runs compute at the same time instead of in turns, through NVIDIA's MPS if it is installed."""
    tuned: bool = False
    """Use the suite's settings per family of tasks; shown in a separate table."""
    set: tuple[str, ...] = ()
    """Settings of all runs, as name=value: --set hidden_size=256 num_envs=512; shown in a separate table."""
    stop_after: float | None = None
    """Seconds after which unfinished runs are saved and stopped; the same command continues them."""
    out: str | None = None
    """Folder for results, table and page; by default runs/bench/<suite>."""
    report: bool = False
    """Run nothing; write table and page from the existing results."""
    figures: bool = False
    """Also draw learning curves and scores, as PNG and PDF."""
    allow_imports: bool = False
    """Import modules that the file of the suite names, which runs their code."""
    keep_runs: bool = False
    """Keep the folder of every finished run, with its last checkpoint."""
    quiet: bool = False
    """Print only the result."""


def main(argv: list[str]) -> int:
    flags = parse(BenchFlags, argv, "bench")
    from holdfast.bench import suite as suites
    from holdfast.bench.jobs import require_known_envs

    with user_errors():
        suite = suites.load(flags.suite)
        jobs = _jobs(suite, flags)
        if not flags.report:
            _require_imports_allowed(jobs, flags)
            require_known_envs(jobs, flags.suite)
    out = Path(flags.out or FOLDER / suite.name)
    with _claimed(out):
        try:
            failed, left = ([], 0) if flags.report else _train(suite, jobs, out, flags)
        except (KeyboardInterrupt, SystemExit):
            show("stopped; run the same command again to continue")
            raise
        except OSError as error:
            raise UserError(
                f"{out} cannot be written ({error}); free some space, then run the same command again"
            ) from error
        with user_errors():
            written, outdated = _write_report(suite, jobs, out, flags.steps, flags.figures)
    if failed:
        raise UserError(
            f"{len(failed)} of {_runs(jobs)} failed ({failed[0]}); run the same command again to retry them"
        )
    if not written and not left:
        raise UserError(
            f"{out} holds no results of this suite and number of steps{outdated}; train it without --report"
        )
    return 0


def _jobs(suite: Suite, flags: BenchFlags) -> list[Job]:
    from holdfast.bench.jobs import jobs
    from holdfast.bench.suite import MOST_SEEDS
    from holdfast.distributed.ranks import pick_device

    for name in ("seeds", "steps", "jobs"):
        value = getattr(flags, name)
        if value is not None and value < 1:
            raise UserError(f"--{name} must be at least 1, got {value}")
    if flags.stop_after is not None and not flags.stop_after > 0:
        raise UserError(f"--stop-after must be more than 0 seconds, got {flags.stop_after}")
    if (flags.seeds or 1) > MOST_SEEDS:
        raise UserError(f"--seeds must be at most {MOST_SEEDS}, got {flags.seeds}")
    first = suite.first_seed if flags.first_seed is None else flags.first_seed
    if first < 0:
        raise UserError(f"--first-seed (in a suite first_seed) must be at least 0, got {first}")
    return jobs(
        suite,
        suite.pick(flags.tasks),
        device="cpu" if flags.report else str(pick_device(flags.device or suite.device)),
        cores=flags.cores,
        seeds=range(first, first + (flags.seeds or suite.seeds)),
        steps=flags.steps,
        tuned=flags.tuned,
        changed=named_values("--set", flags.set, "hidden_size=256"),
    )


def _runs(jobs: Sequence[Job]) -> str:
    return f"{len(jobs)} run{'' if len(jobs) == 1 else 's'}"


def _require_imports_allowed(jobs: list[Job], flags: BenchFlags) -> None:
    from holdfast.config import RunConfig, imports

    for config in {imports.named_in(c): c for c in (RunConfig.from_dict(job.config) for job in jobs)}.values():
        imports.require_allowed(config, Path(flags.suite), flags.allow_imports, typed=flags.cores)


@contextmanager
def _claimed(out: Path) -> Iterator[None]:
    """One command writes a folder at a time."""
    from holdfast.runs.lock import FolderInUseError, RunLock

    lock = RunLock(out)
    try:
        lock.claim()
    except FolderInUseError as error:
        who = str(error).partition(";")[0]
        raise UserError(f"{who}; wait for that command, or choose another folder with --out") from error
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error}; choose another folder with --out") from error
    try:
        yield
    finally:
        lock.release()


def _train(suite: Suite, jobs: list[Job], out: Path, flags: BenchFlags) -> tuple[list[str], int]:
    """Train what has no result yet; returns a line per run that failed, and the number of runs that are left."""
    from holdfast.bench import results
    from holdfast.bench.choices import is_current
    from holdfast.bench.pool import Pool
    from holdfast.bench.progress import Progress
    from holdfast.distributed.processes import num_cores

    file = out / results.FILE_NAME
    rows, damaged = results.read(file)
    finished = results.finished(rows)
    done = {job.id for job in jobs if job.id in finished and is_current(job, finished[job.id])}
    waiting = [job for job in jobs if job.id not in done]
    device = jobs[0].config["device"]
    at_a_time = min(
        flags.jobs or (num_cores() if device == "cpu" else min(JOBS_ON_A_GPU, num_cores())), max(1, len(waiting))
    )
    progress = Progress(waiting, [job for job in jobs if job.id in done], quiet=flags.quiet)
    if not flags.quiet:
        skipped = f", {len(jobs) - len(waiting)} of them finished before" if len(waiting) < len(jobs) else ""
        torn = f"; {damaged} damaged line{'s are' if damaged > 1 else ' is'} ignored in {file}" if damaged else ""
        show(f"{suite.name}: {_runs(jobs)}{skipped}, {at_a_time} at a time on {device}, in {out}{torn}")
    failed, ended = [], 0
    began, clock = time.strftime("%Y-%m-%dT%H:%M:%S"), time.monotonic()
    seconds = math.inf if flags.stop_after is None else flags.stop_after
    pool = Pool(at_a_time, out / "runs", device, keep=flags.keep_runs, mps=flags.mps, stop_after=seconds)
    with closing(pool.run(waiting)) as events, closing(progress):
        for event in events:
            job = event.job
            if job is not None and event.kind == "started":
                progress.started(event.worker, job)
            elif event.kind == "steps":
                progress.stepped(event.worker, event.value)
            elif job is not None and event.kind == "again":
                progress.postponed(event.worker, job, str(event.value))
            elif job is not None and event.kind in ("result", "error"):
                row: dict[str, Any] | None = event.value if event.kind == "result" else None
                names = ("id", "suite", "task", "core", "seed", "steps", "setting")
                facts = {**{name: getattr(job, name) for name in names}, "error": event.value}
                command = {"began": began, "elapsed": round(time.monotonic() - clock, 1), "jobs": at_a_time}
                results.append(file, {**(row or facts), "command": {**command, "mps": pool.uses_mps}})
                ended += 1
                progress.ended(event.worker, job, row, str(event.value))
                failed += [] if row else [f"{job.task} {job.core} seed {job.seed}: {event.value}"]
            progress.refresh()
    left = len(waiting) - ended
    if left:
        seconds = time.monotonic() - clock
        are_left = f"{left} of {_runs(jobs)} {'is' if left == 1 else 'are'} left"
        show(f"stopped after {seconds:.0f} s; {are_left}; run the same command again to continue")
    return failed, left


def _write_report(
    suite: Suite, jobs: list[Job], out: Path, steps: int | None, figures: bool = False
) -> tuple[bool, str]:
    """Table and page of all results in the folder. Returns whether there are any, and what is left out, in words."""
    from holdfast.bench import results
    from holdfast.bench.choices import of_the_suite
    from holdfast.bench.comparison import compare
    from holdfast.bench.page import page
    from holdfast.bench.table import markdown
    from holdfast.runs.writing import write_whole

    rows, others = of_the_suite(suite, results.read(out / results.FILE_NAME)[0], {job.id for job in jobs})
    outdated = f"; {others} out of date (the task has another environment or other settings now)" if others else ""
    comparisons = compare(suite, rows, steps)
    if not comparisons:
        return False, outdated
    text = markdown(suite, comparisons)
    write_whole(out / "table.md", [text.encode(errors="replace")])
    write_whole(out / "index.html", [page(suite, comparisons).encode(errors="replace")])
    show(
        f"results  {out / results.FILE_NAME}{outdated}",
        f"table    {out / 'table.md'}",
        f"page     {out / 'index.html'}",
    )
    if figures:
        from holdfast.bench.figures import write_figures

        runs = [row for comparison in comparisons for row in comparison.runs]
        show(*(f"figure   {path}" for path in write_figures(runs, comparisons, out)))
    return True, outdated
