"""How a setting is declared, once: default, range, short name, what it is about, and what may be done with it.

    gamma: float = setting(0.99, low=0, high=1, short="gamma", search=NearOne(4))
    \"\"\"Discount factor.\"\"\"

The text below a setting is its help. Flags, ranges, names of runs, sweeps, resume rules, plot labels and benches read these
declarations; nothing else lists settings. This module is plain data and imports no torch.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

About = Literal["task", "network", "method", "size", "budget", "sample", "upkeep", "place"]
"""What a setting is about: the task, the network, the method of learning, sizes that are chosen for the task, how long to train,
which repetition of the same experiment, the upkeep of a run (nothing that is learned), where a run lies and what it shows."""


class Around(NamedTuple):
    """A sweep searches from value / factor to value x factor, on a logarithmic scale."""

    factor: float


class NearOne(NamedTuple):
    """A sweep searches distances to 1 from a `factor` smaller to a `factor` larger, down to the value `least`."""

    factor: float
    least: float = 0.0


class Between(NamedTuple):
    """A sweep searches from `low` to `high`."""

    low: float
    high: float


class Doubling(NamedTuple):
    """A sweep tries the value divided and multiplied by `factor`, and itself."""

    factor: int = 2


Search = Around | NearOne | Between | Doubling


class Setting(NamedTuple):
    """What is declared about a setting besides its name, type, default and help."""

    low: float | None = None
    high: float | None = None  # both ends are accepted, unless `above`, which leaves out `low`
    above: bool = False
    hint: str = ""  # added to the message about a value outside the range
    unbounded: str = ""  # why a number has no range
    short: str | None = None  # in the automatic name of a run; None: not named there
    about: About = "method"
    fixed: bool = False  # a resumed run cannot change it
    per_process: bool = False  # ranks of one run may differ in it
    search: Search | None = None  # what `holdfast sweep` varies by default
    chosen: tuple[Any, ...] = ()  # what None stands for: the first value, with several Box actions the second
    names: str = ""  # "env", "core", "policy", "algorithm", ...: it may name an object, `module:Name`

    @property
    def is_number(self) -> bool:
        return self.low is not None or bool(self.unbounded)

    @property
    def searchable(self) -> bool:
        """Whether a sweep may vary it: a sweep compares methods on one task, for one number of steps."""
        return self.about in ("network", "method", "size")


def setting(default: Any, **declared: Any) -> Any:
    """A field of a config. declared: the fields of `Setting`."""
    metadata = {"setting": Setting(**declared)}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def override(base: type, name: str, default: Any) -> Any:
    """A setting of a base class with another default; its help is that of the base class."""
    return setting(default, **settings_of(base)[name]._asdict())


def settings_of(config: type) -> Mapping[str, Setting]:
    """The settings of a config class, in order."""
    return _read(config)[0]


def names_about(config: type, *about: About) -> frozenset[str]:
    """The settings of a config class that are about one of these."""
    return frozenset(name for name, declared in settings_of(config).items() if declared.about in about)


def default_of(config: type, name: str) -> Any:
    """The default of a setting."""
    field = config.__dataclass_fields__[name]  # type: ignore[attr-defined]
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def types_of(config: type) -> Mapping[str, Any]:
    """The types of a config's settings."""
    return _read(config)[1]


@functools.cache
def _read(config: Any) -> tuple[Mapping[str, Setting], Mapping[str, Any]]:
    fields, hints = dataclasses.fields(config), get_type_hints(config)
    return {f.name: f.metadata.get("setting", Setting()) for f in fields}, {f.name: hints[f.name] for f in fields}


def is_whole(config: type, name: str) -> bool:
    """Whether a setting is an integer, or several."""
    kind = types_of(config)[name]
    members = [member for part in (kind, *get_args(kind)) for member in (part, *get_args(part))]
    return int in members


# --- how messages name a setting --------------------------------------------------------------------------------------

_as_flags: ContextVar[bool] = ContextVar("settings are named as flags", default=False)


@contextmanager
def named_as_flags() -> Iterator[None]:
    """Inside, messages say `--num-envs 8`, as on the command line; otherwise `num_envs=8`."""
    before = _as_flags.set(True)
    try:
        yield
    finally:
        _as_flags.reset(before)


def flag_of(name: str) -> str:
    """The flag of a setting.

    >>> flag_of("num_envs")
    '--num-envs'
    """
    return "--" + name.replace("_", "-")


def named(name: str) -> str:
    """A setting in a message: `num_envs` or `--num-envs`."""
    return flag_of(name) if _as_flags.get() else name


def given(name: str, value: Any) -> str:
    """A setting and its value in a message: `num_envs=8` or `--num-envs 8`.

    >>> given("core", "lstm"), given("bptt", 24)
    ("core='lstm'", 'bptt=24')
    """
    if _as_flags.get():
        text = " ".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)
        return f"{flag_of(name)} {text:.40}"
    return f"{name}={value!r:.40}"


# --- checks: each raises a ValueError that names the setting ----------------------------------------------------------


def check(config: Any) -> None:
    """Every setting of a config alone: type, choices, range. Sequences become tuples, 1e6 becomes an integer."""
    _check_none(config)
    _check_sequences(config)
    _check_choices(config)
    for name, declared in settings_of(type(config)).items():
        if declared.is_number:
            _check_numbers(config, name, declared)


def check_types(config: type, values: Mapping[str, Any]) -> None:
    """Settings from a file may be of any type."""
    for name, value in values.items():
        if not _is_a(value, types_of(config)[name]):
            raise ValueError(f"{given(name, value)} is not a value of its type")


def _check_none(config: Any) -> None:
    for name, kind in types_of(type(config)).items():
        if getattr(config, name) is None and NoneType not in get_args(kind):
            raise ValueError(f"{named(name)} is None, but it needs a value; leave it out for its default")


def _check_sequences(config: Any) -> None:
    """Settings of several values become tuples; in JSON they are lists."""
    for name, kind in types_of(type(config)).items():
        value = getattr(config, name)
        of = next((member for member in (kind, *get_args(kind)) if get_origin(member) is tuple), None)
        if of is None or value is None:
            continue
        if isinstance(value, str) or not isinstance(value, Iterable):
            several = "(64,)" if get_args(of)[0] is int else '("obs",)'
            raise ValueError(f"{given(name, value)} must be a tuple, such as {several}")
        setattr(config, name, tuple(value))


def _check_choices(config: Any) -> None:
    for name, kind in types_of(type(config)).items():
        value = getattr(config, name)
        if get_origin(kind) is Literal and value not in get_args(kind):
            raise ValueError(f"{given(name, value)} must be one of {', '.join(get_args(kind))}")


def _check_numbers(config: Any, name: str, declared: Setting) -> None:
    value, whole = getattr(config, name), is_whole(type(config), name)
    if isinstance(value, float) and value.is_integer() and whole:
        value = int(value)  # 1e6
        setattr(config, name, value)
    for number in value if isinstance(value, tuple) else () if value is None else (value,):
        _check_number(name, number, whole, declared)


def _check_number(name: str, value: Any, whole: bool, declared: Setting) -> None:
    what, hint = given(name, value), declared.hint
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        raise ValueError(f"{what} must be {'an integer' if whole else 'a number'}")
    low, high = -math.inf if declared.low is None else declared.low, declared.high
    if high is not None and not low <= value <= high:
        raise ValueError(f"{what} must be between {low} and {high}{hint}")
    if isinstance(value, int) and abs(value) > 2**63:  # more than numpy, torch and C count to
        raise ValueError(f"{what} must be less than 2**63")
    if not math.isfinite(value):
        raise ValueError(f"{what} must be a finite number{hint}")
    if value < low or (declared.above and value == low):
        raise ValueError(f"{what} must be {'greater than' if declared.above else 'at least'} {low}{hint}")


def _is_a(value: Any, kind: Any) -> bool:
    arguments = get_args(kind)
    if get_origin(kind) is Literal:
        return isinstance(value, str)  # `check` knows which ones
    if get_origin(kind) in (Union, UnionType):
        return any(_is_a(value, member) for member in arguments)
    if get_origin(kind) is tuple:
        return isinstance(value, (list, tuple)) and all(_is_a(part, arguments[0]) for part in value)
    if get_origin(kind) is dict:
        return isinstance(value, dict) and all(isinstance(key, str) for key in value)
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool) and value == value
    return isinstance(value, kind)
