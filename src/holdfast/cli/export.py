"""`holdfast export RUN`: write a trained policy to one file for other programs."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from holdfast.cli.errors import user_errors
from holdfast.cli.flags import parse
from holdfast.shown_text import show


@dataclass
class ExportFlags:
    """Write a trained policy to one file that other programs can run, memory and normalizer included."""

    run: Annotated[Path, tyro.conf.arg(metavar="RUN")]
    """A run folder, or one of its checkpoints."""
    out: Annotated[Path | None, tyro.conf.arg(aliases=("-o",))] = None
    """The file to write; policy.onnx or policy.pt2 by default."""
    format: Literal["onnx", "pt2"] | None = None
    """onnx, for onnxruntime in any language; pt2, for torch.export.load. By default the file name decides."""
    policy: str | None = None
    """The policy class, my_module:MyPolicy, if the run does not name it."""
    allow_imports: bool = False
    """Import modules that the run names, which runs their code."""
    masks: bool = False
    """Take action masks as an input."""


def main(argv: list[str]) -> int:
    flags = parse(ExportFlags, argv, "export")
    from holdfast.deploy.export import export_policy
    from holdfast.deploy.exported_signature import sample_observations
    from holdfast.runs import saved_policy

    with user_errors():
        file, saved = saved_policy.read(flags.run)
        policy = saved_policy.load(file, flags.policy, allow_imports=flags.allow_imports)
        config = saved_policy.settings(file, saved)
        about = {
            "env": config.env,
            "steps": int(saved["steps"]),
            "checkpoint": file.name,
            "inputs": list(config.inputs),
        }
        observation_space, action_space = saved_policy.spaces(saved)
        says_what_it_sees = getattr(policy, "observation_space", None) is not None or observation_space is None
        out = flags.out or Path(f"policy.{flags.format or 'onnx'}")
        made = export_policy(
            policy,
            out,
            flags.format,
            masks=flags.masks,
            example_obs=None if says_what_it_sees else sample_observations(observation_space, 16),
            action_space=action_space,
            about=about,
        )
    signature = made.signature
    show(f"{made.path}  {made.path.stat().st_size / 1024:,.0f} KiB, {config.env}, {signature.about['core']}")
    show(f"inputs   {', '.join(port.describe() for port in signature.inputs())}")
    show(f"outputs  {', '.join(signature.outputs)}")
    if saved_policy.was_masked(saved) and not flags.masks:
        show("masks    not in this file, so it may choose actions that the run forbade; add --masks to include them")
    if config.hidden:
        show(
            f"sees     {config.hidden[0]} (0), as in training: wrap an environment in holdfast.envs.{config.hidden[1]}"
        )
    show(f"checked against the policy over 30 steps with resets: largest difference {made.difference:.1e}")
    show(f"use it   python {shlex.quote(str(made.usage))}, or hf.Runner({str(made.path)!r})")
    return 0
