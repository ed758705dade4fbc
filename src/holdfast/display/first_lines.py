"""The lines that a run begins with: its task, its memory, its sizes, the engines that execute it, its folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdfast.config import RunConfig
from holdfast.named_objects import stands_for_object

_FED_BACK = {"prev_action": "its previous action", "prev_reward": "its previous reward"}


def first_lines(
    config: RunConfig, engines: Mapping[str, str], chosen: str = "", encoder: Sequence[str] = (), for_actions: str = ""
) -> list[str]:
    """One fact per line. engines: of rollout and update. chosen: which sizes the run chose, and why. encoder: of images.
    for_actions: what it chose because of the actions."""
    return [
        f"task    {_task(config)}",
        f"policy  {_policy(config.policy)}" if config.policy else f"memory  {_memory(config)}",
        *(f"encoder {text}" for text in encoder),
        *([f"actions {for_actions}"] if for_actions else []),
        f"sizes   {config.describe_sizes()}{f' ({chosen})' if chosen else ''}",
        f"engine  {'; '.join(f'{leg}: {engine}' for leg, engine in engines.items())}",
        f"run     {config.folder}",
    ]


def _policy(name: str) -> str:
    return f"{name.partition(':')[2]}, your own" if stands_for_object(name) else name


def _task(config: RunConfig) -> str:
    arguments = [f"{name}={value}" for name, value in config.env_kwargs.items()]
    hidden = [config.hidden[0]] if config.hidden else []
    trials = [f"trials of {config.trial_episodes} episodes"] if config.trial_episodes > 1 else []
    return ", ".join([config.env, *arguments, *hidden, *trials, f"seed {config.seed}"])


def _memory(config: RunConfig) -> str:
    name = config.core if isinstance(config.core, str) else config.core.__name__
    facts = [name, f"{config.hidden_size} unit{'s' * (config.hidden_size != 1)}"]
    if name != "none":
        facts += [f"{config.num_layers} layers"] if config.num_layers > 1 else []
        facts += [f"span {config.memory_span}"] if config.memory_span else []
    seen = [text for part, text in _FED_BACK.items() if part in config.inputs]
    return ", ".join(facts) + (f"; sees {' and '.join(seen)}" if seen else "")
