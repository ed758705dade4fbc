"""Whether a module that a *file* names may be imported. Importing runs its code, and a run folder may come from anybody.

What the user types (`--env my_module:MyEnv-v0`) is imported. What a checkpoint or a config.json names is imported only if
the user says so, or if it names a class of the right kind in a module that is in use already. Any other name is refused:
what a setting names is called, and `os:abort` is in use in every program.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from holdfast.config import TrainConfig
from holdfast.cores import Core
from holdfast.envs.own import module_named
from holdfast.policies.base import RecurrentPolicy

MAKES_ENV = ("env",)
MAKES_POLICY = ("core", "policy")


class ImportNotAllowedError(ValueError):
    """A file names a module that the user has not allowed to be imported."""


def require_allowed(
    config: TrainConfig,
    source: Path,
    fields: tuple[str, ...],
    allowed: bool | Collection[str],
    typed: Collection[str | None] = (),
) -> None:
    """Refuse settings from the file `source` that name a module. allowed: all names, or these. typed: names that the user gave."""
    for field in fields:
        name = getattr(config, field, None)
        module = module_named(name) if isinstance(name, str) else None
        may = allowed if isinstance(allowed, bool) else name in allowed
        if module and not may and name not in typed and not _is_in_use(field, str(name), module):
            raise ImportNotAllowedError(
                f"{source} names {field} {name!r}, and using it runs the code of the module {module!r}; if you trust this "
                "file, add --allow-imports (in Python allow_imports=True)"
            )


def named_in(config: TrainConfig) -> tuple[str, ...]:
    """What a config names as environment, core and policy. A file that continues such a run may name the same."""
    return tuple(str(getattr(config, field)) for field in MAKES_ENV + MAKES_POLICY)


def _is_in_use(field: str, name: str, module: str) -> bool:
    """Whether a setting names a class of its kind in a module that is imported already. An environment may also be an id
    that its module has registered."""
    found: Any = sys.modules.get(module)
    if found is None:
        return False
    for part in name.rpartition(":")[2].split("."):
        found = getattr(found, part, None)
    if field == "env":
        return found is None or (isinstance(found, type) and hasattr(found, "reset") and hasattr(found, "step"))
    return isinstance(found, type) and issubclass(found, {"core": Core, "policy": RecurrentPolicy}[field])
