"""The settings that a sweep varies, and how far. A JSON file that can be edited:

    {"learning_rate": {"low": 0.0001, "high": 0.01, "scale": "log"},
     "gamma": {"low": 0.9, "high": 0.999, "scale": "log(1-x)"},
     "hidden_size": {"choices": [64, 128]}}

A setting has either choices, or a range with a scale: "linear", "log", or "log(1-x)" for numbers close to 1. This module
knows nothing of Optuna: `Parameter.number` and `Parameter.setting` translate between settings and what is sampled.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from holdfast import plain_checks
from holdfast.config import RunConfig, named, settings_of
from holdfast.config.settings import Around, Between, Doubling, NearOne, is_whole
from holdfast.runs.writing import write_whole

Scale = Literal["linear", "log", "log(1-x)"]
SCALES = ("linear", "log", "log(1-x)")


@dataclass(frozen=True)
class Parameter:
    """One setting: its `choices`, or a range from `low` to `high`, of integers if `whole`."""

    name: str
    choices: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    scale: Scale = "linear"
    whole: bool = False

    @property
    def label(self) -> str:
        """What is sampled: the setting, or its distance to 1."""
        return f"1 - {self.name}" if self.scale == "log(1-x)" else self.name

    def number(self, setting: Any) -> Any:
        """A value of the setting as it is sampled: a number, or the text of a choice."""
        if self.choices:
            return json.dumps(setting)
        return 1 - setting if self.scale == "log(1-x)" else setting

    def setting(self, number: Any) -> Any:
        """The inverse of `number`, with digits that people read. It stays in the range."""
        if self.choices:
            return json.loads(number)
        if self.whole:
            return number
        low, high = self.bounds()
        short = min(max(_shortened(number, high - low), low), high)
        return min(max(round(1 - short, 15), self.low), self.high) if self.scale == "log(1-x)" else short

    def require(self, setting: Any) -> None:
        """Raise a ValueError for a value that is not one of the choices, or not in the range."""
        if self.choices:
            if self.number(setting) not in map(json.dumps, self.choices):
                raise ValueError(f"{self.name} is {setting!r:.40}, which is not one of the choices of the search space")
        elif self.whole:
            plain_checks.integer(setting, self.name, int(self.low), int(self.high))
        else:
            plain_checks.number(setting, self.name, self.low, self.high)

    def bounds(self) -> tuple[float, float]:
        """The range of what is sampled."""
        return (1 - self.high, 1 - self.low) if self.scale == "log(1-x)" else (self.low, self.high)

    def including(self, setting: Any) -> Parameter:
        """The same, widened where it must be to include a value. Raises a ValueError if its scale cannot."""
        if self.choices:
            if setting in self.choices:
                return self
            return replace(self, choices=(*self.choices, setting))
        outside = (
            setting is None or (self.scale == "log" and setting <= 0) or (self.scale == "log(1-x)" and setting >= 1)
        )
        if outside:
            kind = "a range" if setting is None else f"a range with the scale {self.scale}"
            start = "none" if setting is None else f"{setting:g}"
            raise ValueError(
                f"{self.name} has {kind} in the search space, and the sweep starts from {start}, which no such range includes; "
                f"start from a number in the range ({named(self.name)}), or give the setting choices"
            )
        return replace(self, low=min(self.low, setting), high=max(self.high, setting))

    def to_data(self) -> dict[str, Any]:
        if self.choices:
            return {"choices": list(self.choices)}
        return {"low": self.low, "high": self.high, "scale": self.scale}


Space = tuple[Parameter, ...]


def default_space(base: RunConfig) -> Space:
    """What the settings declare, around values that are known to learn something. Sizes are chosen before.

    Every combination is a valid config: a choice that does not go with the others is left out.
    """
    found: list[Parameter] = []
    for name, declared in settings_of(type(base)).items():
        value = getattr(base, name)
        if declared.search is None or value is None:
            continue
        match declared.search:
            case Around(factor):
                low, high = _rounded(value / factor), _rounded(value * factor)
                found.append(Parameter(name, low=low, high=high, scale="log"))
            case NearOne(factor, least):
                far, near = _below_one((1 - value) * factor), _below_one((1 - value) / factor)
                found.append(Parameter(name, low=max(least, far), high=near, scale="log(1-x)"))
            case Between(low, high):
                found.append(Parameter(name, low=low, high=high))
            case Doubling(_):
                found.append(Parameter(name, choices=_valid_with(base, name, found)))
    # A setting at the end of its range (gamma 1, no entropy bonus) was chosen on purpose.
    return tuple(one for one in found if len(one.choices) > 1 or (not one.choices and one.low < one.high))


def _valid_with(base: RunConfig, name: str, others: list[Parameter]) -> tuple[int, ...]:
    """Half, the same and twice, as far as they go with all choices of the other settings."""
    choices = [[(other.name, choice) for choice in other.choices] for other in others if other.choices]
    start = getattr(base, name)
    return tuple(
        value
        for value in sorted({max(1, start // 2), start, start * 2})
        if all(_is_valid(base, {**dict(chosen), name: value}) for chosen in itertools.product(*choices))
    )


def _is_valid(base: RunConfig, settings: dict[str, Any]) -> bool:
    try:
        replace(base, **settings)
    except ValueError:
        return False
    return True


def write_space(space: Space, path: Path) -> None:
    lines = [f' "{parameter.name}": {json.dumps(parameter.to_data())}' for parameter in space]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, [("{\n" + ",\n".join(lines) + "\n}\n").encode()])


def read_space(path: Path, kind: type[RunConfig]) -> Space:
    """Raises a ValueError that names the setting and what is wrong with it."""
    try:
        data = plain_checks.mapping(json.loads(path.read_text()), "it")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a search space: {error}") from error
    return space_from(data, str(path), kind)


def space_from(data: dict[str, Any], where: str, kind: type[RunConfig]) -> Space:
    if not data:
        raise ValueError(f"{where} names no settings to vary")
    return tuple(_parameter(name, entry, f"{where}: {name}", kind) for name, entry in data.items())


def _parameter(name: str, entry: Any, where: str, kind: type[RunConfig]) -> Parameter:
    declared = settings_of(kind).get(name)
    if declared is None or not declared.searchable:
        raise ValueError(f"{where} is not a setting that can be varied")
    entry = plain_checks.mapping(entry, where)
    if entry.keys() == {"choices"}:
        choices = plain_checks.sequence(entry["choices"], f"{where}.choices")
        if not choices:
            raise ValueError(f"{where} has no choices")
        for choice in choices:
            kind.from_dict({name: choice})
        return Parameter(name, choices=tuple(choices))
    if not {"low", "high"} <= entry.keys() <= {"low", "high", "scale"}:
        raise ValueError(f'{where} needs either "choices", or "low" and "high" (and "scale")')
    low, high = (plain_checks.number(entry[end], f"{where}.{end}") for end in ("low", "high"))
    scale = entry.get("scale", "linear")
    if scale not in SCALES:
        raise ValueError(f"{where}.scale is {scale!r}, expected one of {', '.join(SCALES)}")
    if declared.low is None:
        raise ValueError(f'{where} is not a number, so it has no "low" and "high"; give it "choices"')
    if not low < high:
        raise ValueError(f"{where}: low must be below high, got low {low:g} and high {high:g}")
    if (scale == "log" and low <= 0) or (scale == "log(1-x)" and high >= 1):
        raise ValueError(f"{where}: the scale {scale} needs {'low above 0' if scale == 'log' else 'high below 1'}")
    for end in (low, high):
        kind.from_dict({name: end})
    return Parameter(name, low=low, high=high, scale=scale, whole=is_whole(kind, name))


def _shortened(number: float, span: float) -> float:
    """Four digits, or as many as tell a thousandth of the range.

    >>> _shortened(0.00123456, 0.01), _shortened(0.999951234, 0.09), _shortened(12345.6, 1e5)
    (0.001235, 0.99995, 12350.0)
    """
    unit = min(abs(number) or span, span or abs(number))
    return round(number, 3 - math.floor(math.log10(unit))) if unit else number


def _rounded(number: float) -> float:
    """Four digits: nothing depends on more, and people read these files."""
    return float(f"{number:.4g}") if math.isfinite(number) else number


def _below_one(distance: float) -> float:
    """1 minus a distance of four digits, without the digits that a float adds.

    >>> _below_one(0.4 + 1e-16), _below_one(0.7), _below_one(0.000025)
    (0.6, 0.3, 0.999975)
    """
    return round(1 - _rounded(distance), 12)
