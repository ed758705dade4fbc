"""Checks of the description inside an exported file, before anything is made from it. Anybody can write such a file.

Each raises a ValueError that names the place and what was expected. `exported_signature.py` says what the parts mean.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from holdfast import plain_checks as check

DTYPES = (
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64",
)  # fmt: skip
MOST_NUMBERS = 2**26  # in all inputs of one environment: a short text can ask for any amount of memory
MOST_INPUTS = 4096
_INPUTS = ("observations", "states", "masks")
_PORT = {"name", "shape", "dtype", "path", "example"}
_SIGNATURE = {*_INPUTS, "outputs", "action", "about"}
_KINDS = ("greedy", "categorical", "multi_categorical", "bernoulli", "gaussian", "squashed_gaussian", None)


def signature(data: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a `Signature` whose ports are dicts still; shapes and paths are tuples."""
    check.mapping(data, "it", *_INPUTS)
    _known(data, "it", _SIGNATURE)
    ports = {
        kind: [_port(port, f"{kind}[{i}]") for i, port in enumerate(check.sequence(data[kind], kind))]
        for kind in _INPUTS
    }
    every = [port for kind in _INPUTS for port in ports[kind]]
    if not ports["observations"] or len(every) > MOST_INPUTS:
        raise ValueError(f"it has {len(every)} inputs, expected an observation, and at most {MOST_INPUTS} in all")
    if len({port["name"] for port in every} | {"resets"}) <= len(every):
        raise ValueError("two of its inputs have one name")
    asked = sum(math.prod(port["shape"]) for port in every)
    if asked > MOST_NUMBERS:
        raise ValueError(f"its inputs ask for {asked} numbers per environment, expected at most {MOST_NUMBERS}")
    for port in every:
        _example(port)
    _nesting([port["path"] for port in ports["observations"]])
    if any(port["dtype"] != "bool" for port in ports["masks"]):
        raise ValueError("a mask is not bool")
    outputs = [_text(name, "outputs") for name in check.sequence(data.get("outputs", []), "outputs")]
    about = check.mapping(data.get("about", {}), "about")
    action = _action(data.get("action", {}))
    choices = sum(part["choices"] for part in action.get("parts", ()))
    if action["kind"] == "factored" and [port["shape"] for port in ports["masks"]] not in ([], [(choices,)]):
        raise ValueError(f"the parts of its action have {choices} choices, expected as many as its mask")
    return {**ports, "outputs": outputs, "action": action, "about": about}


def _known(data: dict[str, Any], where: str, names: set[str]) -> None:
    unknown = sorted(str(name) for name in set(data) - names)
    if unknown:
        raise ValueError(f"{where} has the unknown part {unknown[0]!r:.40}")


def _port(data: Any, where: str) -> dict[str, Any]:
    check.mapping(data, where, "name", "shape", "dtype", "path")
    _known(data, where, _PORT)
    shape = [check.integer(size, f"{where}.shape", 0) for size in check.sequence(data["shape"], f"{where}.shape")]
    path = _path(data["path"], f"{where}.path")
    if len(shape) > 32:  # numpy's limit
        raise ValueError(f"{where}.shape has {len(shape)} entries, expected at most 32")
    return {"name": _text(data["name"], f"{where}.name"), "shape": tuple(shape), "path": path,
            "dtype": _dtype(data["dtype"], f"{where}.dtype"), "example": data.get("example")}  # fmt: skip


def _path(value: Any, where: str) -> tuple[Any, ...]:
    path = check.sequence(value, where)
    for key in path:
        if isinstance(key, bool) or not isinstance(key, (str, int)):
            raise ValueError(f"{where} holds a {type(key).__name__}, expected strings and integers")
    return tuple(path)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{where} is {value!r:.40}, expected a string")
    return value


def _dtype(value: Any, where: str) -> str:
    if not isinstance(value, str) or value not in DTYPES:
        raise ValueError(f"{where} is {value!r:.40}, expected one of {', '.join(DTYPES)}")
    return value


def _nesting(paths: list[tuple[Any, ...]]) -> None:
    """No part of an observation, or of an action, is inside another one."""
    for i, path in enumerate(paths):
        if any(other[: len(path)] == path for j, other in enumerate(paths) if j != i):
            raise ValueError(f"two of its parts are at {list(path)!r:.40}")


def _example(port: dict[str, Any]) -> None:
    """None, or numbers in the port's shape."""
    if port["example"] is None:
        return
    found = _array(port["example"], f"the example of {port['name']}")
    if found.shape != port["shape"] or np.isnan(found).any():  # a running maximum starts at -infinity
        raise ValueError(f"the example of {port['name']} has shape {found.shape}, expected {port['shape']} numbers")


def _array(value: Any, where: str) -> np.ndarray[Any, Any]:
    """Nested lists of numbers; None is NaN."""
    flat = [value]
    while any(isinstance(part, list) for part in flat):
        flat = [inner for part in flat for inner in (part if isinstance(part, list) else [part])]
    for number in flat:
        if number is not None and not isinstance(number, bool):
            check.number(number, where)
    return np.array(value, dtype=np.float64)


def _action(data: Any) -> dict[str, Any]:
    kind = check.mapping(data, "action", "kind")["kind"]
    if kind == "factored":
        return {"kind": kind, "parts": _parts(check.mapping(data, "action", "parts")["parts"])}
    if kind not in _KINDS:
        raise ValueError(f"action.kind is {kind!r:.40}, expected one of {', '.join(map(str, _KINDS))}")
    if "dtype" in data:
        _dtype(data["dtype"], "action.dtype")
    if "low" in data or "high" in data:
        check.mapping(data, "action", "low", "high", "dtype")
        low, high = (_array(data[name], f"action.{name}") for name in ("low", "high"))
        if low.shape != high.shape or bool((low > high).any()):
            raise ValueError("action: a lower bound is above its upper bound, or their shapes differ")
    if "start" in data or kind in ("greedy", "categorical"):
        check.integer(check.mapping(data, "action", "start")["start"], "action.start", -(2**53))
    if kind == "multi_categorical":
        _heads(check.mapping(data, "action", "nvec", "parents"))
    if kind == "squashed_gaussian":
        check.mapping(data, "action", "center", "half_range")
        sizes = [_array(data[name], f"action.{name}").shape for name in ("center", "half_range")]
        if sizes[0] != sizes[1] or len(sizes[0]) != 1:
            raise ValueError(
                f"action.center and action.half_range have shapes {sizes[0]} and {sizes[1]}, expected one list each"
            )
    if kind is None:
        _text(data.get("name"), "action.name")
    return dict(data)


def _parts(data: Any) -> list[dict[str, Any]]:
    parts = []
    for i, part in enumerate(check.sequence(data, "action.parts")):
        where = f"action.parts[{i}]"
        check.mapping(part, where, "path", "suffix", "choices")
        if not isinstance(part["suffix"], str):
            raise ValueError(f"{where}.suffix is {part['suffix']!r:.40}, expected a string")
        path = _path(part["path"], f"{where}.path")
        choices = check.integer(part["choices"], f"{where}.choices", 0, MOST_NUMBERS)
        parts.append({**_action(part), "path": path, "choices": choices})
        if part["kind"] == "factored" or not path:
            raise ValueError(f"{where} is not a part: its kind is {part['kind']!r:.40}, at {list(path)!r:.40}")
    if not parts:
        raise ValueError("action.parts is empty")
    _nesting([part["path"] for part in parts])
    return parts


def _heads(data: dict[str, Any]) -> None:
    nvec = [check.integer(n, "action.nvec", 1, MOST_NUMBERS) for n in check.sequence(data["nvec"], "action.nvec")]
    if not nvec or sum(nvec) > MOST_NUMBERS:
        raise ValueError(f"action.nvec has {sum(nvec)} choices, expected 1 to {MOST_NUMBERS}")
    for pair in check.sequence(data["parents"], "action.parents"):
        head, parent = check.sequence(pair, "action.parents", 2)
        check.integer(head, "action.parents", 1, len(nvec) - 1)
        check.integer(parent, "action.parents", 0, head - 1)
