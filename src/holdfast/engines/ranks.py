"""Gradients of several processes: averaged by one all-reduce after the backward pass, or by DDP as they appear."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.distributed.ranks import Ranks, leaves_with_group


def wrap_for_averaging(policy: nn.Module, ranks: Ranks, some_unused: bool) -> nn.Module | None:
    """The policy wrapped so that its gradients are averaged over ranks as they appear; None for one process.

    some_unused: a minibatch may give some parameters no gradient (a learned start that is not used there).
    """
    if not ranks.joined:
        return None
    from torch.nn.parallel import DistributedDataParallel

    # Buffers (statistics) move equally on every rank, between updates: nothing to copy in each forward pass.
    known = inspect.signature(DistributedDataParallel).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    options: dict[str, Any] = {buffers: False, "find_unused_parameters": some_unused}
    return leaves_with_group(DistributedDataParallel(policy, gradient_as_bucket_view=True, **options))


@torch.no_grad()
def copy_weights_from_leader(policy: nn.Module, ranks: Ranks) -> None:
    """What DDP does first: weights initialized on different processors may differ slightly."""
    for p in policy.parameters():
        p.copy_(ranks.sum(p if ranks.leads else torch.zeros_like(p)))


def average_gradient(gradient: Tensor, ranks: Ranks) -> None:
    """In place."""
    ranks.sum_(gradient).div_(ranks.size)


class RankGradients:
    """Averages the gradients of parameters over ranks: one flat tensor, one all-reduce."""

    def __init__(self, parameters: list[nn.Parameter], ranks: Ranks) -> None:
        self.parameters, self.ranks = parameters, ranks
        flat = parameters[0].new_zeros(sum(p.numel() for p in parameters) + len(parameters))
        *parts, self._present = flat.split([*(p.numel() for p in parameters), len(parameters)])
        self._flat, self._parts = flat.detach(), [part.view_as(p) for part, p in zip(parts, parameters)]

    @torch.no_grad()
    def average(self, weight: Any = 1.0) -> None:
        """Replace every gradient by the mean over ranks of `weight` times it; what is missing on some ranks counts as 0.

        A parameter that has no gradient on any rank keeps none, so that Adam leaves it alone.
        """
        missing = [i for i, p in enumerate(self.parameters) if p.grad is None]
        given = [(part, p.grad) for part, p in zip(self._parts, self.parameters) if p.grad is not None]
        torch._foreach_copy_([part for part, _ in given], [grad for _, grad in given])
        self._flat.mul_(weight)
        self._present.fill_(1.0)
        for i in missing:
            self._parts[i].zero_()
            self._present[i] = 0.0
        average_gradient(self._flat, self.ranks)
        absent = {i for i in missing if not self._present[i]}
        for i, (p, part) in enumerate(zip(self.parameters, self._parts)):
            p.grad = None if i in absent else part
