"""The lines that a run begins with: its task, its memory, its sizes, the engines that execute it, its folder."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.config import TrainConfig


def first_lines(config: TrainConfig, engines: Mapping[str, str], chosen: str = "") -> list[str]:
    """One fact per line. engines: of rollout and update. chosen: which sizes the run chose, and why."""
    return [
        f"task    {_task(config)}",
        f"policy  {config.policy}" if config.policy else f"memory  {_memory(config)}",
        f"sizes   {_sizes(config)}{f' ({chosen})' if chosen else ''}",
        f"engine  {'; '.join(f'{leg}: {engine}' for leg, engine in engines.items())}",
        f"run     {config.folder}",
    ]


def _task(config: TrainConfig) -> str:
    arguments = [f"{name}={value}" for name, value in config.env_kwargs.items()]
    hidden = ["velocities hidden"] if config.mask_velocity else []
    return ", ".join([config.env, *arguments, *hidden, f"seed {config.seed}"])


def _memory(config: TrainConfig) -> str:
    name = config.core if isinstance(config.core, str) else config.core.__name__
    if name == "none":
        return f"none, {config.hidden_size} units"
    layers = [f"{config.num_layers} layers"] if config.num_layers > 1 else []
    span = [f"span {config.memory_span}"] if config.memory_span else []
    return ", ".join([name, f"{config.hidden_size} units", *layers, *span])


def _sizes(config: TrainConfig) -> str:
    rollout = f"{config.num_envs} environments x {config.num_steps} steps"
    return f"{rollout}, {config.epochs} epochs x {config.minibatches} minibatches"
