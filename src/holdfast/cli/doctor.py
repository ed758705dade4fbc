"""`holdfast doctor TARGET`: find the policy, examine it, write the report. The examination itself is `holdfast.doctor`.

Exit codes: 0 healthy, 1 findings, 2 could not examine.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.cli.errors import user_errors
from holdfast.cli.flags import parse

if TYPE_CHECKING:
    from holdfast.doctor.examine import OnProgress

COULD_NOT_EXAMINE = 2


@dataclass
class DoctorFlags:
    """Examine a recurrent policy, of any library, for the mistakes that recurrent policies have.

    Exit codes: 0 healthy, 1 findings, 2 could not examine."""

    target: str
    """package.module:factory, sb3:model.zip, or run:runs/... (a run folder or checkpoint)."""
    html: Path | None = None
    """Write the report as a page."""
    json: str | None = None
    """Write the report as JSON; - prints it."""
    png: Path | None = None
    """Draw how far back gradients reach."""
    seed: int = 0
    """Seed for the data that the policy is examined on."""
    compile: bool = False
    """Examine it under torch.compile too."""
    tolerance: float | None = None
    """Largest difference that counts as equal; by default the precision decides."""
    allow_imports: bool = False
    """Import modules that a run names, which runs their code."""
    quiet: bool = False
    """Print the verdict only."""


def main(argv: list[str]) -> int:
    flags = parse(DoctorFlags, argv, "doctor")
    from rich.console import Console

    from holdfast.doctor.examine import CannotExamine, examine
    from holdfast.doctor.subjects.choose import as_subject

    errors = Console(stderr=True)
    try:
        subject = as_subject(find(flags.target, flags.allow_imports))
    except Exception as error:  # a factory is the user's code and may raise anything
        if os.environ.get("HOLDFAST_TRACEBACK"):
            raise
        return _give_up(errors, flags.target, f"{type(error).__name__}: {error}")
    try:
        with _progress_bar(errors, flags.quiet or flags.json == "-") as progress:
            report = examine(
                subject, seed=flags.seed, compile=flags.compile, tolerance=flags.tolerance, progress=progress
            )
    except CannotExamine as error:
        return _give_up(errors, flags.target, str(error))
    if flags.html is not None:
        report.to_html(flags.html)
    if flags.png is not None and report.credit is not None:
        with user_errors():
            report.credit.to_png(flags.png)
    if flags.json is not None and flags.json != "-":
        report.to_json(flags.json)
    if flags.json == "-":
        print(report.to_json())
    elif flags.quiet:
        print(report.verdict)
    else:
        report.print()
    return report.exit_code


def _give_up(console: Any, target: str, why: str) -> int:
    console.print(f"could not examine {target}: {why}", style="bold red", markup=False, highlight=False)
    return COULD_NOT_EXAMINE


def find(target: str, allow_imports: bool = False) -> Any:
    """The policy or subject that a target names."""
    kind, colon, rest = target.partition(":")
    if not colon or not rest:
        raise ValueError("a target is package.module:factory, sb3:model.zip or run:runs/...")
    if kind == "sb3":
        return _sb3_model(rest)
    if kind == "run":
        from holdfast.runs.saved_policy import load

        return load(rest, allow_imports=allow_imports)
    return _from_module(kind, rest)


def _from_module(module_name: str, attribute: str) -> Any:
    """An object, or what a function without arguments returns."""
    from torch import nn

    from holdfast.doctor import Subject

    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does: the user's package is in the current folder
    thing: Any = importlib.import_module(module_name)
    for part in attribute.split("."):
        thing = getattr(thing, part)
    if isinstance(thing, (Subject, nn.Module)) or not callable(thing):
        return thing
    return thing()


def _sb3_model(path: str) -> Any:
    if not Path(path).exists():
        raise FileNotFoundError(f"there is no {path}")
    try:
        from sb3_contrib import RecurrentPPO
    except ImportError:
        raise ImportError("sb3: targets need sb3-contrib: pip install 'holdfast[sb3]'") from None
    # The zip holds pickles, and Stable-Baselines3 runs what is in them.
    print(
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

        def show(done: int, total: int, name: str) -> None:
            bar.update(task, total=total, completed=done, description=name)

        yield show
