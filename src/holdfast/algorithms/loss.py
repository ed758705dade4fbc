"""`Loss`: what an on-policy method writes. Engines run it by autograd, or capture it in a CUDA graph."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Protocol

from torch import Tensor

from holdfast.policies.base import PolicyOutput
from holdfast.rollout.segment import Segment


class Loss(ABC):
    """The loss of a policy's output on training sequences. Numbers in it that change from update to update are tensors on a GPU,
    filled in place, so that a captured minibatch reads them."""

    terms: ClassVar[tuple[str, ...]] = ()
    """The names of what `__call__` gives besides the loss, in order."""

    def targets(self, segment: Segment) -> Segment:
        """The segment with what the loss compares the policy with. Called once per update, before any step."""
        return segment

    @abstractmethod
    def __call__(self, output: PolicyOutput, batch: Segment) -> dict[str, Tensor]:
        """Scalars: "loss", which is differentiated, and `terms`, without gradients. batch: sequences [T, B] of the targets."""

    def constants(self) -> tuple[Any, ...]:
        """Numbers that a captured minibatch has built in: if they change, it is captured again."""
        return ()


class MinibatchEngine(Protocol):
    """How minibatches of one rollout are executed."""

    @property
    def names(self) -> tuple[str, ...]:
        """What the numbers that `step` gives are: terms of the loss, "grad_norm" and "skipped"."""

    def load(self, batch: Segment, loss: Loss) -> None:
        """Take these training sequences, or the same ones with other start states, and their loss."""

    def step(self, columns: Tensor | None, rank_weight: Any) -> Tensor:
        """One optimizer step on some columns of the batch (None: all); the numbers of `names`, as one tensor on the device.

        rank_weight: this rank's part of the minibatch's real steps, times the number of ranks. skipped: 1 if loss or gradients
        were not finite and no step was taken; the others are 0 then.
        """
