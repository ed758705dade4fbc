"""`holdfast doctor TARGET`: find the policy, examine it, write the report. The examination itself is `holdfast.doctor`.

Exit codes: 0 healthy, 1 errors found, 2 could not examine, or healthy and a file could not be written.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from holdfast.causes import CAUSES
from holdfast.cli.commands import close_output
from holdfast.cli.errors import UserError, raised_by_holdfast, user_errors
from holdfast.cli.flags import parse
from holdfast.doctor.report import ci
from holdfast.named_objects import import_named
from holdfast.shown_text import show

if TYPE_CHECKING:
    from holdfast.doctor import Report, Subject
    from holdfast.doctor.examine import OnProgress

COULD_NOT_EXAMINE = 2
NOT_WRITTEN = 2


@dataclass
class DoctorFlags:
    """Examine a recurrent policy of any library for memory bugs.

    holdfast doctor my_module:MyPolicy

    holdfast doctor runs/CartPole-v1/lstm-seed1 --html report.html

    Exit codes: 0 healthy, 1 errors found (with --strict also warnings), 2 could not examine."""

    target: str
    """A run folder or checkpoint, package.module:factory, or sb3:model.zip."""
    policy: str | None = None
    """The policy class, my_module:MyPolicy, if the run does not name it."""
    html: Path | None = None
    """Write the report as a page."""
    json: str | None = None
    """Write the report as JSON; - prints it."""
    png: Path | None = None
    """Draw how far back gradients reach."""
    seed: int = 0
    """Seed for the weights that a factory makes, and for the data that the policy is examined on."""
    compile: bool = False
    """Also examine the policy under torch.compile."""
    tolerance: float | None = None
    """Largest difference that counts as equal; by default the precision decides."""
    obs_shape: tuple[int, ...] = ()
    """Shape of an observation, such as 4, or 3 84 84; by default taken from the policy, or from its first layer."""
    bptt: int | None = None
    """How many steps back gradients flow, if training truncates them on purpose; this is then only a note."""
    format: Literal["text", "github"] = "text"
    """What is printed: text, or annotations for GitHub Actions."""
    sarif: Path | None = None
    """Write the findings as SARIF, for code scanning."""
    junit: Path | None = None
    """Write the checks as JUnit XML, one test case each."""
    strict: bool = False
    """Warnings are errors."""
    ignore: tuple[str, ...] = ()
    """Causes that are only noted, such as over-detached."""
    allow_imports: bool = False
    """Import modules that a run names, which runs their code."""
    quiet: bool = False
    """Print the verdict only."""


def main(argv: list[str]) -> int:
    flags = parse(DoctorFlags, argv, "doctor")
    if flags.bptt is not None and flags.bptt < 1:
        raise UserError(f"--bptt must be at least 1, got {flags.bptt}")
    if flags.tolerance is not None and not 0 <= flags.tolerance < float("inf"):
        raise UserError(f"--tolerance must be a finite number of at least 0, got {flags.tolerance}")
    unknown = [cause for cause in flags.ignore if cause not in CAUSES]
    if unknown:
        raise UserError(f"--ignore: there is no cause {unknown[0]}; a report shows the names of causes")
    json_file = None if flags.json in (None, "-") else Path(str(flags.json))
    files = ReportFiles(flags.html, flags.png, json_file, flags.sarif, flags.junit)
    files.require_writable()

    from holdfast.display.terminal import Terminal
    from holdfast.doctor.examine import CannotExamine, examine

    errors = Terminal(stderr=True)
    try:
        obs_shape = flags.obs_shape or None
        subject = subject_of(flags.target, flags.seed, obs_shape, flags.policy, flags.allow_imports)
    except (Exception, SystemExit) as error:  # a factory is the user's code and may raise anything, or call exit()
        if os.environ.get("HOLDFAST_TRACEBACK"):
            raise
        kind = "" if raised_by_holdfast(error) else f"{type(error).__name__}: "
        return _give_up(errors, flags.target, f"{kind}{error}")
    try:
        with _progress_bar(errors, flags.quiet or flags.json == "-") as progress:
            report = examine(
                subject,
                seed=flags.seed,
                compile=flags.compile,
                tolerance=flags.tolerance,
                bptt=flags.bptt,
                progress=progress,
            )
    except CannotExamine as error:
        return _give_up(errors, flags.target, str(error))
    report = report.judged(strict=flags.strict, ignore=flags.ignore)
    # Files come first: the reader of what is printed (head, less) may leave before its end.
    written, problems = files.write(report, location_of(flags.target))
    _show(report, flags)
    if written and not flags.quiet:
        show(f"written: {', '.join(map(str, written))}", file=sys.stderr)
    if flags.png is not None and report.credit is None:
        show(f"{flags.png} is not written: no gradients were measured in this policy", file=sys.stderr)
    for problem in problems:
        show(f"holdfast doctor: {problem}", file=sys.stderr)
    return report.exit_code or (NOT_WRITTEN if problems else 0)


def _show(report: Report, flags: DoctorFlags) -> None:
    """Print the report, in the form that the flags ask for."""
    try:
        if flags.json == "-":
            show(*report.to_json().splitlines())
        elif flags.format == "github":
            show(*ci.github(report, location_of(flags.target)).splitlines())
        elif flags.quiet:
            show(report.verdict)
        else:
            report.print()
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        close_output()
    except SystemExit:  # how rich ends when the pipe is closed; it has closed the output itself
        pass


def _give_up(console: Any, target: str, why: str) -> int:
    console.print(f"could not examine {target}: {why}", style="bold red", markup=False, highlight=False, soft_wrap=True)
    return COULD_NOT_EXAMINE


def subject_of(
    target: str, seed: int = 0, observation_space: Any = None, policy: str | None = None, allow_imports: bool = False
) -> Subject:
    """The subject that a target names. The weights that a factory makes follow from the seed."""
    from holdfast.doctor.subjects.choose import as_subject
    from holdfast.envs.jax.protocol import keep_jax_from_preallocating

    keep_jax_from_preallocating()  # before the policy is made, which may be one in JAX
    return as_subject(find(target, seed, policy, allow_imports), observation_space)


def location_of(target: str) -> ci.Location | None:
    """Where the code of a target is written, relative to the current folder; None if it is not in a module there."""
    module_name, _, attribute = target.partition(":")
    module = sys.modules.get(module_name)
    file = getattr(module, "__file__", None)
    if file is None:
        return None
    thing = getattr(module, attribute.split(".")[0], None)
    try:
        line = inspect.getsourcelines(thing)[1] if thing is not None else 1
    except (TypeError, OSError):
        line = 1
    with contextlib.suppress(ValueError):
        return ci.Location(Path(file).resolve().relative_to(Path.cwd()).as_posix(), line)
    return None


def find(target: str, seed: int = 0, policy: str | None = None, allow_imports: bool = False) -> Any:
    """The policy or subject that a target names. policy: the class of a run's policy, for a run that does not say."""
    if Path(target).suffix == ".py":
        raise ValueError(f"{target} is a Python file; name the class or function in it: {Path(target).stem}:MyPolicy")
    if Path(target).exists():
        target = f"run:{target}"
    kind, colon, rest = target.partition(":")
    if not colon or not rest:
        raise ValueError(f"there is no {target}; expected a run folder, package.module:factory or sb3:model.zip")
    if kind == "sb3":
        return _sb3_model(rest)
    if kind == "run":
        return _policy_of_run(rest, policy, allow_imports)
    return _from_module(kind, rest, seed)


def _policy_of_run(path: str, policy: str | None, allow_imports: bool) -> Any:
    from holdfast.doctor.subjects import Holdfast
    from holdfast.runs import saved_policy

    file, saved = saved_policy.read(path)
    return Holdfast(saved_policy.load(file, policy, allow_imports=allow_imports), saved_policy.spaces(saved)[0])


def _from_module(module_name: str, attribute: str, seed: int) -> Any:
    """An object, or what a function without arguments returns. Both the import and the function begin with the seed."""
    from torch import nn

    from holdfast.doctor import Subject
    from holdfast.runs import rng_state

    rng_state.seed(seed)
    thing: Any = import_named(f"{module_name}:{attribute}", kind="policy")
    if isinstance(thing, (Subject, nn.Module)) or not callable(thing):
        return thing
    _require_no_arguments(thing, f"{module_name}:{attribute}")
    rng_state.seed(seed)
    return thing()


def _require_no_arguments(make: Callable[..., Any], name: str) -> None:
    """Raise ValueError if a class or function cannot be called without arguments; it says what to name instead."""
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):  # some classes of C modules do not say
        return
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if not needed:
        return
    called = name.partition(":")[2]
    trained = f"holdfast train --env ENV --policy {name} --total-steps 1000, then holdfast doctor RUN"
    can_be_trained = {"observation_space", "action_space", "config"}.issuperset(needed)
    raise ValueError(
        f"{called} takes {', '.join(needed)}; name a function without arguments that makes the policy, such as "
        f"def make(): return {called}(...)"
        + (f", or train for a moment and examine the run: {trained}" if can_be_trained else "")
    )


def _sb3_model(path: str) -> Any:
    if not Path(path).exists():
        raise FileNotFoundError(f"there is no {path}")
    try:
        from sb3_contrib import RecurrentPPO
    except ImportError:
        raise ImportError("sb3: targets need sb3-contrib: pip install 'holdfast[sb3]'") from None
    # The zip holds pickles, and Stable-Baselines3 runs what is in them.
    show(
        f"loading {path} runs code that the file may contain (pickle); load only files that you trust", file=sys.stderr
    )
    return RecurrentPPO.load(path, device="cpu")


@contextlib.contextmanager
def _progress_bar(console: Any, quiet: bool) -> Iterator[OnProgress | None]:
    """A bar on a terminal, because some policies take long to examine; None elsewhere."""
    if quiet or not console.is_terminal:
        yield None
        return
    from rich.progress import Progress as Bar

    with Bar(console=console, transient=True) as bar:
        task = bar.add_task("examining", total=None)

        def draw(done: int, total: int, name: str) -> None:
            bar.update(task, total=total, completed=done, description=name)

        yield draw


# --- files -----------------------------------------------------------------------------------------------------------
# The files of `holdfast doctor`: whether they can be written is known before the examination, which may take long.


@dataclass(frozen=True)
class ReportFiles:
    """Where each form of a report goes; None where it is not asked for."""

    html: Path | None = None
    png: Path | None = None
    json: Path | None = None
    sarif: Path | None = None
    junit: Path | None = None

    def require_writable(self) -> None:
        """Raise UserError if a file cannot be written. Makes nothing: the target may still turn out to be misspelled."""
        for flag, file in vars(self).items():
            if file is not None:
                _require_writable(f"--{flag}", file)
        if self.png is not None and importlib.util.find_spec("matplotlib") is None:
            raise UserError("--png needs matplotlib: pip install 'holdfast[plot]'")

    def write(self, report: Report, location: ci.Location | None) -> tuple[list[Path], list[str]]:
        """Write all files, and the folders they are in. Returns those written, and why others could not be.

        There is no picture of a policy that has no gradients to measure."""
        written, problems = [], []

        def write(file: Path | None, how: Callable[[Path], Any]) -> None:
            if file is None:
                return
            try:
                with user_errors(file):
                    file.parent.mkdir(parents=True, exist_ok=True)
                    how(file)
                written.append(file)
            except UserError as error:  # the other files are still written
                problems.append(str(error))

        write(self.html, report.to_html)
        if report.credit is not None:
            write(self.png, report.credit.to_png)
        write(self.json, report.to_json)
        sarif = ci.sarif(report, location)
        write(self.sarif, lambda file: file.write_text(json.dumps(sarif, indent=2) + "\n", encoding="utf-8"))
        write(self.junit, lambda file: file.write_text(ci.junit(report), encoding="utf-8"))
        return written, problems


def _require_writable(flag: str, file: Path) -> None:
    if file.is_dir():
        raise UserError(f"{flag} {file}: this is a folder; name a file in it")
    there = next(path for path in (file, *file.absolute().parents) if path.exists())  # the root always exists
    if there != file and not there.is_dir():
        raise UserError(f"{flag} {file}: {there.name} is a file, not a folder; choose another place")
    if not os.access(there, os.W_OK):
        raise UserError(f"{flag} {file}: {there} cannot be written; choose another place")
