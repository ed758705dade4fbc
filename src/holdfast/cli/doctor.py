"""`holdfast doctor TARGET`: finds the policy, examines it, writes the report. The command line itself is `cli.py`.

Exit codes: 0 healthy, 1 findings, 2 could not examine.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holdfast.cli.flags import user_errors
from holdfast.doctor.examine import CannotExamine, Progress, examine
from holdfast.doctor.subjects.base import Subject
from holdfast.doctor.subjects.choose import as_subject

COULD_NOT_EXAMINE = 2


def main(
    target: str,
    *,
    html: str | Path | None = None,
    json: str | Path | None = None,
    png: str | Path | None = None,
    seed: int = 0,
    compile: bool = False,
    tolerance: float | None = None,
    quiet: bool = False,
) -> int:
    """Examines `target` and returns the exit code.

    `target`: `package.module:factory` (a function without arguments that gives a policy or a subject, or such an
    object itself), `sb3:model.zip`, or `run:runs/...` (a Holdfast run or checkpoint). `json="-"` prints JSON only.
    """
    from rich.console import Console

    errors = Console(stderr=True)
    try:
        subject = as_subject(find(target))
    except Exception as error:  # a factory is somebody else's code and may raise anything
        if os.environ.get("HOLDFAST_TRACEBACK"):
            raise
        return _give_up(errors, target, f"{type(error).__name__}: {error}")
    try:
        with _progress(errors, quiet or json == "-") as progress:
            report = examine(subject, seed=seed, compile=compile, tolerance=tolerance, progress=progress)
    except CannotExamine as error:
        return _give_up(errors, target, str(error))
    if html is not None:
        report.to_html(html)
    if png is not None and report.credit is not None:
        with user_errors():  # matplotlib may be missing
            report.credit.to_png(png)
    if json is not None and json != "-":
        report.to_json(json)
    if json == "-":
        print(report.to_json())
    elif quiet:
        print(report.verdict)
    else:
        report.print()
    return report.exit_code


def _give_up(console: Any, target: str, why: str) -> int:
    console.print(f"could not examine {target}: {why}", style="bold red", markup=False, highlight=False)
    return COULD_NOT_EXAMINE


def find(target: str) -> Any:
    """The policy or subject that a target names."""
    kind, colon, rest = target.partition(":")
    if not colon or not rest:
        raise ValueError("a target is package.module:factory, sb3:model.zip or run:runs/...")
    if kind == "sb3":
        return _sb3(rest)
    if kind == "run":
        return _run(rest)
    return _factory(kind, rest)


def _factory(module_name: str, attribute: str) -> Any:
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` would: the user's package is where the user is
    thing: Any = importlib.import_module(module_name)
    for part in attribute.split("."):
        thing = getattr(thing, part)
    if isinstance(thing, Subject) or not callable(thing) or _is_module(thing):
        return thing
    return thing()


def _is_module(thing: Any) -> bool:
    from torch import nn

    return isinstance(thing, nn.Module)


def _sb3(path: str) -> Any:
    if not Path(path).exists():
        raise FileNotFoundError(f"there is no {path}")
    try:
        from sb3_contrib import RecurrentPPO
    except ImportError:
        raise ImportError("sb3: targets need sb3-contrib: pip install 'holdfast[sb3]'") from None
    return RecurrentPPO.load(path, device="cpu")


def _run(path: str) -> Any:
    from holdfast.runs.saved_policy import load

    return load(path)


@contextlib.contextmanager
def _progress(console: Any, quiet: bool) -> Iterator[Progress | None]:
    """A bar on a terminal, for policies that take their time; nothing elsewhere."""
    if quiet or not console.is_terminal:
        yield None
        return
    from rich.progress import Progress as Bar

    with Bar(console=console, transient=True) as bar:
        task = bar.add_task("examining", total=None)

        def show(done: int, total: int, name: str) -> None:
            bar.update(task, total=total, completed=done, description=name)

        yield show
