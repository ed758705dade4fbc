"""Auxiliary losses: what a policy adds to the loss of its algorithm (`RecurrentPolicy.losses`), and with which weights."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from holdfast.config import named
from holdfast.policies.base import PolicyOutput, RecurrentPolicy
from holdfast.rollout.segment import Segment


class AuxiliaryLosses:
    """The losses of one policy; `weights` name them in the order of the log."""

    def __init__(self, policy: RecurrentPolicy, weights: dict[str, float]) -> None:
        self.policy, self.weights = policy, weights
        self.names = tuple(weights)

    @classmethod
    def of(cls, policy: Any, config: Any) -> AuxiliaryLosses | None:
        """None if the policy has none. Raises ValueError if losses and weights do not belong together."""
        own, kind = getattr(policy, "losses", None), type(policy).__name__
        weights = config.weights_of_losses() if hasattr(config, "weights_of_losses") else {}
        if own is None or getattr(own, "__func__", own) is RecurrentPolicy.losses:
            if weights:
                raise ValueError(
                    f"{named('loss_weights')} names {', '.join(weights)}, but {kind} has no losses of its own; write "
                    "losses(self, features, output, batch) -> {name: loss}"
                )
            return None
        if not weights:
            raise ValueError(f"{kind} has losses of its own: give each a weight, {named('loss_weights')} NAME=1.0")
        return cls(policy, weights)

    def add(
        self, terms: dict[str, Tensor], features: Tensor, output: PolicyOutput, batch: Segment
    ) -> dict[str, Tensor]:
        """`terms` with each loss under its name, and the weighted sum of all in "loss"."""
        found = self.policy.losses(features, output, batch)
        if set(found) != set(self.names):
            raise ValueError(
                f"{type(self.policy).__name__}.losses gave {', '.join(found) or 'nothing'}, but {named('loss_weights')} names "
                f"{', '.join(self.names)}; make them the same"
            )
        for name, loss in found.items():
            if not isinstance(loss, Tensor) or loss.numel() != 1 or name in terms:
                got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"type {type(loss).__name__}"
                taken = f"; {name} is a name of the algorithm's, choose another" if name in terms else ""
                raise ValueError(
                    f"the loss {name!r} of {type(self.policy).__name__} is of {got}, expected one number as a tensor{taken}"
                )
        total = terms["loss"] + sum(self.weights[name] * found[name].reshape(()) for name in self.names)
        return {**terms, **{name: found[name].detach().reshape(()).float() for name in self.names}, "loss": total}
