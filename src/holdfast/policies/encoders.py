"""Observation encoders for `hf.ActorCritic`: any gymnasium space to flat features [N, size]. Nothing here remembers.

Images and grids are in `images.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch import Tensor, nn

from holdfast.checks import is_text, outside_discrete, refuse_text, rows, values_are_readable, whole_numbers
from holdfast.config.settings import given
from holdfast.named_objects import is_import_name
from holdfast.policies import images
from holdfast.policies.images import Grid, Image

if TYPE_CHECKING:
    from holdfast.distributed.ranks import Ranks


ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "silu": nn.SiLU, "gelu": nn.GELU}


def orthogonal(layer: nn.Module, gain: float) -> nn.Module:
    nn.init.orthogonal_(layer.weight, gain)  # type: ignore[arg-type]
    nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return layer


def mlp(size: int, hidden: Sequence[int], activation: str = "tanh") -> tuple[nn.Sequential, int]:
    """Linear layers with an activation after each, and the size of the result. Identity when `hidden` is empty."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}; one of {', '.join(ACTIVATIONS)}")
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [orthogonal(nn.Linear(size, width), 2**0.5), ACTIVATIONS[activation]()]
        size = width
    return nn.Sequential(*layers), size


class Vector(nn.Module):
    """A numeric Box, flattened; optionally normalized by running statistics that only `update` changes.

    Statistics are float64, so numbers from 1e-30 to 1e30 have a variance; what `forward` reads is made from them.
    """

    mean: Tensor  # [size]
    var: Tensor  # [size]
    count: Tensor  # observations seen
    shift: Tensor  # [size], of the module's dtype: (x - shift) * scale is normalized
    scale: Tensor

    def __init__(self, space: spaces.Box, normalize: bool) -> None:
        super().__init__()
        self.shape = space.shape
        self.size = int(np.prod(space.shape)) if space.shape else 1
        self.normalize = normalize
        if normalize:
            self.register_buffer("mean", torch.zeros(self.size, dtype=torch.float64))
            self.register_buffer("var", torch.ones(self.size, dtype=torch.float64))
            self.register_buffer("count", torch.zeros((), dtype=torch.float64))
            self.register_buffer("shift", torch.zeros(self.size), persistent=False)
            self.register_buffer("scale", torch.ones(self.size), persistent=False)

    def __str__(self) -> str:
        return f"vector of {self.size:,} numbers" if len(self.shape) > 1 else ""

    def forward(self, x: Tensor) -> Tensor:
        x = rows(x, self.shape).reshape(x.shape[0], self.size)
        if not self.normalize:
            return x
        x = x.to(self.shift.dtype) if x.dtype == torch.bool else x  # numbers are converted in the difference
        return ((x - self.shift) * self.scale).clamp(-10.0, 10.0)

    @torch.no_grad()
    def update(self, x: Tensor, ranks: Ranks | None = None) -> None:
        """Add [N, ...] observations, those of all `ranks`, to the statistics."""
        x = x.reshape(-1, self.size).double()
        if ranks is not None and ranks.joined:
            self.merge(*ranks.moments(x))
            return
        if len(x) == 0:  # every step of the rollout was a dummy step
            return
        count = x.new_full((), float(len(x)))  # torch.tensor would wait for the GPU
        self.merge(x.mean(0), x.var(0, unbiased=False), count)

    @torch.no_grad()
    def merge(self, mean: Tensor, var: Tensor, n: Tensor) -> None:
        """Add the statistics of `n` observations (parallel variance formula); ignored if not finite."""
        n = torch.where((mean.isfinite() & var.isfinite()).all(), n, 0.0)
        mean, var = (torch.nan_to_num(part, 0.0, 0.0, 0.0) for part in (mean, var))
        total = self.count + n
        share = n / total.clamp(min=1e-4)  # 1 for the first observations: mean 0 and variance 1 were a guess
        delta = mean - self.mean.double()
        # In place: a captured CUDA graph reads these addresses.
        self.var.copy_(self.var.double() * (1 - share) + var * share + delta**2 * share * (1 - share))
        self.mean.add_(delta * share)
        self.count.copy_(total)
        self._prepare()

    @torch.no_grad()
    def _prepare(self) -> None:
        """Float32 numbers that differ by less than _FLAT of their size are constant."""
        deviation = torch.maximum(self.var.double().sqrt(), _FLAT * self.mean.double().abs())
        self.shift.copy_(self.mean)
        self.scale.copy_(1.0 / deviation.clamp(min=_SMALLEST))

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        super()._load_from_state_dict(*args, **options)
        if self.normalize:
            self._prepare()


_FLAT = 1e-6
_SMALLEST = 1e-36  # 1 / it is a float32


FAR = 4.0
"""Bounds whose middle is more than this times half their distance from 0 are far."""


def center_and_half_range(space: spaces.Box) -> tuple[Tensor, Tensor]:
    """The middle of each action's bounds and the distance to them; 0 and 1 where there are no bounds.

    In float64 where the bounds are far from 0 compared with their distance, and so are actions then: float32 has 16 numbers between
    1e6 and 1e6 + 1. What is computed from them is exact to float32 in units of the bounds.
    """
    low, high = (np.asarray(bound, np.float64).ravel() for bound in (space.low, space.high))
    bounded = np.isfinite(low) & np.isfinite(high) & (high > low)
    low, high = np.where(bounded, low, -1.0), np.where(bounded, high, 1.0)
    center, half_range = low / 2 + high / 2, high / 2 - low / 2
    dtype = torch.float64 if (np.abs(center) > FAR * half_range).any() else torch.float32
    return torch.as_tensor(center, dtype=dtype), torch.as_tensor(half_range, dtype=dtype)


class Bounded(nn.Module):
    """A Box with bounds, flattened, in units of them: -1 to 1."""

    center: Tensor  # [size]
    half_range: Tensor  # [size]

    def __init__(self, space: spaces.Box) -> None:
        super().__init__()
        self.shape = space.shape
        center, half_range = center_and_half_range(space)
        self.register_buffer("center", center, persistent=False)
        self.register_buffer("half_range", half_range, persistent=False)
        self.size = len(center)

    def forward(self, x: Tensor) -> Tensor:
        return (rows(x, self.shape).reshape(x.shape[0], self.size) - self.center) / self.half_range


class OneHot(nn.Module):
    """Discrete or MultiDiscrete as concatenated one-hot vectors."""

    head: Tensor  # [size] which number each column is about
    value: Tensor  # [size] the value that it stands for
    bounds: Tensor  # [2, numbers] the first value of each, and one past the last

    def __init__(self, nvec: Sequence[int], starts: Sequence[int], shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.shape = shape
        self.nvec, self.starts, self.size = list(nvec), list(starts), int(sum(nvec))
        self.equal = len(set(nvec)) == 1 and len(set(starts)) == 1
        head = [i for i, n in enumerate(nvec) for _ in range(n)]
        value = [start + j for start, n in zip(starts, nvec) for j in range(n)]
        self.register_buffer("head", torch.tensor(head, dtype=torch.int32), persistent=False)
        self.register_buffer("value", torch.tensor(value, dtype=torch.int32), persistent=False)
        bounds = [self.starts, [start + n for start, n in zip(starts, nvec)]]
        self.register_buffer("bounds", torch.tensor(bounds), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = whole_numbers(rows(x, self.shape).reshape(x.shape[0], len(self.nvec)), "discrete observations")
        if not self.equal:
            outside = (x < self.bounds[0]) | (x >= self.bounds[1])
            if values_are_readable(x) and bool(outside.any()):
                raise outside_discrete(x.min(), x.max(), self.starts, self.nvec)
            return (x[:, self.head] == self.value).long()
        try:  # one operation, also for a board of 104 cards
            return F.one_hot(x - self.starts[0], self.nvec[0]).flatten(1)
        except RuntimeError as error:  # torch has looked at the numbers, so a check beforehand would cost twice
            raise outside_discrete(x.min(), x.max(), self.starts, self.nvec) from error


class Composite(nn.Module):
    """Dict and Tuple spaces, nested: the encoded parts, concatenated."""

    def __init__(self, parts: dict[str, nn.Module], is_tuple: bool) -> None:
        super().__init__()
        # Keys may contain dots or be names that a ModuleDict refuses, so parts are numbered.
        self.is_tuple = is_tuple
        self.keys = [int(k) for k in parts] if is_tuple else list(parts)
        self.parts = nn.ModuleList(parts.values())
        self.size = sum(part.size for part in self.parts)  # type: ignore[misc]

    def forward(self, x: Any) -> Tensor:
        if isinstance(x, (list, tuple, Tensor)) and not self.is_tuple:
            fed_back = _FED_BACK & set(self.keys)
            hint = (
                f"; hf.Runner, and hf.collect with inputs={tuple(self.keys)}, fill in the previous action and reward"
                if fed_back
                else ""
            )
            raise TypeError(
                f"observations came as a {type(x).__name__}, expected a dict with {', '.join(map(repr, self.keys))}, each an "
                f"array or tensor with one row per environment{hint}"
            )
        missing = [key for key in self.keys if key not in x] if isinstance(x, dict) else []
        if missing:
            raise ValueError(
                f"the observation has no {', '.join(map(repr, missing))} (it has {', '.join(map(repr, x)) or 'nothing'}); if "
                "only the critic sees it, act with policy.actor_only()"
            )
        return torch.cat([part(x[key]) for key, part in zip(self.keys, self.parts)], -1)  # cat promotes to the widest


_FED_BACK = {"prev_action", "prev_reward"}


def part_of(space: spaces.Space[Any], keys: Sequence[str] | None, name: str) -> spaces.Space[Any]:
    """A Dict space with these keys only; None: the space itself. name: of the argument, for errors."""
    if keys is None:
        return space
    if isinstance(space, spaces.Dict) and _FED_BACK & set(space) and isinstance(space.spaces.get("obs"), spaces.Dict):
        return spaces.Dict({**space.spaces, "obs": part_of(space["obs"], keys, name)})  # both see what is fed back
    if isinstance(keys, str) or not keys:
        raise ValueError(f"{name} is {keys!r}, expected the keys of observations to see, e.g. {name}=('policy',)")
    if not isinstance(space, spaces.Dict):
        raise ValueError(f"{name} needs a Dict observation space, to choose from its keys, and this one is {space}")
    unknown = [key for key in keys if key not in space.spaces]
    if unknown:
        raise ValueError(
            f"{name} names {', '.join(map(repr, unknown))}, but the observation has {', '.join(map(repr, space))}"
        )
    return spaces.Dict({key: space[key] for key in space if key in keys})


def for_space(
    space: spaces.Space[Any], normalize: bool = False, encoder: Any = "auto", channels: str = "auto"
) -> nn.Module:
    """The encoder of a space; its `.size` is the number of features.

    encoder: of images and grids; "auto" follows the rules in docs/images.md. A name, a class or a function of the user's reads the
    parts that are images or grids by these rules, or, if there are none, all Boxes of two or more dimensions.
    """
    if encoder not in ("auto", "vector", images.AS_IN_0_2):
        _require_encoder(encoder)
        boxes = [box for _, box in leaf_spaces(space) if isinstance(box, spaces.Box) and len(box.shape) > 1]
        chosen = [box for box in boxes if images.may_be_image(box, channels)]
        if not boxes:
            raise ValueError(
                f"{given('encoder', encoder)} reads images and other Boxes of several dimensions, and the observation space is "
                f"{space}; leave it out"
            )
        return _for_space(space, normalize, lambda box: encoder if box in (chosen or boxes) else "vector", channels)
    return _for_space(space, normalize, lambda box: encoder, channels)


def _require_encoder(encoder: Any) -> None:
    known = ("auto", "vector", *images.NETWORKS, "grid")
    if not (callable(encoder) or encoder in known or (isinstance(encoder, str) and is_import_name(encoder))):
        raise ValueError(f"unknown encoder {encoder!r}; one of {', '.join(known)}, or my_module:MyEncoder")


def _for_space(space: spaces.Space[Any], normalize: bool, of: Callable[[spaces.Box], Any], channels: str) -> nn.Module:
    if isinstance(space, spaces.Box):
        return images.for_box(space, of(space), channels) or Vector(space, normalize)
    if isinstance(space, spaces.Discrete):
        return OneHot([int(space.n)], [int(space.start)])
    if isinstance(space, spaces.MultiDiscrete):
        return OneHot([int(n) for n in space.nvec.flatten()], [int(s) for s in space.start.flatten()], space.shape)
    if isinstance(space, spaces.MultiBinary):
        return Vector(spaces.Box(0, 1, space.shape), False)
    if isinstance(space, spaces.Dict) and (seen := without_text(space)).spaces:
        return Composite({k: _for_space(s, normalize, of, channels) for k, s in seen.items()}, is_tuple=False)
    if isinstance(space, spaces.Tuple):
        return Composite({str(i): _for_space(s, normalize, of, channels) for i, s in enumerate(space)}, is_tuple=True)
    refuse_text(space)
    raise ValueError(
        f"no encoder for the observation space {space}; subclass hf.RecurrentPolicy and write encode(self, obs) for it"
    )


def without_text(space: Any) -> Any:
    """The space without the Text parts of a Dict, which policies leave out; itself if there are none."""
    if not isinstance(space, spaces.Dict):
        return space
    seen = {key: without_text(part) for key, part in space.items() if not is_text(part)}
    same = len(seen) == len(space.spaces) and all(part is space[key] for key, part in seen.items())
    return space if same else spaces.Dict(list(seen.items()))


def seen_of(obs: Any, space: Any) -> Any:
    """Observations without the keys that are not in `space`."""
    if not (isinstance(obs, dict) and isinstance(space, spaces.Dict)):
        return obs
    return {key: seen_of(obs[key], part) for key, part in space.items() if key in obs}


def encoder_lines(policy: Any, space: spaces.Space[Any]) -> list[str]:
    """How a policy of ours reads the images in an environment's observations, what it leaves out, and what would help."""
    readers = [getattr(policy, name, None) for name in ("encoder", "critic_encoder")]
    lines = list(dict.fromkeys(text.removeprefix("obs.") for reader in readers for text in _described(reader)))
    lines += [f"{key}: a text, which is left out" for key, part in leaf_spaces(space) if is_text(part)]
    if any(images.is_raw_atari(part) for _, part in leaf_spaces(space)):
        lines.append(
            "these are raw Atari frames: gymnasium's wrappers AtariPreprocessing(env) and FrameStackObservation(env, 4) make them 4 x "
            "84 x 84, which learns much faster (docs/images.md)"
        )
    return lines


def leaf_spaces(space: spaces.Space[Any], name: str = "") -> list[tuple[str, spaces.Space[Any]]]:
    """What is inside Dicts and Tuples, with its keys."""
    if not isinstance(space, (spaces.Dict, spaces.Tuple)):
        return [(name, space)]
    inside = space.items() if isinstance(space, spaces.Dict) else enumerate(space)
    return [found for key, part in inside for found in leaf_spaces(part, f"{name}.{key}".strip("."))]


def _described(encoder: nn.Module | None, name: str = "") -> list[str]:
    """What reads images, grids and flattened boards, in words: "image: CNN 84 x 84 x 1"."""
    if isinstance(encoder, Composite):
        parts = zip(encoder.keys, encoder.parts)
        return [text for key, part in parts for text in _described(part, f"{name}.{key}".strip("."))]
    text, size = "", getattr(encoder, "size", None)
    if isinstance(encoder, (Image, Grid, Vector)):
        text = str(encoder)
    elif not isinstance(encoder, (OneHot, Bounded)) and isinstance(size, int):  # the user's
        text = f"{type(encoder).__name__}, {size:,} features"
    return [f"{name}: {text}" if name else text] if text else []


def with_bounded_action(encoder: nn.Module, space: spaces.Space[Any], action_space: spaces.Space[Any]) -> nn.Module:
    """The same encoder, which reads a previous action in units of its bounds."""
    if isinstance(encoder, Composite) and isinstance(space, spaces.Dict) and isinstance(action_space, spaces.Box):  # noqa: SIM102
        if space.spaces.get("prev_action") == action_space:
            encoder.parts[encoder.keys.index("prev_action")] = Bounded(action_space)  # type: ignore[arg-type]
    return encoder


def update_normalizers(encoder: nn.Module, obs: Any, ranks: Ranks | None = None) -> None:
    """Update the running statistics in an encoder with observations [N, ...] or [T, B, ...]."""
    if isinstance(encoder, Composite):
        for key, part in zip(encoder.keys, encoder.parts):
            update_normalizers(part, obs[key], ranks)
    elif isinstance(encoder, Vector) and encoder.normalize:
        encoder.update(obs, ranks)


def normalizes(module: nn.Module) -> bool:
    """Whether there are running statistics of observations inside."""
    return any(isinstance(part, Vector) and part.normalize for part in module.modules())
