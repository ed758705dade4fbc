"""Whether a module that a *file* names may be imported. Importing runs its code, and a run folder may come from anybody.

What the user types (`--env my_module:MyEnv-v0`) is imported. What a checkpoint or a config.json names is imported only if the
user says so, or if it names a class of the right kind in a module that is in use already. Any other name is refused: what a
setting names is called, and `os:abort` is in use in every program.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from holdfast.config.settings import settings_of
from holdfast.named_objects import stands_for_object

JAX_SUITES = ("gymnax", "craftax", "popgym-arcade", "brax")
BRIDGES = ("popgym", "pettingzoo", "envpool", *JAX_SUITES)
"""What else than a module of the user's stands before the colon of an environment: packages that are installed."""
_BASES = {
    "core": ("holdfast.cores.base", "Core"),
    "policy": ("holdfast.policies.base", "RecurrentPolicy"),
    "algorithm": ("holdfast.algorithms.base", "Algorithm"),
    "optimizer": ("torch.optim.optimizer", "Optimizer"),
}
"""By their names: nothing here imports torch."""


class ImportNotAllowedError(ValueError):
    """A file names a module that the user has not allowed to be imported."""


def module_named(name: str, kind: str) -> str | None:
    """The module of the user's that a setting of this kind names; None if it names none.

    >>> module_named("my_module:MyEnv-v0", "env"), module_named("holdfast/TMaze-v0", "env")
    ('my_module', None)
    >>> module_named("popgym:RepeatFirstEasy", "env"), module_named("popgym:RepeatFirstEasy", "policy")
    (None, 'popgym')
    """
    module, colon, _ = name.rpartition(":")
    if kind == "env" and name.startswith("GymV2"):  # Shimmy's: its argument env_id names a module
        return "named by env_id"
    bridged = kind == "env" and module in BRIDGES
    return module if colon and not bridged and not stands_for_object(name) else None


def names_objects(config: type) -> dict[str, str]:
    """The settings that may name an object, and of which kind."""
    return {name: declared.names for name, declared in settings_of(config).items() if declared.names}


def allow_imports_flag(config: Any) -> str:
    """What a command that reads a run's files needs in addition if they name a module of the user's."""
    named = names_objects(type(config)).items()
    return " --allow-imports" if any(module_named(str(getattr(config, name)), kind) for name, kind in named) else ""


def named_in(config: Any) -> tuple[str, ...]:
    """What a config names as objects. A file that continues such a run may name the same."""
    return tuple(str(getattr(config, name)) for name in names_objects(type(config)))


def require_allowed(
    config: Any,
    source: Path,
    allowed: bool | Collection[str],
    typed: Collection[str | None] = (),
    *,
    env: bool = True,
    policy: bool = True,
    training: bool = True,
) -> None:
    """Refuse settings from the file `source` that name a module. allowed: all names, or these. typed: names that the user gave.
    env, policy, training: whether the environment, the policy, and what trains it are going to be made from the config."""
    for field, kind in names_objects(type(config)).items():
        name = getattr(config, field)
        used = {"env": env, "optimizer": training, "schedule": training}.get(kind, policy)
        if isinstance(name, str) and name not in typed and used:
            require_name_allowed(kind, name, f"{source} names", allowed)


def require_name_allowed(kind: str, name: str, who_names: str, allowed: bool | Collection[str]) -> None:
    """Refuse a name `module:Name` that a file gives for an object of this kind."""
    module = module_named(name, kind)
    may = allowed if isinstance(allowed, bool) else name in allowed
    if module and not may and not _is_in_use(kind, name, module):
        raise ImportNotAllowedError(
            f"{who_names} {kind} {name!r}, and using it runs the code of the module {module!r}; if you trust this "
            "file, add --allow-imports (in Python allow_imports=True)"
        )


def _is_in_use(kind: str, name: str, module: str) -> bool:
    """Whether a setting names a class of its kind in a module that is imported already. An environment may also be an id
    that its module has registered."""
    found: Any = sys.modules.get(module)
    if found is None:
        return False
    for part in name.rpartition(":")[2].split("."):
        found = getattr(found, part, None)
    if kind == "env":
        return found is None or (isinstance(found, type) and hasattr(found, "reset") and hasattr(found, "step"))
    return isinstance(found, type) and is_subclass_of(found, kind)


def is_subclass_of(thing: type, kind: str) -> bool:
    """Whether a class is of a kind: a core, a policy, an algorithm, an optimizer."""
    return kind in _BASES and any((base.__module__, base.__name__) == _BASES[kind] for base in thing.__mro__)
