"""Encoders of images and of grids of codes, and the rules that say which Box is one and how its numbers lie.

`docs/images.md` has the rules as a table. `encoders.py` encodes everything else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch import Tensor, nn

from holdfast.checks import outside_discrete, rows, values_are_readable, whole_numbers
from holdfast.config.settings import given
from holdfast.named_objects import import_named, is_import_name

AS_IN_0_2 = "0.2"
"""The encoder of policies that 0.1 and 0.2 saved: only uint8 Boxes of three dimensions are images, never grids."""
SMALLEST_GRAY, SMALLEST_FLAT = (
    16,
    32,
)  # pixels a side from which on two dimensions of bytes, of other numbers, are an image
SMALLEST_IMAGE = 5  # pixels a side of an image that is not of bytes
LARGEST_GRID = 27  # cells a side up to which integers are codes
MOST_CODES = 2**16
ATARI = (210, 160)


class Layout(NamedTuple):
    """How the numbers of an image lie: [height, width], or with channels, last or first; with four dimensions, `frames` of these."""

    height: int
    width: int
    channels: int
    frames: int
    last: bool

    def arrange(self, x: Tensor) -> Tensor:
        """[N, ...] -> [N, frames * channels, height, width]."""
        x = x.movedim(-1, -3) if self.last else x
        return x if x.dim() == 4 else x.reshape(x.shape[0], self.frames * self.channels, self.height, self.width)

    def __str__(self) -> str:
        size = f"{self.height} x {self.width} x {self.channels}"
        order = "" if self.channels == 1 and not self.last else f", channels {'last' if self.last else 'first'}"
        return f"{f'{self.frames} frames of ' if self.frames > 1 else ''}{size}{order}"


def layout_of(shape: tuple[int, ...], channels: str = "auto") -> Layout:
    """The layout of a Box of two to four dimensions; ValueError where the shape does not tell and `channels` does not say.

    Two equal sides next to each other are the picture; otherwise the channels are the end that is much the smaller.
    """
    if len(shape) == 2:
        return Layout(*shape, 1, 1, False)
    if len(shape) not in (3, 4):
        raise ValueError(
            f"an observation of shape {shape} is no image: it has {len(shape)} dimensions, expected 2 to 4"
        )
    frames, (a, b, c) = (shape[0], shape[1:]) if len(shape) == 4 else (1, shape)
    first, last = b == c and a != b, a == b and b != c
    if not (first or last):
        first, last = a < c and 2 * a <= b, c < a and 2 * c <= b
    if channels != "auto":
        first, last = channels == "first", channels == "last"
    if first == last:
        raise ValueError(
            f"an observation of shape {shape} does not tell which of its sides are the channels; say {given('channels', 'first')} or "
            f"{given('channels', 'last')}, or {given('encoder', 'vector')} for one layer over all of its numbers"
        )
    return Layout(a, b, c, frames, True) if last else Layout(b, c, a, frames, False)


def _layout_in_0_2(shape: tuple[int, ...]) -> Layout:
    last = shape[-1] in (1, 3, 4) and shape[0] not in (1, 3, 4)
    return layout_of(shape, "last" if last else "first")


def bounds_of(space: spaces.Box) -> tuple[float, float] | None:
    """The one pair of finite bounds of all numbers; None if there is none."""
    low, high = float(space.low.flat[0]), float(space.high.flat[0])
    same = bool((space.low == low).all() and (space.high == high).all())
    return (low, high) if same and np.isfinite([low, high]).all() and high > low else None


def kind_of(space: spaces.Box, channels: str = "auto") -> str:
    """What a Box is: "vector", "image", "grid", or "unclear" if only the user knows."""
    shape, dims, bytes_ = space.shape, len(space.shape), space.dtype == np.uint8
    bounds = bounds_of(space)
    if dims == 2:
        smallest = SMALLEST_GRAY if bytes_ else SMALLEST_FLAT
        return "image" if bounds is not None and min(shape) >= smallest else "vector"
    if dims not in (3, 4) or (bounds is None and not bytes_ and min(sorted(shape)[-2:]) < SMALLEST_GRAY):
        return "vector"
    layout = layout_of(shape, channels)
    few = bytes_ or (bounds is not None and bounds[1] - bounds[0] < MOST_CODES)
    if np.issubdtype(space.dtype, np.integer) and few and max(layout.height, layout.width) <= LARGEST_GRID:
        return "grid"
    if bytes_ or bounds is None:
        return "image" if bytes_ else "unclear"
    return "image" if min(layout.height, layout.width) >= SMALLEST_IMAGE else "vector"


def may_be_image(space: spaces.Box, channels: str) -> bool:
    """Whether an encoder that the user named reads this Box."""
    try:
        return kind_of(space, channels) != "vector"
    except ValueError:
        return True


def is_raw_atari(space: Any) -> bool:
    """Whether these are frames as the emulator gives them."""
    return isinstance(space, spaces.Box) and space.dtype == np.uint8 and space.shape[:2] == ATARI


# --- networks ---------------------------------------------------------------------------------------------------------


def _conv(channels: int, out: int, kernel: int, stride: int = 1, padding: int = 0) -> nn.Conv2d:
    layer = nn.Conv2d(channels, out, kernel, stride, padding)
    nn.init.orthogonal_(layer.weight, 2**0.5)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer


def nature(channels: int, side: int) -> list[nn.Module]:
    """The network of Mnih et al. (2015) for pictures of 36 pixels or more, smaller kernels below."""
    if side >= 36:
        kernels = [(8, 4, 32), (4, 2, 64), (3, 1, 64)]
    else:
        kernels = [(3, 2, 32), (3, 1, 32)] if side >= 7 else [(min(side, 2), 1, 32)]
    layers: list[nn.Module] = []
    for kernel, stride, out in kernels:
        layers += [_conv(channels, out, kernel, stride), nn.ReLU()]
        channels = out
    return layers


class Residual(nn.Module):
    """x + two convolutions of x."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (_conv(channels, channels, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.relu(self.first(F.relu(x))))


def impala(channels: int, side: int) -> list[nn.Module]:
    """The residual network of Espeholt et al. (2018)."""
    layers: list[nn.Module] = []
    for out in (16, 32, 32):
        layers += [_conv(channels, out, 3, padding=1), nn.MaxPool2d(3, 2, padding=1), Residual(out), Residual(out)]
        channels = out
    return [*layers, nn.ReLU()]


NETWORKS: dict[str, Callable[[int, int], list[nn.Module]]] = {"nature": nature, "impala": impala}


class Image(nn.Module):
    """A convolutional network for images; their numbers are scaled from their bounds to 0 to 1. What has no bounds stays as it is."""

    def __init__(self, space: spaces.Box, layout: Layout, network: str = "nature", bounds: Any = (0.0, 255.0)) -> None:
        super().__init__()
        self.shape, self.layout, self.name = space.shape, layout, network
        low, high = bounds or (0.0, 1.0)
        self.low, self.span = low, high - low
        channels = layout.frames * layout.channels
        self.network = nn.Sequential(*NETWORKS[network](channels, min(layout.height, layout.width)), nn.Flatten())
        self.size = _size_after(self.network, channels, layout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layout.arrange(rows(x, self.shape)).to(self.network[0].weight.dtype)  # type: ignore[arg-type]
        return self.network((x - self.low if self.low else x) / self.span)

    def __str__(self) -> str:
        return f"{'IMPALA ' if self.name == 'impala' else ''}CNN {self.layout}"


class Grid(nn.Module):
    """A grid of codes, such as kinds and colors of objects: an embedding for each channel, then two convolutions."""

    embedded, first_features, features = 8, 16, 32
    first: Tensor  # [channels, 1, 1]: where the embeddings of a channel begin

    def __init__(self, space: spaces.Box, layout: Layout) -> None:
        super().__init__()
        bounds = (0.0, 255.0) if space.dtype == np.uint8 else bounds_of(space)
        if bounds is None or not np.issubdtype(space.dtype, np.integer) or bounds[1] - bounds[0] >= MOST_CODES:
            raise ValueError(
                f"the encoder grid reads integers between bounds, at most {MOST_CODES:,} of them, and this observation is "
                f"{space}; use {given('encoder', 'nature')}"
            )
        self.shape, self.layout = space.shape, layout
        self.low, self.codes = int(bounds[0]), int(bounds[1] - bounds[0]) + 1
        self.needs_check = space.dtype != np.uint8
        channels, kernel = layout.frames * layout.channels, min(3, layout.height, layout.width)
        self.embedding = nn.Parameter(torch.randn(channels * self.codes, self.embedded))
        self.register_buffer("first", torch.arange(channels).view(-1, 1, 1) * self.codes - self.low, persistent=False)
        layers = [_conv(channels * self.embedded, self.first_features, kernel), nn.ReLU()]
        if min(layout.height, layout.width) >= 5:
            layers += [_conv(self.first_features, self.features, 3), nn.ReLU()]
        self.network = nn.Sequential(*layers, nn.Flatten())
        self.size = _size_after(self.network, channels * self.embedded, layout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layout.arrange(whole_numbers(rows(x, self.shape), "codes"))
        if self.needs_check:
            x = self._checked(x)
        # On a CPU the gradient of index_select takes an eighth of an nn.Embedding's time.
        found = self.embedding.index_select(0, (x + self.first).flatten()).view(*x.shape, self.embedded)
        return self.network(found.permute(0, 1, 4, 2, 3).flatten(1, 2))  # [N, channels * embedded, height, width]

    def _checked(self, x: Tensor) -> Tensor:
        last = self.low + self.codes - 1
        if values_are_readable(x) and x.numel() and bool(((x < self.low) | (x > last)).any()):
            raise outside_discrete(x.min(), x.max(), [self.low], [self.codes])
        return x.clamp(self.low, last)

    def __str__(self) -> str:
        return f"grid of codes {self.layout}"


def _size_after(network: nn.Module, channels: int, layout: Layout) -> int:
    with torch.no_grad():
        return int(network(torch.zeros(1, channels, layout.height, layout.width)).shape[1])


# --- which one ----------------------------------------------------------------------------------------------------------


def for_box(space: spaces.Box, encoder: Any = "auto", channels: str = "auto") -> nn.Module | None:
    """The encoder of a Box that is an image or a grid; None: it is a vector."""
    if encoder == "vector":
        return None
    if encoder == AS_IN_0_2:
        is_image = space.dtype == np.uint8 and len(space.shape) == 3
        return Image(space, _layout_in_0_2(space.shape)) if is_image else None
    kind = kind_of(space, channels) if encoder == "auto" else encoder
    if kind == "vector":
        return None
    if kind == "unclear":
        raise ValueError(
            f"{space} may be an image: its numbers have no bounds that would tell. Say {given('encoder', 'nature')}, or "
            f"{given('encoder', 'vector')} for one layer over all of its numbers"
        )
    if callable(kind) or is_import_name(kind):
        return _own(kind, space)
    layout = layout_of(space.shape, channels)
    if kind == "grid":
        return Grid(space, layout)
    bounds = bounds_of(space) or ((0.0, 255.0) if space.dtype == np.uint8 else None)
    return Image(space, layout, "nature" if kind == "image" else kind, bounds)


def _own(encoder: Any, space: spaces.Box) -> nn.Module:
    made = (import_named(encoder, kind="encoder") if isinstance(encoder, str) else encoder)(space)
    if not isinstance(made, nn.Module) or not isinstance(getattr(made, "size", None), int):
        raise TypeError(
            f"the encoder {getattr(encoder, '__name__', encoder)} made a {type(made).__name__}, expected an nn.Module that turns "
            "[N, *space.shape] into [N, size], with the attribute size"
        )
    return made
