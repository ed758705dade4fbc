"""What the lines of a plot are called: the settings that differ between them, the most telling first.

It gets the settings of runs as plain data, as `config.json` holds them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.config import ALGORITHMS, Setting, settings_of
from holdfast.config.settings import default_of
from holdfast.named_objects import OWN_POLICY

Config = Mapping[str, Any]

_ORDER = ("task", "network", "method", "size", "budget")
MOST_SHOWN = 4


def differing(configs: Sequence[Config]) -> list[str]:
    """The settings that differ between runs and say something about what is learned, the most telling first."""
    names = list(dict.fromkeys(name for config in configs for name in config))
    found = [name for name in names if _makes_a_group(name) and _num_different(configs, [name]) > 1]
    return sorted(found, key=lambda name: (_rank(name), names.index(name)))


def _declared(name: str) -> Setting:
    """Of any algorithm; a setting that none of ours has is about the method."""
    return next((found[name] for kind in ALGORITHMS.values() if name in (found := settings_of(kind))), Setting())


def _makes_a_group(name: str) -> bool:
    """Whether runs that differ in a setting are other experiments. Figures are drawn per environment."""
    return name != "env" and _declared(name).about in _ORDER


def _is_bookkeeping(name: str) -> bool:
    """Whether a setting makes a group, but is in a label only if nothing else tells two groups apart."""
    return name == "num_envs" or _declared(name).about == "budget"


def _rank(name: str) -> tuple[int, int]:
    first = ("policy", "core")  # what a network is called
    return _ORDER.index(_declared(name).about), first.index(name) if name in first else len(first)


def values(config: Config, names: Sequence[str]) -> tuple[str, ...]:
    """The values of settings as texts that can be compared."""
    return tuple(json.dumps(config.get(name), sort_keys=True) for name in names)


def labels(lines: Sequence[Config], names: Sequence[str] | None = None) -> list[str]:
    """A label per line from the settings of each. names: the settings to show; None: the names that all runs were given, or
    the settings that differ, at most four, but as many as it takes to tell the lines apart. "…" stands for others."""
    given = [given_name(line) for line in lines]
    if names is None and all(given) and len(set(given)) == len(given) > 1:
        return given
    shown, more = (list(names), False) if names is not None else _shown(lines)
    found = []
    for line in lines:
        parts = [part for name in shown if (part := _part(name, line, lines, shown))]
        found.append(", ".join([*parts, "…"] if more else parts) or _network(line))
    return found


def _shown(lines: Sequence[Config]) -> tuple[list[str], bool]:
    """The settings to show, and whether others differ too."""
    names = differing(lines)
    needed: list[str] = []
    # Sizes come last: they are chosen for the task, so they often differ because something else does.
    for name in sorted(names, key=lambda name: (_is_bookkeeping(name), _declared(name).about == "size")):
        if _num_different(lines, [*needed, name]) > _num_different(lines, needed):
            needed.append(name)
    telling = [name for name in names if not _is_bookkeeping(name)]
    most = MOST_SHOWN + ("policy" in names and "core" in names)  # a line has one of the two
    extra = [name for name in telling if name not in needed][: max(0, most - len(needed))]
    shown = sorted([*needed, *extra], key=names.index)
    more = any(name not in shown for name in telling)
    if "policy" in shown and "core" not in shown:
        shown.insert(shown.index("policy") + 1, "core")  # what a line without a policy of its own is called
    return shown, more


def given_name(line: Config) -> str:
    """What --name said, without the seed that --seeds adds."""
    return str(line.get("name") or "").removesuffix(f"-seed{line.get('seed')}")


def _num_different(configs: Sequence[Config], names: Sequence[str]) -> int:
    return len({values(config, names) for config in configs})


def _part(name: str, line: Config, lines: Sequence[Config], shown: Sequence[str]) -> str:
    """One setting of a line; "" if the others that are shown say it."""
    value = line.get(name)
    if name == "policy":
        return _network(line) if value is not None else "" if "core" in shown else "Holdfast's policy"
    if name == "core":
        # A policy of the user's own replaces the core, unless it reads that setting itself.
        alike = [other for other in lines if other.get("policy") == line.get("policy")]
        replaced = line.get("policy") is not None and _num_different(alike, ["core"]) == 1
        return "" if replaced and "policy" in shown else _core(value)
    if name == "env_kwargs":
        return _env_kwargs(value or {}, [other.get(name) or {} for other in lines])
    if isinstance(value, bool):
        return name if value else f"no {name}"
    return f"{name} {_text(value, name)}"


def _network(line: Config) -> str:
    policy = line.get("policy")
    return _core(line.get("core")) if policy is None else str(policy).removeprefix(OWN_POLICY)


def _core(value: Any) -> str:
    return {"none": "no memory", None: "run"}.get(value, str(value))


def _env_kwargs(value: Config, all_values: Sequence[Config]) -> str:
    """The arguments that differ; all if none does."""
    keys = dict.fromkeys(key for each in all_values for key in each)
    differ = [key for key in keys if _num_different(all_values, [key]) > 1] or list(keys)
    return ", ".join(f"{key} {_text(value[key])}" if key in value else f"{key} default" for key in differ)


def _text(value: Any, name: str = "") -> str:
    """
    >>> _text(0.0007), _text([64, 64]), _text(None, "bptt"), _text([], "encoder_sizes")
    ('0.0007', '64 64', 'default', 'none')
    """
    if value is None or value == []:
        return "default" if value is None or _is_default(name, value) else "none"
    if isinstance(value, list):
        return " ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else str(value)
    return str(value)


def _is_default(name: str, value: Any) -> bool:
    kind = next((kind for kind in ALGORITHMS.values() if name in settings_of(kind)), None)
    found = None if kind is None else default_of(kind, name)
    return found is not None and (list(found) if isinstance(found, tuple) else found) == value
