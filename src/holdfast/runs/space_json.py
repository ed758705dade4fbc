"""gymnasium spaces as JSON and back, for policies that are shared. Checkpoints use `space_data.py`, which has tensors.

Bounds of a Box are one number if they are all the same, otherwise a list of all of them; infinity is "inf" or "-inf". Parts of
a Dict are pairs of key and space, because their order matters and a JSON object has none.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from holdfast import plain_checks
from holdfast.runs import space_data

MOST_NUMBERS = 2**24  # in a space with all its parts: a short text can ask for any amount of memory
_DTYPES = {name: np.dtype(name) for name in (
    "bool", "uint8", "uint16", "uint32", "int8", "int16", "int32", "int64", "float16", "float32", "float64",
)}  # fmt: skip


def to_json(space: spaces.Space[Any]) -> dict[str, Any]:
    """Numbers, strings, lists and dicts only."""
    return _packed(space_data.to_data(space))


def from_json(data: Any, where: str = "space") -> spaces.Space[Any]:
    """The inverse of `to_json`. A ValueError if this is not a space."""
    asked = _numbers_asked_for(data)
    if asked > MOST_NUMBERS:
        raise ValueError(f"{where} asks for {asked} numbers in all, expected at most {MOST_NUMBERS}")
    return space_data.from_data(_unpacked(data, where))


def _packed(data: dict[str, Any]) -> dict[str, Any]:
    if data["kind"] == "Box":
        if data["dtype"] not in _DTYPES:
            raise TypeError(f"a Box of {data['dtype']} cannot be saved")
        bounds = {name: _bound_to_json(data[name]) for name in ("low", "high")}
        return {"kind": "Box", "shape": list(data["low"].shape), "dtype": data["dtype"], **bounds}
    if data["kind"] == "Dict":
        return {"kind": "Dict", "parts": [[key, _packed(part)] for key, part in data["parts"].items()]}
    if data["kind"] == "Tuple":
        return {"kind": "Tuple", "parts": [_packed(part) for part in data["parts"]]}
    return data


def _bound_to_json(bound: torch.Tensor) -> Any:
    numbers = [n if math.isfinite(n) else str(float(n)) for n in bound.flatten().tolist()]
    return numbers[0] if numbers and len(set(numbers)) == 1 else numbers


def _numbers_asked_for(data: Any) -> int:
    """By all parts together, before any of them is made. What is not a shape counts as 0: `_unpacked` refuses it."""
    if isinstance(data, list):
        return sum(map(_numbers_asked_for, data))
    if not isinstance(data, dict):
        return 0
    own = (
        data.get("shape") if data.get("kind") == "Box" else data.get("n") if data.get("kind") == "MultiBinary" else None
    )
    sizes = own if isinstance(own, list) else [own]
    count = math.prod(sizes) if all(isinstance(size, int) for size in sizes) else 0
    return max(0, count) + sum(map(_numbers_asked_for, data.values()))


def _unpacked(data: Any, where: str) -> dict[str, Any]:
    kind = plain_checks.mapping(data, where, "kind")["kind"]
    if kind == "Box":
        return _box(plain_checks.mapping(data, where, "shape", "dtype", "low", "high"), where)
    if kind == "Discrete":
        plain_checks.mapping(data, where, "n", "start")
        start = plain_checks.integer(data["start"], f"{where}.start", -(2**53))
        return {"kind": kind, "n": plain_checks.integer(data["n"], f"{where}.n", 1), "start": start}
    if kind == "MultiDiscrete":
        plain_checks.mapping(data, where, "nvec", "start")
        return {"kind": kind, "nvec": _integers(data["nvec"], f"{where}.nvec", 1),
                "start": _integers(data["start"], f"{where}.start", -(2**53))}  # fmt: skip
    if kind == "MultiBinary":
        n = plain_checks.mapping(data, where, "n")["n"]
        return {"kind": kind, "n": _shape(n, f"{where}.n") if isinstance(n, list) else _shape([n], f"{where}.n")[0]}
    if kind == "Dict":
        listed = plain_checks.sequence(plain_checks.mapping(data, where, "parts")["parts"], f"{where}.parts")
        return {"kind": kind, "parts": dict(_named_part(pair, f"{where}.parts[{i}]") for i, pair in enumerate(listed))}
    if kind == "Tuple":
        listed = plain_checks.sequence(plain_checks.mapping(data, where, "parts")["parts"], f"{where}.parts")
        return {"kind": kind, "parts": [_unpacked(part, f"{where}[{i}]") for i, part in enumerate(listed)]}
    raise ValueError(f"{where} is of the unknown kind {kind!r:.40}")


def _named_part(pair: Any, where: str) -> tuple[str, dict[str, Any]]:
    key, part = plain_checks.sequence(pair, where, 2)
    if not isinstance(key, str):
        raise ValueError(f"{where}: the key is {key!r:.40}, expected text")
    return key, _unpacked(part, where)


def _box(data: dict[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(data["dtype"], str) or data["dtype"] not in _DTYPES:
        raise ValueError(f"{where}.dtype is {data['dtype']!r:.40}, expected one of {', '.join(_DTYPES)}")
    shape, dtype = _shape(data["shape"], f"{where}.shape"), _DTYPES[data["dtype"]]
    bounds = {name: _bound(data[name], f"{where}.{name}", shape, dtype) for name in ("low", "high")}
    if bool((bounds["low"] > bounds["high"]).any()):
        raise ValueError(f"{where}: a lower bound is above its upper bound")
    return {"kind": "Box", "dtype": data["dtype"], **{name: torch.as_tensor(bound) for name, bound in bounds.items()}}


def _bound(value: Any, where: str, shape: list[int], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """An array: torch cannot compare all dtypes."""
    size = math.prod(shape)
    listed = plain_checks.sequence(value, where, size) if isinstance(value, list) else [value]
    numbers = np.array([_number(number, where, dtype) for number in listed], dtype)
    return np.broadcast_to(numbers, size).reshape(shape).copy()


def _number(value: Any, where: str, dtype: np.dtype[Any]) -> Any:
    if dtype.kind == "b":
        return plain_checks.flag(value, where)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return plain_checks.integer(value, where, int(limits.min), int(limits.max))
    if value in ("inf", "-inf"):
        return float(value)
    return plain_checks.number(value, where, float(np.finfo(dtype).min), float(np.finfo(dtype).max))


def _integers(value: Any, where: str, low: int) -> list[Any]:
    """Integers, in lists of any depth (a MultiDiscrete may have several dimensions)."""
    listed = plain_checks.sequence(value, where)
    return [
        _integers(inner, where, low) if isinstance(inner, list) else plain_checks.integer(inner, where, low)
        for inner in listed
    ]


def _shape(value: Any, where: str) -> list[int]:
    shape = [plain_checks.integer(size, where, 0) for size in plain_checks.sequence(value, where)]
    if math.prod(shape) > MOST_NUMBERS:
        raise ValueError(f"{where} asks for {math.prod(shape)} numbers, expected at most {MOST_NUMBERS}")
    return shape
