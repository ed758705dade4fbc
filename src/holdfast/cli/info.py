"""`holdfast info`: what this machine and installation are. `holdfast info RUN`: what a run was made with. `holdfast info
--core NAME`: what a memory costs."""

from __future__ import annotations

import json
import os
import platform
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from holdfast.cli.errors import user_errors
from holdfast.cli.flags import parse
from holdfast.shown_text import show

Row = tuple[str, str]
"""A name and a text."""


@dataclass
class InfoFlags:
    """Versions, devices, threads, engines and optional packages of this installation; or what a run was made with; or
    what a memory costs (--core)."""

    run: Annotated[Path | None, tyro.conf.arg(metavar="RUN"), tyro.conf.Positional] = None
    """A run folder, a checkpoint, or a folder of hf.save_pretrained; by default this installation is described."""
    core: str | None = None
    """Describe this memory instead, as train --core NAME makes it: parameters and state."""
    hidden_size: int = 128
    """Units per layer, with --core."""
    num_layers: int = 1
    """Layers, with --core."""


def main(argv: list[str]) -> int:
    flags = parse(InfoFlags, argv, "info")
    if flags.core is not None:
        with user_errors():
            if flags.run is not None:
                raise ValueError("give a run or --core, not both")
            rows = core_rows(flags.core, flags.hidden_size, flags.num_layers)
    elif flags.run is None:
        rows = machine_rows()
    else:
        with user_errors():
            rows = rows_of(flags.run)
    width = max(len(name) for name, _ in rows)
    show(*(f"{name.ljust(width)}  {text}" for name, text in rows))
    return 0


def machine_rows() -> list[Row]:
    """This machine and installation."""
    import torch

    import holdfast
    from holdfast.engines.choose import describe_machine
    from holdfast.runs.metadata import OPTIONAL, REQUIRED, cpu_name, device_names, package_versions

    versions = package_versions((*REQUIRED, *OPTIONAL))
    cpu = _cpu_text(cpu_name(), os.cpu_count(), torch.get_num_threads(), torch.backends.cpu.get_cpu_capability())
    return [
        ("holdfast", f"{holdfast.__version__}, {Path(holdfast.__file__).parent}"),
        ("python", f"{platform.python_version()}, {platform.platform()}"),
        ("cpu", cpu),
        ("devices", ", ".join(device_names()) or "cpu only"),
        ("cpu kernel", cpu_kernel()),
        *describe_machine(),
        *((name, versions.get(name, "missing")) for name in REQUIRED if name != "holdfast"),
        *((name, versions.get(name) or f"not installed ({purpose})") for name, purpose in OPTIONAL.items()),
    ]


def cpu_kernel() -> str:
    """Which recurrence kernel the CPU uses, and the reason if it is not the native one."""
    from holdfast.kernels.cpu import recurrence

    status = recurrence.status()
    if status["kernel"] == "native":
        return f"native, {status['isa']}, {status['library']}"
    return f"portable (PyTorch): {status['reason']}"


def rows_of(path: Path) -> list[Row]:
    """What a run folder, a checkpoint or a shared policy is."""
    from holdfast.runs import checkpoint, pretrained

    in_run = path.is_file() and path.absolute().parent.name == checkpoint.FOLDER
    folder = checkpoint.run_of(path) if in_run else path
    if (folder / "meta.json").exists():
        return run_rows(folder)
    if (path / pretrained.MANIFEST).is_file():
        return shared_rows(path)
    return checkpoint_rows(path)


def checkpoint_rows(path: Path) -> list[Row]:
    """What a checkpoint says of itself, if it is not in the folder of its run."""
    from holdfast.runs import saved_policy

    file, saved = saved_policy.read(path)
    config = saved_policy.settings(file, saved)
    steps = f"{saved['steps']:,} of {config.total_steps:,} steps"
    return [
        ("checkpoint", f"{file}, without the meta.json of its run"),
        ("task", _task(vars(config))),
        ("trained", f"{steps}, {saved['update']:,} of {config.num_updates:,} updates"),
    ]


def shared_rows(folder: Path) -> list[Row]:
    """What is in a folder that hf.save_pretrained wrote."""
    from holdfast.runs import pretrained

    shared = pretrained.read(folder)
    config, how = pretrained.training_config(shared), shared.config["policy"]
    task = [] if config is None else [("task", _task(vars(config)))]
    return [
        ("policy", f"{folder}, written by hf.save_pretrained"),
        ("class", f"{how.get('class') if isinstance(how, dict) else how}"),
        *task,
        ("weights", f"{len(shared.weights) / 1024:,.0f} KiB"),
        ("read it", f"hf.load({str(folder)!r})"),
    ]


def run_rows(folder: Path) -> list[Row]:
    """What a run was made with, from its config.json and meta.json."""
    from holdfast import plain_checks

    meta, config = (
        plain_checks.mapping(json.loads((folder / name).read_text()), str(folder / name))
        for name in ("meta.json", "config.json")
    )
    # Every entry may be missing: other versions write others, and the file may be anybody's.
    packages, git, engines = (_entries(meta, name) for name in ("packages", "git", "engines"))
    commit = f", commit {git['commit']!s:.12}{' with changes' if git.get('changed') else ''}" if "commit" in git else ""
    python, system, cpu, cores, capability = (
        meta.get(name, "unknown") for name in ("python", "platform", "cpu", "cpu_count", "cpu_capability")
    )
    return [
        ("run", str(folder)),
        ("task", _task(config)),
        ("command", shlex.join(map(str, _entries(meta, "command", list)))),
        ("holdfast", f"{packages.get('holdfast', 'not installed')}{commit}"),
        ("python", f"{python}, torch {packages.get('torch', 'unknown')}, {system}"),
        ("cpu", _cpu_text(cpu, cores, meta.get("threads", "unknown"), capability)),
        ("devices", ", ".join(map(str, _entries(meta, "devices", list))) or "cpu only"),
        *((str(leg), str(engine)) for leg, engine in engines.items()),
    ]


def _entries(meta: dict[str, Any], name: str, kind: type = dict) -> Any:
    """An entry of this kind; an empty one if there is none."""
    return meta[name] if isinstance(meta.get(name), kind) else kind()


def _cpu_text(name: Any, cores: Any, threads: Any, capability: Any) -> str:
    return f"{name}, {cores} cores, {threads} thread{'' if threads == 1 else 's'}, {capability}"


def _task(settings: Mapping[str, Any]) -> str:
    """A policy of the user's own has its own core."""
    env, policy, core, units, seed = map(settings.get, ("env", "policy", "core", "hidden_size", "seed"))
    return f"{env}, {policy if policy is not None else f'{core} {units}'}, seed {seed}"


# --- a memory --------------------------------------------------------------------------------------------------------


def core_rows(name: str, hidden_size: int, num_layers: int) -> list[Row]:
    """The memory that `--core NAME` makes, with as many inputs as hidden units, as in the trainer."""
    from holdfast import state as state_ops
    from holdfast.cores.named import CORES, made_of, make_core

    if name not in CORES:
        raise ValueError(f"unknown core {name!r}; one of {', '.join(CORES)}")
    core = make_core(name, hidden_size, hidden_size, num_layers, "zero")
    leaves = state_ops.named_leaves(core.initial_state(1))
    total = sum(leaf.nbytes for leaf in leaves.values())
    size = f"{total:,} bytes" if total < 1024 else f"{total / 1024:,.1f} KiB"
    shapes = ", ".join(
        f"{path} {list(leaf.shape[1:])} {str(leaf.dtype).removeprefix('torch.')}" for path, leaf in leaves.items()
    )
    units = f"{name}, {hidden_size} unit{'s' * (hidden_size != 1)}"
    return [
        ("core", units + (f", {num_layers} layers" if num_layers > 1 else "")),
        ("made of", made_of(core)),
        ("parameters", f"{sum(p.numel() for p in core.parameters()):,}"),
        ("state", f"{size} per environment: {shapes}"),
    ]
