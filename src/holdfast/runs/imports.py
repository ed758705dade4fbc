"""Whether a module that a *file* names may be imported. Importing runs its code, and a run folder may come from anybody.

What the user types (`--env my_module:MyEnv-v0`) is imported. What a checkpoint or a config.json names is imported only if
the user says so, or if the module is in use already.
"""

from __future__ import annotations

import sys
from pathlib import Path

from holdfast.config import TrainConfig
from holdfast.envs.own import module_named

MAKES_ENV = ("env",)
MAKES_POLICY = ("core", "policy")


class ImportNotAllowedError(ValueError):
    """A file names a module that the user has not allowed to be imported."""


def require_allowed(
    config: TrainConfig, source: Path, fields: tuple[str, ...], allowed: bool, typed: tuple[str | None, ...] = ()
) -> None:
    """Refuse settings from the file `source` that name a module, unless allowed. typed: names that the user gave."""
    for field in fields:
        name = getattr(config, field, None)
        module = module_named(name) if isinstance(name, str) else None
        if module and not allowed and name not in typed and module not in sys.modules:
            raise ImportNotAllowedError(
                f"{source} names {field} {name!r}, and using it runs the code of the module {module!r}; if you trust this "
                "file, add --allow-imports (in Python allow_imports=True)"
            )
