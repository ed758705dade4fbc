"""Gradients of several processes: averaged by DDP as they appear, or by hand where hooks cannot be captured."""

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
    gradient.copy_(ranks.sum(gradient)).div_(ranks.size)
