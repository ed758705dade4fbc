"""Checks of what callers pass in, and the debug switch.

Structure (type, dtype, rank, shape, device) is always checked and always raises. Values are checked where that costs
nothing: on the host and outside a compiler, or anywhere after `hf.debug(True)`. Nothing here changes what it checks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor

_debug = False
_env_ids: Tensor | None = None  # of the rows now in a core, while debugging; None: the rows are numbered


def debug(enabled: bool = True) -> None:
    """Check values everywhere (also on a GPU, where it waits for the device) and trace NaN to environment and step."""
    global _debug
    _debug = bool(enabled)


def is_debug() -> bool:
    return _debug and not torch.compiler.is_compiling()


def values_are_readable(tensor: Tensor) -> bool:
    """Whether the numbers in `tensor` may be read: it is on the host, or the user asked for debugging."""
    if torch.compiler.is_compiling() or not (_debug or tensor.device.type == "cpu"):
        return False
    return not (is_rewritten() or is_without_numbers(tensor))


def is_rewritten() -> bool:
    """Whether torch makes something else of operations than their results: torch.func, torch.jit.trace, an export to ONNX."""
    if torch.compiler.is_compiling():
        return torch.compiler.is_exporting() and torch.onnx.is_in_onnx_export()
    return torch._C._are_functorch_transforms_active() or torch._C._is_tracing()


def is_without_numbers(tensor: Tensor) -> bool:
    """Whether there may be nothing behind a tensor's address: on the meta device, fake tensors, under any mode of dispatch."""
    if torch.compiler.is_compiling():
        return False
    keys = torch._C._dispatch_keys(tensor)
    return tensor.is_meta or torch._C._len_torch_dispatch_stack() > 0 or keys.has(torch._C.DispatchKey.Python)


def check_resets(resets: Any, shape: tuple[int, ...], device: torch.device) -> None:
    """`resets` is a bool tensor of exactly `shape`."""
    if not isinstance(resets, Tensor):
        raise TypeError(
            f"resets is a {type(resets).__name__}, expected a bool tensor of shape {shape}; "
            "use torch.as_tensor(flags, dtype=torch.bool)"
        )
    if resets.dtype != torch.bool:
        raise TypeError(f"resets has dtype {resets.dtype}, expected torch.bool; use flags.bool()")
    if tuple(resets.shape) != tuple(shape):
        raise ValueError(
            f"resets has shape {tuple(resets.shape)}, expected {tuple(shape)}: one flag per step and environment, "
            "True where the observation is the first of an episode"
        )
    if resets.device != device:
        raise ValueError(
            f"resets is on {resets.device}, the input on {device}; move it with resets.to({str(device)!r})"
        )


def rows(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`x` if it is [N, *shape]; time is never silently reshaped into environments."""
    if tuple(x.shape[1:]) != tuple(shape) or x.dim() == 0:
        raise ValueError(
            f"got observations of shape {tuple(x.shape)}, expected {('N', *shape)}: one row per environment in act, "
            "[T, B, ...] in evaluate"
        )
    return x


def whole_numbers(x: Tensor, what: str) -> Tensor:
    """`x` as int64. Floats must be whole numbers; that is checked where values may be read."""
    if not x.is_floating_point():
        return x.long()
    index = x.round()
    if values_are_readable(x) and not bool((index == x).all()):
        found = x[index != x][0].item()
        raise ValueError(f"{what} hold {found:g}, expected whole numbers; convert them where they are made")
    return index.long()


def outside_discrete(low: Any, high: Any, starts: Iterable[int], counts: Iterable[int]) -> ValueError:
    """The error for discrete observations of which one is outside its space. low, high: the smallest and largest that came."""
    allowed = ", ".join(f"{start} to {start + n - 1}" for start, n in dict.fromkeys(zip(starts, counts)))
    return ValueError(
        f"a discrete observation is outside its space: got {low} to {high}, observation_space allows {allowed}"
    )


def is_text(space: Any) -> bool:
    """Whether this is a space of texts: Text, or MiniGrid's of missions."""
    return space.dtype is not None and space.dtype.kind in "US"


def refuse_text(space: Any) -> None:
    """Raise ValueError if a part of an observation space is not made of numbers in a fixed shape."""
    from gymnasium import spaces  # imported where it is used

    for part in (
        (*space.values(),) if isinstance(space, spaces.Dict) else space if isinstance(space, spaces.Tuple) else ()
    ):
        refuse_text(part)
    if is_text(space) or isinstance(space, (spaces.Sequence, spaces.Graph, spaces.OneOf)):
        raise ValueError(
            f"observations of {type(space).__name__} cannot be stored as tensors: wrap the environment, keep the other keys with "
            "gymnasium.wrappers.FilterObservation(env, [...]) or make numbers of it with gymnasium.wrappers.TransformObservation"
        )


def check_discrete(obs: Any, space: Any) -> None:
    """Raise ValueError if a Discrete or MultiDiscrete part of observations on the host is not in `space`; any leading dimensions.

    For observations on their way to a GPU, where such a number stops the whole process. In a list or an array of objects each
    entry is an observation, or None.
    """
    from gymnasium import spaces  # imported where it is used

    if isinstance(obs, list) or (isinstance(obs, np.ndarray) and obs.dtype == object):
        for entry in obs:
            if entry is not None:
                check_discrete(entry, space)
    elif isinstance(space, spaces.Dict):
        for key in space if isinstance(obs, dict) else ():
            if key in obs:
                check_discrete(obs[key], space[key])
    elif isinstance(space, spaces.Tuple):
        for part, part_space in zip(obs, space) if isinstance(obs, tuple) else ():
            check_discrete(part, part_space)
    elif isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)) and not _is_on_device(obs):
        _check_discrete_numbers(np.asarray(obs), space)


def _is_on_device(x: Any) -> bool:
    return isinstance(x, Tensor) and x.device.type != "cpu"


def _check_discrete_numbers(x: Any, space: Any) -> None:
    if x.dtype.kind not in "biuf" or not x.size:
        return  # no numbers: the code that makes tensors of them says so
    if x.dtype.kind == "f":
        whole_numbers(torch.as_tensor(x), "discrete observations")
    counts = np.asarray(space.nvec if hasattr(space, "nvec") else space.n)
    if ((x < space.start) | (x >= space.start + counts)).any():
        starts = np.broadcast_to(space.start, counts.shape).ravel().tolist()
        raise outside_discrete(x.min(), x.max(), starts, counts.ravel().tolist())


# --- environment ids --------------------------------------------------------------------------------------------------

OTHER_KEYS = "; hf.Runner takes any hashable key"


def as_env_ids(env_ids: Any, end: int) -> Tensor:
    """Environment ids [B] as a checked LongTensor. `end` ends a slice without an end."""
    ids = _ids_tensor(env_ids, end)
    if ids.dtype not in (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8):
        hint = "; a mask is not a list of ids: use mask.nonzero().squeeze(1)" if ids.dtype == torch.bool else OTHER_KEYS
        raise TypeError(f"env_ids have dtype {ids.dtype}, expected integers{hint}")
    if ids.dim() != 1:
        raise ValueError(f"env_ids have shape {tuple(ids.shape)}, expected one dimension [B]")
    ids = ids.long()
    if values_are_readable(ids) and len(ids):
        _check_id_values(ids)
    return ids


def _ids_tensor(env_ids: Any, end: int) -> Tensor:
    if isinstance(env_ids, Tensor):
        return env_ids
    if isinstance(env_ids, slice):
        stop = env_ids.stop if env_ids.stop is not None else end
        env_ids = range(env_ids.start or 0, stop, env_ids.step or 1)
    if isinstance(env_ids, range):
        return torch.arange(env_ids.start, env_ids.stop, env_ids.step)
    if isinstance(env_ids, Integral) and not isinstance(env_ids, bool):
        return torch.tensor([int(env_ids)])
    try:
        ids = torch.as_tensor(env_ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"env_ids are {env_ids!r}, expected integers: a list, slice, range or tensor{OTHER_KEYS}"
        ) from error
    return ids.long() if ids.numel() == 0 else ids


def _check_id_values(ids: Tensor) -> None:
    low = int(ids.min())
    if low < 0:
        raise ValueError(f"env_ids hold the negative id {low}")
    seen, counts = ids.unique(return_counts=True)
    if len(seen) != len(ids):
        raise ValueError(f"env_ids hold {seen[counts > 1].tolist()} more than once; one row per environment")


# --- finding NaN ------------------------------------------------------------------------------------------------------


@contextmanager
def rows_are(env_ids: Tensor | None) -> Iterator[None]:
    """Inside, `locate_nonfinite` names environments by these ids. Debug mode only."""
    global _env_ids
    before, _env_ids = _env_ids, env_ids
    try:
        yield
    finally:
        _env_ids = before


def locate_nonfinite(y: Tensor, x: Tensor) -> None:
    """Raise if `y` [T, B, O] or [B, O] holds NaN or Inf, naming the first step and environment. Debug mode only."""
    bad = ~torch.isfinite(y.detach()).flatten(start_dim=y.dim() - 1).all(-1)  # [T, B] or [B]
    if not bool(bad.any()):
        return
    where = bad.nonzero()[0].tolist()
    row = where[-1]
    env = row if _env_ids is None else int(_env_ids[row])
    step = f"step t={where[0]}, " if len(where) == 2 else ""
    x_bad = not bool(torch.isfinite(x.detach()[tuple(where)]).all())
    source = (
        "its input is already non-finite there" if x_bad else "its input there is finite: look at state and weights"
    )
    raise FloatingPointError(
        f"non-finite core output at {step}environment {env} (first of {int(bad.sum())} bad row{'s' * (int(bad.sum()) != 1)}); {source}"
    )
