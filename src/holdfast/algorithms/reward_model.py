"""`RewardModel`: rewards that a run adds to those of the environment, such as a bonus for what is new (examples/rnd.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from holdfast.rollout.segment import Segment


class RewardModel(nn.Module):
    """Subclasses write `reward` and `update`. The trainer adds the rewards to `segment.rewards` before anything reads them, so
    they reach advantages, targets, the reward scale and buffers; returns of episodes stay those of the environment.

    Parameters, buffers and `optimizer` are saved in checkpoints. Nothing in it should look at a number on a GPU.
    """

    optimizer: torch.optim.Optimizer | None = None
    """What `update` steps, if it is to be saved."""

    def reward(self, segment: Segment) -> Tensor:
        """Rewards [T, B] for a segment that was just played; called without gradients, before callbacks."""
        raise NotImplementedError("write reward(self, segment) -> [T, B]")

    def update(self, segment: Segment) -> None:
        """Learn from the segment. Called once per segment, after the policy has learned from it."""

    @torch.no_grad()
    def add_to(self, segment: Segment) -> Tensor:
        """Add the rewards to a segment; returns their mean over real steps."""
        bonus = self.reward(segment)
        if not isinstance(bonus, Tensor) or bonus.shape != segment.rewards.shape:
            got = list(bonus.shape) if isinstance(bonus, Tensor) else type(bonus).__name__
            raise ValueError(
                f"{type(self).__name__}.reward gave {got}, expected a tensor [T, B] = {list(segment.rewards.shape)}"
            )
        bonus = torch.where(segment.valid, bonus, 0.0).to(segment.rewards.dtype)
        segment.rewards = segment.rewards + bonus
        return bonus.sum() / segment.valid.sum().clamp(min=1)

    def checkpoint(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        weights = {name: value.cpu() for name, value in self.state_dict().items()}
        return {"weights": weights, "optimizer": None if self.optimizer is None else self.optimizer.state_dict()}

    def restore(self, saved: dict[str, Any] | None) -> None:
        """Continue from what `checkpoint` gave."""
        if saved is None:
            raise ValueError("it was trained without a reward model; leave out reward_model=")
        try:
            self.load_state_dict(saved["weights"])
            if self.optimizer is not None and saved["optimizer"] is not None:
                self.optimizer.load_state_dict(saved["optimizer"])
        except RuntimeError as error:
            raise ValueError(f"its reward model does not fit {type(self).__name__}: {error}") from error
