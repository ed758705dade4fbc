"""What goes into an exported policy and what comes out of it, by name, and as JSON inside the file.

    obs | obs_<path>, resets, state_<path>, action_mask  ->  action, value, state_<path>_next, logits | mean, std

Of a Dict or Tuple of actions each part has its own outputs: action_<path>, logits_<path>, and so on.

Every tensor is [B, ...] with the same B. A policy without a critic has no output `value`. This file only names things;
`export_graph.py` traces the graph.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from holdfast import plain_checks
from holdfast.deploy import signature_checks
from holdfast.state import KeyPath, paths

FORM = 1  # of the JSON; raised when a reader of the old one would misread the new one
KEY = "holdfast"  # of the JSON in ONNX metadata; in a .pt2 it is the extra file "holdfast.json"


@dataclass(frozen=True)
class Port:
    """A named input. `shape` is that of one environment; `path` is its place in a nested observation or state."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    path: KeyPath = ()
    example: Any = None
    """Where a fresh row of a state starts, or a valid observation; None: zeros."""

    def describe(self) -> str:
        return f"{self.name} [{', '.join(map(str, ('B', *self.shape)))}] {self.dtype}"


@dataclass(frozen=True)
class Signature:
    """The inputs and outputs of an exported policy, and what is needed to act with it."""

    observations: list[Port]
    states: list[Port]
    masks: list[Port] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    action: dict[str, Any] = field(default_factory=dict)
    """kind of the distribution (greedy, categorical, multi_categorical, bernoulli, gaussian, squashed_gaussian, None), and numbers.
    Or "factored", and `parts`: the same of each part, with its path, how many `choices` a mask of it names, and the `suffix` of its
    outputs."""
    about: dict[str, Any] = field(default_factory=dict)
    """For people: policy, core, environment, steps, versions."""

    def inputs(self) -> list[Port]:
        """In the order of the graph's inputs."""
        return [*self.observations, Port("resets", (), "bool"), *self.states, *self.masks]

    def action_parts(self) -> list[dict[str, Any]]:
        """What `action` says of each part; one without a path if it has no parts."""
        return (
            self.action["parts"] if self.action["kind"] == "factored" else [{**self.action, "path": (), "suffix": ""}]
        )

    def to_json(self) -> str:
        return json.dumps({"form": FORM, **dataclasses.asdict(self)})

    @classmethod
    def from_json(cls, text: str | None, file: str) -> Signature:
        """From the file's metadata; a ValueError says what is wrong with it."""
        if not text:
            raise ValueError(f"{file}: `holdfast export` did not write this file: it does not describe its inputs")
        try:
            data = plain_checks.mapping(json.loads(text), "it")
            form = data.pop("form", None)
            parts = signature_checks.signature(data) if form == FORM else {}
        except Exception as error:  # a text that is no JSON, or that is nested too deep, too
            reason = " ".join(str(error).split())
            reason = reason if type(error) is ValueError else f"{type(error).__name__}: {reason}"
            raise ValueError(
                f"{file}: its description cannot be used ({reason[:300]}); export the policy again"
            ) from error
        if not parts:
            raise ValueError(f"{file}: another version of Holdfast wrote this file; export the policy again")
        for ports in ("observations", "states", "masks"):
            parts[ports] = [Port(**port) for port in parts[ports]]
        return cls(**parts)


def next_name(state_name: str) -> str:
    """A graph may not give an output the name of an input."""
    return f"{state_name}_next"


def unique_names(prefix: str, all_paths: list[KeyPath]) -> list[str]:
    """A name per path that is an identifier: `obs`, `obs_camera_left`."""
    names: list[str] = []
    for path in all_paths:
        name = re.sub(r"\W", "_", "_".join([prefix, *map(str, path)]))
        while name in names:  # {"a_b": ..} next to {"a": {"b": ..}}
            name += "_"
        names.append(name)
    return names


def action_suffixes(action: Any) -> list[tuple[KeyPath, str]]:
    """(path, suffix of the names of outputs) of each part of an action; ((), "") if it has no parts."""
    found = [path for path, _ in paths(action)]
    names = [f"{name}_" if name == "action_mask" else name for name in unique_names("action", found)]  # an input's name
    return [(path, name.removeprefix("action")) for path, name in zip(found, names)]


def observation_ports(batch: Any) -> list[Port]:
    """The ports of a batch of observations: nested arrays [N, ...]."""
    found = paths(batch)
    ports = []
    for name, (path, leaf) in zip(unique_names("obs", [path for path, _ in found]), found):
        numbered = leaf.ndim == 1 and leaf.dtype.kind == "i"  # a Discrete space may not have 0
        example = int(leaf[0]) if numbered and not (leaf == 0).any() else None
        ports.append(Port(name, tuple(leaf.shape[1:]), str(leaf.dtype), path, example))
    return ports


def batch_size(ports: list[Port], shapes: list[Any]) -> int | None:
    """B of observations of these shapes; None: one observation without a batch dimension."""
    found: list[int | None] = []
    for port, came in zip(ports, shapes):
        shape = tuple(came)
        if shape == port.shape:
            found.append(None)
        elif shape and shape[1:] == port.shape:
            found.append(shape[0])
        else:
            raise ValueError(
                f"got an observation of shape {shape} for {port.name}, expected {port.shape}, or "
                f"{('B', *port.shape)} for B environments"
            )
    if len(set(found)) > 1:
        came = ", ".join(f"{port.name} {tuple(shape)}" for port, shape in zip(ports, shapes))
        raise ValueError(f"the parts of the observation differ in batch size: {came}")
    return found[0]


def nest(ports: list[Port], parts: list[Any]) -> Any:
    """The nested observation of its parts, one per port."""
    if not ports[0].path:
        return parts[0]
    tree: dict[Any, Any] = {}
    for port, part in zip(ports, parts):
        inner = tree
        for key in port.path[:-1]:
            inner = inner.setdefault(key, {})
        inner[port.path[-1]] = part
    return _with_tuples(tree)


def _with_tuples(tree: Any) -> Any:
    """Dicts whose keys are numbers become tuples."""
    if not isinstance(tree, dict):
        return tree
    parts = {key: _with_tuples(part) for key, part in tree.items()}
    return tuple(parts.values()) if isinstance(next(iter(parts)), int) else parts


def take(obs: Any, port: Port) -> Any:
    """The part of an observation that this port reads."""
    for key in port.path:
        try:
            obs = obs[key]
        except (KeyError, IndexError, TypeError) as error:
            kind = f"keys {sorted(map(str, obs))}" if isinstance(obs, dict) else f"a {type(obs).__name__}"
            raise ValueError(
                f"the observation has no part {'.'.join(map(str, port.path))!r}: got {kind}; pass it nested as the "
                "observation space is"
            ) from error
    return obs


def sample_observations(space: Any, count: int, seed: int = 0) -> Any:
    """`count` random observations of a gymnasium space, nested arrays [count, ...], as a policy receives them."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        return {key: sample_observations(part, count, seed + i) for i, (key, part) in enumerate(space.items())}
    if isinstance(space, spaces.Tuple):
        return tuple(sample_observations(part, count, seed + 100 * i) for i, part in enumerate(space))
    own = copy.deepcopy(space)  # seeding it leaves the random numbers of the original alone
    own.seed(seed)
    rows = np.stack([np.asarray(own.sample()) for _ in range(count)])
    if rows.dtype.kind == "f":  # bounds may be as large as a float can be
        return np.clip(rows, -10.0, 10.0).astype(np.float32)
    return rows
