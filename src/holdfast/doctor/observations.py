"""Random observations for a gymnasium space, a shape or a function: what the scripted environments show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.state import map_tensors

#: standard deviation of unbounded observations: wide enough to move a hidden state
SPREAD = 1.5


def device_of(modules: Sequence[nn.Module]) -> torch.device:
    """The device of the first parameter or buffer; the CPU if there is none."""
    for module in modules:
        for tensor in [*module.parameters(), *module.buffers()]:
            return tensor.device
    return torch.device("cpu")


class Observations:
    """Draws stacked random observations.

    `space`: a gymnasium space (Box, Discrete, MultiDiscrete, MultiBinary, Dict, Tuple), a shape such as `(4,)`, a
    size such as `4`, or a function `(count, generator) -> observations`.
    """

    def __init__(self, space: Any) -> None:
        if isinstance(space, int):
            space = (space,)
        if isinstance(space, tuple) and not all(isinstance(n, int) for n in space):
            raise TypeError(f"observation_space: expected a gymnasium space or a shape of ints, got {space!r}")
        self.space = space

    def sample(self, count: int, generator: torch.Generator, device: torch.device) -> Any:
        """`count` observations on `device`."""
        is_function = callable(self.space) and not hasattr(self.space, "sample")
        drawn = self.space(count, generator) if is_function else _draw(self.space, count, generator)
        return map_tensors(lambda x: x.to(device), drawn)


def _draw(space: Any, count: int, generator: torch.Generator) -> Any:
    if isinstance(space, tuple):
        return torch.randn(count, *space, generator=generator) * SPREAD
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        return {key: _draw(inner, count, generator) for key, inner in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_draw(inner, count, generator) for inner in space.spaces)
    if isinstance(space, spaces.Discrete):
        return torch.randint(int(space.n), (count,), generator=generator) + int(space.start)
    if isinstance(space, spaces.MultiDiscrete):
        sizes = torch.as_tensor(space.nvec, dtype=torch.float32)
        draw = (torch.rand(count, *sizes.shape, generator=generator) * sizes).floor().long()
        return torch.minimum(draw, sizes.long() - 1)
    if isinstance(space, spaces.MultiBinary):
        return torch.randint(2, (count, *space.shape), generator=generator, dtype=torch.int8)
    if isinstance(space, spaces.Box):
        return _draw_box(space, count, generator)
    raise TypeError(
        f"observation_space: cannot draw from {type(space).__name__}; pass a function (count, generator) -> "
        "observations instead"
    )


def _draw_box(space: Any, count: int, generator: torch.Generator) -> Tensor:
    low = torch.as_tensor(space.low, dtype=torch.float64)
    high = torch.as_tensor(space.high, dtype=torch.float64)
    uniform = torch.rand(count, *space.shape, generator=generator, dtype=torch.float64)
    normal = torch.randn(count, *space.shape, generator=generator, dtype=torch.float64) * SPREAD
    # A bound beyond a million means unbounded: CartPole's velocities go to 3e38.
    narrow = (low.abs() < 1e6) & (high.abs() < 1e6)
    width = torch.where(narrow, high - low, torch.zeros_like(low))
    draw = torch.where(narrow, low.nan_to_num(0.0, 0.0, 0.0) + uniform * width, normal.clamp(low, high))
    dtype = torch.as_tensor(space.low).dtype
    return draw.floor().to(dtype) if not dtype.is_floating_point else draw.to(dtype)
