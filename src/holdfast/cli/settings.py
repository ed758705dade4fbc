"""Settings of a run on the command line: where they start from (a preset, a file, an algorithm's defaults), and their flags."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from holdfast.cli.errors import UserError, user_errors
from holdfast.cli.flags import named_values, parse, value_of
from holdfast.config import PRESETS, RunConfig, config_class, imports
from holdfast.config.run import BEFORE_ALGORITHMS

Flags = TypeVar("Flags")


def defaults_from(argv: list[str], preset: str | None, config_file: str | None) -> RunConfig:
    """The settings that flags change: of a preset, of a file, or the defaults of `--algorithm`."""
    if "" in (preset, config_file):
        raise ValueError("--preset and --config need a name or a file, but the value is empty")
    algorithm = value_of(argv, "--algorithm")
    if preset and preset not in PRESETS and Path(preset).suffix == ".json":
        preset, config_file = None, preset
    if not preset and not config_file:
        return config_class(algorithm or BEFORE_ALGORITHMS)()
    if preset:
        config, source = RunConfig.preset(preset), f"the preset {preset}"
    else:
        config, source = _of_file(Path(str(config_file)), argv, algorithm), str(config_file)
    if algorithm and algorithm != config.algorithm:
        raise ValueError(
            f"{source} has settings of {config.algorithm}, and --algorithm says {algorithm}; leave out one of them"
        )
    return config


def _of_file(path: Path, argv: list[str], algorithm: str | None) -> RunConfig:
    allowed: Any = True if "--allow-imports" in argv else tuple(filter(None, [algorithm]))
    config = RunConfig.load(path / "config.json" if path.is_dir() else path, allowed)
    config.run_dir = None  # that of the earlier run
    automatic = f"{re.escape(config.automatic_name)}|{re.escape(config.plain_name)}"
    if re.fullmatch(rf"({automatic})(-\d+)?", config.name or ""):
        config.name = None  # nobody chose it: take the next free one
    return config


def parse_with_settings(kind: type[Flags], argv: list[str], command: str, defaults: RunConfig) -> tuple[Any, RunConfig]:
    """The flags of a command and those of the settings, and the config that these make of the defaults.

    kind: a dataclass with a field `env_args`.
    """
    flags = parse(flags_with_settings(kind, defaults), argv, command)
    env_kwargs = {**defaults.env_kwargs, **named_values("--env-args", flags.env_args, "length=40")}
    with user_errors():
        return flags, type(defaults)(**{**vars(flags.settings), "env_kwargs": env_kwargs})


def flags_with_settings(kind: type, defaults: RunConfig) -> Any:
    """A dataclass of flags with a field `settings`: those of the config. Values are not checked until a config is made of them."""
    config = type(defaults)
    namespace = {"__post_init__": lambda self: None, "__doc__": config.__doc__}
    core = ("core", str, dataclasses.field(default="lstm"))
    settings: Any = dataclasses.make_dataclass("Settings", [core], bases=(config,), namespace=namespace)
    start = settings(**{**vars(defaults), "env_kwargs": {}})
    field = ("settings", settings, dataclasses.field(default_factory=lambda: start))
    return dataclasses.make_dataclass(kind.__name__, [field], bases=(kind,), namespace={"__doc__": kind.__doc__})


def require_imports_allowed(argv: list[str], config: RunConfig, source: Path, allowed: bool) -> None:
    """Refuse what a file names and the user has neither typed nor allowed."""
    with user_errors():
        imports.require_allowed(config, source, allowed, typed_names(argv, config))


def typed_names(argv: list[str], config: RunConfig) -> list[str | None]:
    """The objects that the command line names."""
    return [value_of(argv, "--" + name.replace("_", "-")) for name in imports.names_objects(type(config))]


def require_one_source(sources: Sequence[tuple[str, Any]]) -> None:
    """Settings start from one place."""
    given = [flag for flag, value in sources if value is not None]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} cannot be combined; give one of them")
