"""The automatic name of a run: core or policy, what differs from the defaults, seed (`gru-lr0.001-seed3`)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.config.settings import default_of, settings_of

MOST_NAMED = 4


def kind_of(config: Any) -> str:
    """What a run's name begins with: the algorithm unless it is PPO, which 0.2 did not name; then the policy or the core."""
    algorithm = [] if config.algorithm == "ppo" else [config.algorithm.rpartition(":")[2]]
    return "-".join([*algorithm, str(config.core if config.policy is None else config.policy).rpartition(":")[2]])


def differences(config: Any, presets: Sequence[Mapping[str, Any]]) -> list[str]:
    """What differs from the defaults, or from one of these presets if that is closer; at most a few."""
    # Named always: another task in the same environment's folder.
    about = settings_of(type(config)).items()
    task = {name: default_of(type(config), name) for name, declared in about if declared.about == "task"}
    found = min((_from(config, {**base, **task}) for base in ({}, *presets)), key=len)
    return found if len(found) <= MOST_NAMED else [*found[:MOST_NAMED], "etc"]


def _from(config: Any, base: Mapping[str, Any]) -> list[str]:
    found = []
    sizes_last = sorted(settings_of(type(config)).items(), key=lambda pair: pair[1].about == "size")
    for name, declared in sizes_last:
        # Sizes are chosen for the task by default, so their numbers are named only where a preset has others.
        if declared.short is None or (declared.about == "size" and name not in base):
            continue
        value = getattr(config, name)
        if value in declared.chosen and name not in base:
            continue
        if value != (base[name] if name in base else default_of(type(config), name)):
            found.append(_part(declared.short, value))
    return found


def _part(short: str, value: Any) -> str:
    """
    >>> _part("lr", 0.001), _part("norm-obs", False), _part("heads", (64, 64)), _part("", {"length": 5})
    ('lr0.001', 'no-norm-obs', 'heads64x64', 'length5')
    """
    if isinstance(value, bool):
        return short if value else f"no-{short}"
    if isinstance(value, dict):
        text = "-".join(f"{key}{inner}" for key, inner in value.items())
    elif isinstance(value, (list, tuple)):
        text = ("-" if isinstance(next(iter(value), None), str) else "x").join(map(str, value)) or "0"
    else:
        text = f"{value:g}" if isinstance(value, float) else "-none" if value is None else str(value)
    return short + re.sub(r"[^\w.+-]+", "_", text)[:40]
