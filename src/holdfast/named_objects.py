"""Objects that a setting names as `module:Name`: a core, an environment, a policy. Importing a module runs its code.

A name that the user typed may be imported. Whether a name that was read from a file may be imported is the caller's
decision, before it calls `import_named`.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

# Before the colon of a recorded name: an object that only the program that made it has. No module can have these names.
OWN_ENV, OWN_POLICY = "own-env:", "own-policy:"
_installed_only: ContextVar[bool] = ContextVar("modules are not found in the current folder", default=False)
_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def is_import_name(name: str) -> bool:
    """Whether a text has the form `module:Name`; nothing is imported.

    >>> is_import_name("my_package.cores:MyCore"), is_import_name("lstm"), is_import_name("holdfast/TMaze-v0")
    (True, False, False)
    """
    return _NAME.fullmatch(name) is not None


def stands_for_object(name: str) -> bool:
    """Whether a recorded name stands for an object that was passed to a trainer, and cannot be imported."""
    return name.startswith((OWN_ENV, OWN_POLICY))


def import_named(name: str, *, kind: str) -> Any:
    """The object at `module:Name`, from an installed package or a module in the current folder.

    kind: what the name stands for ("core", "environment"); errors begin with it. Every failure is a ValueError of one
    line, an exception raised by the module itself included.

    >>> import_named("collections:OrderedDict", kind="container")
    <class 'collections.OrderedDict'>
    """
    module_name, _, path = name.partition(":")
    try:
        _refuse_file(module_name)
        if not is_import_name(name):
            raise ValueError("expected module:Name, such as my_module:MyName")
        found: Any = import_module(module_name)
    except ValueError as error:
        raise ValueError(f"{kind} {name!r}: {error}") from error
    for part in path.split("."):
        if not hasattr(found, part):
            likely = get_close_matches(part, dir(found), 1)
            hint = f"; did you mean {likely[0]}?" if likely else ""
            if module_name == "__main__":  # recorded by a script that trained with a class of its own
                hint = ", because another script defined it; move it to a module of its own"
            raise ValueError(f"{kind} {name!r}: {module_name} has no {path}{hint}")
        found = getattr(found, part)
    return found


def import_module(module_name: str) -> ModuleType:
    """A module, from an installed package or the current folder; every failure is a ValueError of one line.

    Inside `installed_only`, from an installed package.
    """
    _refuse_file(module_name)
    if not _installed_only.get() and "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        return importlib.import_module(module_name)
    except Exception as error:  # the module is the user's code and may raise anything
        raise ValueError(_why_not_imported(module_name, error)) from error


@contextmanager
def installed_only() -> Iterator[None]:
    """Inside, modules are not found in the current folder, which may hold a file of any name. Modules in use stay in use."""
    before, here = sys.path[:], os.path.realpath(os.curdir)
    sys.path[:] = [entry for entry in before if os.path.realpath(entry) != here]
    token = _installed_only.set(True)
    try:
        yield
    finally:
        _installed_only.reset(token)
        sys.path[:] = before + [entry for entry in sys.path if entry not in before]


def name_of(thing: type) -> str:
    """The `module:Name` under which `import_named` finds a class; a ValueError if there is none.

    >>> from collections import OrderedDict
    >>> name_of(OrderedDict)
    'collections:OrderedDict'
    """
    found: Any = sys.modules.get(thing.__module__)
    for part in thing.__qualname__.split("."):
        found = getattr(found, part, None)
    if found is not thing:
        raise ValueError(
            f"{thing.__qualname__} cannot be found again by name; define the class at the top level of a module"
        )
    return f"{thing.__module__}:{thing.__qualname__}"


def _refuse_file(module_name: str) -> None:
    if module_name.endswith(".py"):
        path = Path(os.path.relpath(module_name)).with_suffix("")
        elsewhere = f" and start in {path.parent}" if ".." in path.parts else ""
        module = path.name if elsewhere else ".".join(path.parts)
        raise ValueError(f"{module_name} is a file; name its module, {module}{elsewhere}")


def _why_not_imported(module_name: str, error: Exception) -> str:
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing and (module_name == missing or module_name.startswith(missing + ".")):
        return f"there is no module {missing}{'' if _installed_only.get() else f', neither in {os.getcwd()} nor'} installed"
    text = " ".join(str(error).split())
    return f"importing {module_name} raised {type(error).__name__}{': ' + text if text else ''}"
