"""What a policy holds besides its weights and may change when it is called: buffers, tensors, numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class MovingPart:
    """A buffer, or a plain attribute that holds a tensor or a number, with its value when this was made."""

    module: nn.Module
    attribute: str
    name: str
    is_buffer: bool
    then: Any

    def now(self) -> Any:
        return getattr(self.module, self.attribute, None)

    def address(self) -> int | None:
        now = self.now()
        return now.data_ptr() if isinstance(now, Tensor) else None

    def moved(self) -> bool:
        now = self.now()
        if isinstance(now, Tensor) and isinstance(self.then, Tensor):
            return now.shape == self.then.shape and not torch.equal(now, self.then)
        return type(now) is type(self.then) and bool(now != self.then)

    def distance(self) -> float:
        return float((self.now() - self.then).abs().max())


def moving_parts(modules: list[nn.Module]) -> list[MovingPart]:
    """All buffers, tensors and numbers that the modules of the policy hold besides their weights."""
    found = []
    for module in modules:
        for path, inner in module.named_modules():
            prefix = f"{path}." if path else ""
            for name, buffer in inner.named_buffers(recurse=False):
                found.append(MovingPart(inner, name, prefix + name, True, buffer.detach().clone()))
            for name, value in vars(inner).items():
                if isinstance(value, Tensor):
                    found.append(MovingPart(inner, name, prefix + name, False, value.detach().clone()))
                elif isinstance(value, (int, float)) and not isinstance(value, bool):
                    found.append(MovingPart(inner, name, prefix + name, False, value))
    return found
