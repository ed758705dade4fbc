"""Checks of plain data that came from a file: each raises a ValueError that names the place and what was expected."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def mapping(value: Any, where: str, *keys: str) -> dict[Any, Any]:
    """A dict that has these keys."""
    if not isinstance(value, dict):
        raise ValueError(f"{where} is a {type(value).__name__}, expected a dict")
    missing = [key for key in keys if key not in value]
    if missing:
        raise ValueError(f"{where} has no {', '.join(missing)}")
    return value


def sequence(value: Any, where: str, length: int | None = None) -> list[Any]:
    """A list, of this length if given."""
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{where} is a {type(value).__name__}, expected a list")
    if length is not None and len(value) != length:
        raise ValueError(f"{where} has {len(value)} entries, expected {length}")
    return list(value)


def tensor(value: Any, where: str, shape: tuple[int, ...] | torch.Size, *dtypes: torch.dtype) -> Tensor:
    """A tensor of this shape, and of one of these dtypes if any are given."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{where} is a {type(value).__name__}, expected a tensor")
    if tuple(value.shape) != tuple(shape) or (dtypes and value.dtype not in dtypes):
        expected = f"{' or '.join(map(str, dtypes))} {list(shape)}".strip()
        raise ValueError(f"{where} is {value.dtype} {list(value.shape)}, expected {expected}")
    return value


def weight(value: Any, where: str, own: Tensor) -> Tensor:
    """A tensor that can replace `own`: of its shape and dtype, or float32 where float64 is kept since."""
    wider = (torch.float32,) if own.dtype == torch.float64 else ()
    return tensor(value, where, own.shape, own.dtype, *wider)


def number(value: Any, where: str, low: float = -math.inf, high: float = math.inf) -> float:
    """A number between the bounds, both included."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{where} is a {type(value).__name__}, expected a number")
    if not low <= value <= high:
        raise ValueError(f"{where} is {value!r:.40}, expected a number from {low:g} to {high:g}")
    return value


def integer(value: Any, where: str, low: int, high: int = 2**53) -> int:
    """An integer between the bounds, both included."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{where} is {value!r:.40}, expected an integer from {low} to {high}")
    return value


def flag(value: Any, where: str) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{where} is {value!r:.40}, expected True or False")
    return value


def generator_state(value: Any, where: str) -> None:
    """The state of one of torch's random generators on the CPU."""
    tensor(value, where, torch.default_generator.get_state().shape, torch.uint8)
    try:
        torch.Generator().set_state(value)
    except Exception as error:
        raise ValueError(f"{where} is not the state of a random generator") from error
