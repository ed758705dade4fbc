"""All random streams of the process as plain data, so that a checkpoint can hold them, and back."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from holdfast import plain_checks as checks


def capture(device: torch.device) -> dict[str, Any]:
    """torch's (and that of `device`, if a GPU), numpy's and Python's: tensors, numbers, strings, lists and dicts."""
    return {
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state(device)] if device.type == "cuda" else [],
        "numpy": _plain(np.random.get_state(legacy=False)),
        "python": _plain(random.getstate()),
    }


def restore(saved: dict[str, Any], device: torch.device) -> None:
    """Continue from where `capture` was called."""
    random.setstate(_tuples(saved["python"]))
    np.random.set_state(_numpy_state(saved["numpy"]))
    torch.set_rng_state(saved["torch"])
    if device.type == "cuda" and saved["cuda"]:
        torch.cuda.set_rng_state(saved["cuda"][0], device)


def check(saved: Any, where: str) -> None:
    """ValueError unless `restore` can take this. numpy trusts its state: a position beyond the end is read in C."""
    checks.mapping(saved, where, "torch", "cuda", "numpy", "python")
    checks.generator_state(saved["torch"], f"{where}: torch's")
    checks.sequence(saved["cuda"], f"{where}: cuda's")
    state = checks.mapping(saved["numpy"], f"{where}: numpy's", "bit_generator", "state", "has_gauss", "gauss")
    if state["bit_generator"] != "MT19937":
        raise ValueError(f"{where}: numpy's is of another kind, expected MT19937")
    inner = checks.mapping(state["state"], f"{where}: numpy's", "key", "pos")
    checks.integer(inner["pos"], f"{where}: numpy's position", 0, 624)
    for word in checks.sequence(inner["key"], f"{where}: numpy's key", 624):
        checks.integer(word, f"{where}: numpy's key", 0, 2**32 - 1)
    checks.integer(state["has_gauss"], f"{where}: numpy's has_gauss", 0, 1)
    checks.number(state["gauss"], f"{where}: numpy's gauss")
    try:
        random.Random().setstate(_tuples(saved["python"]))
    except Exception as error:
        raise ValueError(f"{where}: Python's cannot be used ({error})") from error


def seed(number: int, device: torch.device | None = None) -> None:
    """Seed all random generators; of the GPUs only `device`, if given.

    torch.manual_seed formats a stack trace per idle device, 0.3 ms: with a device it is not called.
    """
    random.seed(number)
    np.random.seed(number % 2**32)
    if device is None:
        torch.manual_seed(number)
        return
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed(number)


def _plain(value: Any) -> Any:
    """Tuples and arrays to lists, numpy's numbers to Python's."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value


def _numpy_state(state: dict[str, Any]) -> dict[str, Any]:
    inner = dict(state["state"])
    inner["key"] = np.array(inner["key"], dtype=np.uint32)
    return {**state, "state": inner}
