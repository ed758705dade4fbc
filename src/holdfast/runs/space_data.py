"""gymnasium spaces as plain data and back, so that a checkpoint can say what a policy was made for."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces


def to_data(space: spaces.Space[Any]) -> dict[str, Any]:
    """Numbers, strings, tensors, lists and dicts only."""
    if isinstance(space, spaces.Box):
        low, high = (torch.as_tensor(np.array(bound)) for bound in (space.low, space.high))
        return {"kind": "Box", "low": low, "high": high, "dtype": str(space.dtype)}
    if isinstance(space, spaces.Discrete):
        return {"kind": "Discrete", "n": int(space.n), "start": int(space.start)}
    if isinstance(space, spaces.MultiDiscrete):
        return {"kind": "MultiDiscrete", "nvec": space.nvec.tolist(), "start": space.start.tolist()}
    if isinstance(space, spaces.MultiBinary):
        return {"kind": "MultiBinary", "n": space.n if isinstance(space.n, int) else list(space.shape)}
    if isinstance(space, spaces.Dict):
        return {"kind": "Dict", "parts": {key: to_data(part) for key, part in space.items()}}
    if isinstance(space, spaces.Tuple):
        return {"kind": "Tuple", "parts": [to_data(part) for part in space]}
    raise TypeError(f"the space {space} cannot be saved")


def from_data(data: dict[str, Any]) -> spaces.Space[Any]:
    kind = data["kind"]
    if kind == "Box":
        dtype = np.dtype(data["dtype"])
        return spaces.Box(data["low"].numpy().astype(dtype), data["high"].numpy().astype(dtype), dtype=dtype.type)
    if kind == "Discrete":
        return spaces.Discrete(data["n"], start=data["start"])
    if kind == "MultiDiscrete":
        return spaces.MultiDiscrete(data["nvec"], start=data["start"])
    if kind == "MultiBinary":
        return spaces.MultiBinary(data["n"])
    if kind == "Dict":
        # Pairs keep their order; gymnasium sorts the keys of a plain dict. Encoders follow the order.
        return spaces.Dict([(key, from_data(part)) for key, part in data["parts"].items()])
    if kind == "Tuple":
        return spaces.Tuple([from_data(part) for part in data["parts"]])
    raise ValueError(f"unknown space kind {kind!r}")


def require_fit(trained: Any, now: spaces.Space[Any], name: str) -> None:
    """Raise ValueError if the environment's space is not one that a policy was made for. Unknown if `trained` is no space."""
    if isinstance(trained, spaces.Space) and not _fits(trained, now, same_bounds=name == "action_space"):
        text = f"the environment's {name} is {now}, and the policy was made for {trained}"
        raise ValueError(" ".join(text.split()) + _inputs_hint(trained, now))


def _inputs_hint(trained: spaces.Space[Any], now: spaces.Space[Any]) -> str:
    """What to pass if all that differs is what is fed back to the policy."""
    fed_back = [
        key for key in ("prev_action", "prev_reward") if isinstance(trained, spaces.Dict) and key in trained.spaces
    ]
    if not fed_back or (isinstance(now, spaces.Dict) and all(key in now.spaces for key in fed_back)):
        return ""
    return f"; pass inputs={('obs', *fed_back)}"


def _fits(trained: spaces.Space[Any], now: spaces.Space[Any], same_bounds: bool = False) -> bool:
    """The dtype of a Box may differ, and a Dict may have more keys. same_bounds: of actions, because they are in units of a Box's
    bounds, and a Dict has no more keys."""
    if isinstance(trained, spaces.Box):
        if not isinstance(now, spaces.Box) or trained.shape != now.shape:
            return False
        pairs = ((trained.low, now.low), (trained.high, now.high))
        return not same_bounds or all(np.allclose(was, is_now) for was, is_now in pairs)
    if isinstance(trained, spaces.Dict):
        if not isinstance(now, spaces.Dict) or (same_bounds and len(now) != len(trained)):
            return False
        return all(k in now.spaces and _fits(part, now[k], same_bounds) for k, part in trained.items())
    if isinstance(trained, spaces.Tuple):
        if not isinstance(now, spaces.Tuple) or len(trained) != len(now):
            return False
        return all(_fits(part, inner, same_bounds) for part, inner in zip(trained, now))
    return trained == now
