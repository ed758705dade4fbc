"""The settings of the runs in a table: what the table is called by, and the line that states them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from holdfast.bench.results import Row
from holdfast.config import TrainConfig

DEFAULT, TUNED = "default", "tuned"
# Stated also where they are the defaults: what a reader compares first.
_ALWAYS = ("hidden_size", "num_envs", "num_steps", "epochs", "minibatches", "learning_rate", "gamma", "gae_lambda")
# A row says these elsewhere, or they make no other method.
_NEVER = {
    "env", "core", "total_steps", "seed", "device", "threads", "name", "run_dir", "quiet", "tensorboard", "track",
    "checkpoint_every", "keep_checkpoints", "env_kwargs", "inputs", "mask_velocity",
}  # fmt: skip
_LONGEST = 40


def name_of(tuned: bool, changed: Mapping[str, Any]) -> str:
    """The name of a setting, by which results are told apart. changed: the settings of the command. A long value is cut, and
    ends in a digest of all of it.

    >>> name_of(False, {}), name_of(True, {}), name_of(False, {"num_steps": 128, "gamma": 0.9})
    ('default', 'tuned', 'gamma=0.9 num_steps=128')
    """
    parts = [f"{name}={_short(_text(changed[name]))}" for name in sorted(changed)]
    return " ".join([TUNED, *parts] if tuned else parts) or DEFAULT


def heading_of(name: str) -> str:
    """Above the table of a setting; "" for the default.

    >>> heading_of("tuned"), heading_of("gamma=0.9 num_steps=128")
    ('With settings per family (--tuned)', 'With gamma=0.9 num_steps=128')
    """
    first, _, rest = name.partition(" ")
    if first not in (DEFAULT, TUNED):
        return f"With {name}"
    return "" if first == DEFAULT else "With settings per family (--tuned)" + (f" and {rest}" if rest else "")


def stated(rows: Iterable[Row]) -> str:
    """The settings of these runs in one line: the sizes, and what is not a default; a range where runs differ."""
    configs = [row.get("config", {}) for row in rows]
    parts = []
    for field in dataclasses.fields(TrainConfig):
        found = {_text(config[field.name]): config[field.name] for config in configs if field.name in config}
        usual = found.keys() <= {_text(_default(field))}
        if found and field.name not in _NEVER and (field.name in _ALWAYS or not usual):
            parts.append(f"{field.name} {_span(found)}")
    return ", ".join(parts)


def _span(found: Mapping[str, Any]) -> str:
    """One value, the lowest and the highest, or all.

    >>> _span({"8": 8, "512": 512, "64": 64}), _span({"linear": "linear", "constant": "constant"})
    ('8 to 512', 'linear or constant')
    """
    numbers = [value for value in found.values() if isinstance(value, (int, float)) and not isinstance(value, bool)]
    if len(found) > 1 and len(numbers) == len(found):
        return f"{_text(min(numbers))} to {_text(max(numbers))}"
    return " or ".join(found)[: 2 * _LONGEST]


def _default(field: dataclasses.Field[Any]) -> Any:
    return None if field.default is dataclasses.MISSING else field.default


def _text(value: Any) -> str:
    """
    >>> _text(0.0007), _text(128), _text("linear"), _text([64, 64]), _text(None)
    ('0.0007', '128', 'linear', '[64, 64]', 'none')
    """
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value)


def _short(text: str) -> str:
    """
    >>> _short("[64, 64]"), _short("a" * 60)
    ('[64, 64]', 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa...11ee391211')
    """
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST]}...{hashlib.sha256(text.encode()).hexdigest()[:10]}"
