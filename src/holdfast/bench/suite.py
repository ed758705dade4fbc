"""A suite: tasks, steps, normalization and published figures, from one TOML or JSON file. It runs nothing.

Every mistake in a file is a `SuiteError` of one line that names the file, the task and the key.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from holdfast.config import config_class, names_about
from holdfast.config.run import BEFORE_ALGORITHMS
from holdfast.data_files import parse_toml

FOLDER = Path(__file__).parent / "suites"
STATISTICS = {
    "best": "maximum over training of the mean return of an update",
    "final": "mean return of fresh episodes after training",
}
"""What is compared with published figures."""


MOST_SEEDS = 10_000
_LARGEST = 1e30  # of a number in a file; beyond it differences and averages overflow


class SuiteError(ValueError):
    """A suite that cannot be used, and why."""


@dataclass(frozen=True)
class Published:
    """A column of published figures. cores: those of ours that are compared with it; empty: all others."""

    name: str
    source: str
    second_hand: bool = False
    cores: tuple[str, ...] = ()


@dataclass(frozen=True)
class SuiteTask:
    """One row of the table.

    low, high: returns that are a normalized score of 0 and 1 (chance and the best possible, for example); a task without
    them is not in the aggregate. target: the return that runs must reach. cores: instead of those of the command.
    """

    name: str
    env: str
    family: str = ""
    steps: int = 0
    low: float | None = None
    high: float | None = None
    target: float | None = None
    cores: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    published: Mapping[str, float] = field(default_factory=dict)
    note: str = ""

    def score(self, value: float) -> float | None:
        """The normalized score of a return."""
        return None if self.low is None or self.high is None else (value - self.low) / (self.high - self.low)


@dataclass(frozen=True)
class Suite:
    """What a suite file says. The keys of the file are these fields."""

    name: str
    tasks: tuple[SuiteTask, ...]
    title: str = ""
    note: str = ""
    steps: int = 1_000_000
    cores: tuple[str, ...] = ("gru",)
    control: tuple[str, ...] = ()
    """Cores that are there for comparison: they have no target, except in tasks that name them."""
    first_seed: int = 1
    seeds: int = 1
    device: str = "auto"
    statistic: Literal["best", "final"] = "final"
    deterministic: bool = False
    """Also evaluate with the most likely actions."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    published: Mapping[str, Published] = field(default_factory=dict)
    tuned: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Settings per family, for `--tuned`."""

    def steps_of(self, task: SuiteTask, steps: int | None = None) -> int:
        """Steps of a run: the command's, the task's or the suite's."""
        return steps or task.steps or self.steps

    def pick(self, names: Sequence[str]) -> tuple[SuiteTask, ...]:
        """The tasks with these names or of these families, in the order of the suite; all for no names."""
        known = {name for task in self.tasks for name in (task.name, task.family) if name}
        for name in names:
            if name not in known:
                likely = get_close_matches(name, known, 1)
                hint = f"did you mean {likely[0]}?" if likely else f"one of {', '.join(t.name for t in self.tasks)}"
                raise SuiteError(f"suite {self.name} has no task {name!r}; {hint}")
        return tuple(task for task in self.tasks if not names or {task.name, task.family} & set(names))

    def reference(self, task: SuiteTask, core: str) -> tuple[str, float] | None:
        """What a core's return is compared with, and its name: the target return, or a published one; None if neither."""
        if core in self.control and core not in task.cores:
            return None
        if task.target is not None:
            return "target", task.target
        rows = [(key, column) for key, column in self.published.items() if key in task.published]
        own = [key for key, column in rows if core in column.cores]
        others = [key for key, column in rows if not column.cores]
        key = next(iter([*own, *others]), None)
        return None if key is None else (self.published[key].name, task.published[key])


def names() -> list[str]:
    """The suites that come with Holdfast."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load(name: str) -> Suite:
    """A suite by its name, or from a .toml or .json file."""
    path = FOLDER / f"{name}.toml" if name in names() else Path(name)
    if path.suffix not in (".toml", ".json"):
        likely = get_close_matches(name, names(), 1)
        hint = f"did you mean {likely[0]}?" if likely else f"one of {', '.join(names())}, or a .toml or .json file"
        raise SuiteError(f"no suite {name!r}; {hint}")
    try:
        text = path.read_text(encoding="utf-8")
        data = parse_toml(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise SuiteError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:  # TOML's and JSON's errors, and bytes that are no UTF-8
        raise SuiteError(f"{path}: not a {path.suffix[1:].upper()} file ({error})") from error
    return parse(data, str(path))


def parse(data: Any, where: str) -> Suite:
    """A suite from plain data. where: the file, for messages."""
    if not isinstance(data, dict):
        raise SuiteError(f"{where}: a suite is a table of keys, this is a {type(data).__name__}")
    fields = _checked(Suite, data, where)
    fields["published"] = {
        key: Published(**_checked(Published, column, f"{where}, published.{key}"))
        for key, column in fields.get("published", {}).items()
    }
    rows = [_task(row, f"{where}, task {number}") for number, row in enumerate(fields["tasks"], 1)]
    suite = Suite(**{**fields, "tasks": tuple(rows)})
    if not rows:
        raise SuiteError(f"{where}: tasks is empty")
    twice = [task.name for task in rows if sum(other.name == task.name for other in rows) > 1]
    if twice:
        raise SuiteError(f"{where}: two tasks are named {twice[0]!r}")
    _check_contents(suite, where)
    return suite


def _task(row: Any, where: str) -> SuiteTask:
    if isinstance(row, dict) and isinstance(row.get("name"), str):
        where = f"{where} ({row['name']})"
    return SuiteTask(**_checked(SuiteTask, row, where))


def _check_contents(suite: Suite, where: str) -> None:
    if not re.fullmatch(r"\w[\w-]*", suite.name):
        raise SuiteError(
            f"{where}: name is also that of a folder: use letters, digits, - and _, got {suite.name!r:.40}"
        )
    if suite.statistic not in STATISTICS:
        raise SuiteError(f"{where}: statistic must be one of {', '.join(STATISTICS)}, got {suite.statistic!r}")
    if not suite.cores:
        raise SuiteError(f"{where}: cores is empty")
    families = {task.family for task in suite.tasks}
    for family in suite.tuned:
        if family not in families:
            raise SuiteError(f"{where}: tuned.{family} is the family of no task")
        check_settings(suite.tuned[family], f"{where}, tuned.{family}")
    check_settings(suite.settings, f"{where}, settings")
    if suite.steps < 1:
        raise SuiteError(f"{where}: steps must be at least 1, got {suite.steps}")
    if not 1 <= suite.seeds <= MOST_SEEDS:
        raise SuiteError(f"{where}: seeds must be between 1 and {MOST_SEEDS}, got {suite.seeds}")
    for task in suite.tasks:
        place = f"{where}, task {task.name}"
        unknown = [key for key in task.published if key not in suite.published]
        if unknown:
            raise SuiteError(f"{place}: published.{unknown[0]} has no section [published.{unknown[0]}] with its source")
        if (task.low is None) != (task.high is None) or (task.low is not None and task.low == task.high):
            raise SuiteError(f"{place}: low and high are two different numbers, or both are left out")
        if task.steps < 0:
            raise SuiteError(f"{place}: steps must be at least 1, got {task.steps}")
        check_settings(task.settings, place)


def check_settings(settings: Mapping[str, Any], where: str) -> None:
    """Refuse a setting that the config would refuse, or that the bench decides itself."""
    if not isinstance(settings, dict):
        raise SuiteError(f"{where}: expected a table of settings, got {settings!r:.40}")
    if not settings:
        return
    kind = config_class(settings.get("algorithm", BEFORE_ALGORITHMS), allow_imports=False)
    decided = names_about(kind, "place") | {"env", "core", "seed", "total_steps"}
    for name in settings:
        if name in decided:
            raise SuiteError(f"{where}: {name} is not among the settings of a suite; it is a key or a flag of its own")
    try:
        kind.from_dict(dict(settings))
    except ValueError as error:
        raise SuiteError(f"{where}: {error}") from error


# --- types ------------------------------------------------------------------------------------------------------------


def _checked(kind: type, data: Any, where: str) -> dict[str, Any]:
    """The keys of a table as arguments of a dataclass: all known, none missing, each of its type."""
    if not isinstance(data, dict):
        raise SuiteError(f"{where}: expected a table of keys, got {data!r:.40}")
    known = {f.name: f for f in dataclasses.fields(kind)}
    for name in data:
        if name not in known:
            likely = get_close_matches(name, known, 1)
            hint = f"did you mean {likely[0]}?" if likely else f"known are {', '.join(known)}"
            raise SuiteError(f"{where}: unknown key {name!r}; {hint}")
    for name, f in known.items():
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required and name not in data:
            raise SuiteError(f"{where}: the key {name!r} is missing")
    return {name: _value(value, str(known[name].type), f"{where}: {name}") for name, value in data.items()}


def _value(value: Any, kind: str, where: str) -> Any:
    if kind.startswith("Mapping"):
        numbers = kind.endswith("float]")
        if isinstance(value, dict):
            return {key: _value(v, "float", f"{where}.{key}") if numbers else v for key, v in value.items()}
        raise SuiteError(f"{where} must be a table of keys, got {value!r:.40}")
    if kind.startswith("tuple"):
        if isinstance(value, list) and (kind != "tuple[str, ...]" or all(isinstance(part, str) for part in value)):
            return tuple(value)
        raise SuiteError(f"{where} must be a list{' of names' if 'str' in kind else ''}, got {value!r:.40}")
    if kind == "bool" and isinstance(value, bool):
        return value
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    in_range = is_number and abs(value) <= _LARGEST  # NaN is not
    if kind == "int" and in_range and float(value).is_integer():
        return int(value)
    if kind.startswith("float") and is_number:
        if in_range:
            return float(value)
        raise SuiteError(f"{where} must be a finite number, got {value!r:.40}")
    if kind.startswith(("str", "Literal")) and isinstance(value, str):
        return value
    expected = {"bool": "true or false", "int": "an integer", "str": "a text"}.get(kind, "a number")
    raise SuiteError(f"{where} must be {expected}, got {value!r:.40}")
