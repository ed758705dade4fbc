"""Reads shape, episode starts and environment ids from the TensorDict of a rollout or a training batch.

    batch dimensions [B] (rollout), [B, TT] or flat [B*TT], batch-major (training)
    dones | truncateds     this row's observation is the first of an episode
    training_env_ids       one id per row; or training_env_id_start, the start of a slice of length B

Nothing here reads a number from a device: shapes come from shapes, ids stay tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from holdfast import state as state_ops
from holdfast.checks import values_are_readable
from holdfast.cores.base import Core
from holdfast.memory import Memory
from holdfast.state import State

try:
    from tensordict import TensorDictBase
except ModuleNotFoundError as error:
    if error.name != "tensordict":
        raise
    raise ModuleNotFoundError(
        f"{error}; install it with: pip install 'holdfast[tensordict]'", name=error.name
    ) from error

OBSERVATION_KEYS = ("env_obs", "observation")


def observation(td: TensorDictBase, key: Any = None) -> Any:
    """The observation as a tensor or a nested dict of tensors, with the batch dimensions of `td`."""
    for candidate in (key,) if key is not None else OBSERVATION_KEYS:
        found = td.get(candidate, None)
        if found is not None:
            return _as_dict(found)
    wanted = repr(key) if key is not None else " or ".join(map(repr, OBSERVATION_KEYS))
    raise KeyError(
        f"the TensorDict has no {wanted} (it has {sorted(map(str, td.keys()))}); name the entry with obs_key="
    )


def _as_dict(entry: Any) -> Any:
    return {k: _as_dict(v) for k, v in entry.items()} if isinstance(entry, TensorDictBase) else entry


def rollout_batch(td: TensorDictBase) -> int:
    """B of a rollout step, whose batch dimensions are [B] or [B, 1]."""
    shape = tuple(td.batch_size)
    if len(shape) == 1 or (len(shape) == 2 and shape[1] == 1):
        return shape[0]
    raise ValueError(
        f"a rollout is one step per environment, batch dimensions [B]; this TensorDict has {list(shape)}. "
        "To evaluate a segment pass action= (and state=)"
    )


def training_shape(td: TensorDictBase, bptt: int | None, start: State) -> tuple[int, int]:
    """(B, TT) of a training batch, from its batch dimensions, `bptt`, or the rows of its start state."""
    shape = tuple(td.batch_size)
    if len(shape) == 2:
        if bptt is not None and bptt != shape[1]:
            raise ValueError(f"got bptt={bptt} with batch dimensions [B, TT] = {list(shape)}; leave bptt out")
        return shape
    if len(shape) != 1:
        raise ValueError(f"batch dimensions are {list(shape)}, expected [B, TT], or [B*TT] with bptt=TT")
    if bptt is None:
        rows = None if start is None else state_ops.batch_size(start)
        if rows is None:
            raise ValueError(
                f"a flat batch [{shape[0]}] does not say how long its segments are; pass bptt=TT, or shape it [B, TT]"
            )
        return rows, _whole(shape[0], rows, "rows of the start state")
    return _whole(shape[0], bptt, "bptt"), bptt


def _whole(total: int, part: int, what: str) -> int:
    if part < 1 or total % part:
        raise ValueError(f"a flat batch of {total} steps is not a multiple of {part} ({what})")
    return total // part


def resets(td: TensorDictBase, batch: int, steps: int) -> Tensor | None:
    """dones | truncateds as bool [TT, B]; a number other than 0 is True. None when both are missing."""
    flags = [_flag(td, name, batch, steps) for name in ("dones", "truncateds")]
    given = [flag for flag in flags if flag is not None]
    if not given:
        return None
    return given[0] if len(given) == 1 else given[0] | given[1]


def _flag(td: TensorDictBase, name: str, batch: int, steps: int) -> Tensor | None:
    flag = td.get(name, None)
    if flag is None:
        return None
    if flag.numel() != batch * steps:
        raise ValueError(f"{name!r} has shape {tuple(flag.shape)}, expected one flag per row: {batch} x {steps}")
    flag = flag if flag.dtype == torch.bool else flag != 0
    return flag.reshape(batch, steps).t()  # [TT, B]


def env_ids(td: TensorDictBase, batch: int) -> Tensor | None:
    """The ids of the B environments of a rollout step; None (0..B-1) when the TensorDict names none."""
    ids = td.get("training_env_ids", None)
    if ids is not None:
        ids = torch.as_tensor(ids).reshape(-1)
        if ids.shape[0] != batch:
            raise ValueError(f"got {ids.shape[0]} training_env_ids for {batch} rows; pass one id per environment")
        return ids
    start = td.get("training_env_id_start", None)
    if start is None:
        return None
    start = torch.as_tensor(start)
    return start.reshape(-1)[:1].long() + torch.arange(batch, device=start.device)


def write_shape(td: TensorDictBase, batch: int, steps: int, device: torch.device) -> None:
    """Set `bptt` and `batch`, one integer per row, where they are missing."""
    for name, number in (("bptt", steps), ("batch", batch)):
        if td.get(name, None) is None:
            td.set(name, torch.full(tuple(td.batch_size), number, dtype=torch.long, device=device))


def start_of_segment(core: Core, state: State, resets: Tensor | None, batch: int) -> State:
    """The state a training segment starts from; without one every row must begin with a reset."""
    if state is not None:
        return state
    if resets is None or (values_are_readable(resets) and not bool(resets[0].all())):
        raise ValueError(
            "state is None, but the first step of the segment is not the start of an episode in every row; "
            "keep start_state(td) from before the rollout and pass it as state="
        )
    return core.initial_state(batch)


def snapshot(memory: Memory, td: TensorDictBase) -> State:
    """What the environments of `td` remember now."""
    batch = rollout_batch(td)
    ids = env_ids(td, batch)
    memory.take(batch, ids)  # refuses what a step would refuse
    return memory.read(range(batch) if ids is None else ids)
