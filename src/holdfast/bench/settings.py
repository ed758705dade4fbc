"""The settings of the runs in a table: what the table is called by, and the line that states them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from holdfast.bench.results import Row
from holdfast.config import config_class, names_about, settings_of
from holdfast.config.run import BEFORE_ALGORITHMS
from holdfast.config.settings import default_of

DEFAULT, TUNED = "default", "tuned"
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
    """The settings of these runs in one line: sizes, what sweeps vary, and what is not a default; a range where runs differ."""
    configs = [row.get("config", {}) for row in rows]
    kinds = {config_class(config.get("algorithm", BEFORE_ALGORITHMS)) for config in configs}
    parts = []
    for kind in sorted(kinds, key=lambda kind: kind.__name__):
        # A row says the core and the task elsewhere.
        never = names_about(kind, "task", "budget", "sample", "upkeep", "place") | {"core", "algorithm"}
        for name, declared in settings_of(kind).items():
            found = {_text(config[name]): config[name] for config in configs if name in config}
            usual = found.keys() <= {_text(value) for value in (default_of(kind, name), *declared.chosen)}
            if found and name not in never and (declared.search is not None or declared.about == "size" or not usual):
                parts.append(f"{name} {_span(found)}")
    return ", ".join(dict.fromkeys(parts))


def _span(found: Mapping[str, Any]) -> str:
    """One value, the lowest and the highest, or all.

    >>> _span({"8": 8, "512": 512, "64": 64}), _span({"linear": "linear", "constant": "constant"})
    ('8 to 512', 'linear or constant')
    """
    numbers = [value for value in found.values() if isinstance(value, (int, float)) and not isinstance(value, bool)]
    if len(found) > 1 and len(numbers) == len(found):
        return f"{_text(min(numbers))} to {_text(max(numbers))}"
    return " or ".join(found)[: 2 * _LONGEST]


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
