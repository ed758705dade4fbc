"""Gradients of several processes, averaged by one all-reduce after the backward pass; equal weights at the start."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from holdfast.distributed.ranks import Ranks

_CACHE_LINE = 16
"""Floats in one. Each gradient begins at a line, because stores across two of them are slow."""


@torch.no_grad()
def copy_weights_from_leader(parameters: list[nn.Parameter], ranks: Ranks) -> None:
    """Weights initialized on different processors may differ slightly."""
    for p in parameters:
        p.copy_(ranks.sum(p if ranks.leads else torch.zeros_like(p)))


def average_gradient(gradient: Tensor, ranks: Ranks) -> None:
    """In place."""
    ranks.sum_(gradient).div_(ranks.size)


class FlatGradients:
    """Gradients of parameters as parts of one flat tensor, which ranks average by one all-reduce."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        counts = [p.numel() for p in parameters]
        padded = [-(-count // _CACHE_LINE) * _CACHE_LINE for count in counts]
        self._flat = parameters[0].detach().new_zeros(sum(padded) + len(parameters))
        *parts, self._present = self._flat.split([*padded, len(parameters)])
        self.parts = [part[:count].view(p.shape) for part, count, p in zip(parts, counts, parameters)]

    def attach(self) -> None:
        """Make the parts the parameters' `grad`."""
        for p, part in zip(self.parameters, self.parts):
            p.grad = part

    @torch.no_grad()
    def average(self, ranks: Ranks, weight: Any = 1.0) -> None:
        """Replace every gradient by the mean over ranks of `weight` times it; what is missing on some ranks counts as 0.

        A parameter that has no gradient on any rank keeps none, so that Adam leaves it alone.
        """
        missing = [i for i, p in enumerate(self.parameters) if p.grad is None]
        elsewhere = [(part, p.grad) for part, p in zip(self.parts, self.parameters) if p.grad is not part]
        copied = [(part, grad) for part, grad in elsewhere if grad is not None]
        if copied:
            torch._foreach_copy_([part for part, _ in copied], [grad for _, grad in copied])
        self._flat.mul_(weight)
        self._present.fill_(1.0)
        for i in missing:
            self.parts[i].zero_()
            self._present[i] = 0.0
        average_gradient(self._flat, ranks)
        absent = {i for i in missing if not self._present[i]}
        self.attach()
        for i in absent:
            self.parameters[i].grad = None
