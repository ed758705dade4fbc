"""`ValueScale`: the critic learns values of mean 0 and deviation 1, whatever the size of the rewards.

    value = mean + std * critic(features)          # in reward units, which is what everybody sees
    value loss = 0.5 * (critic(features) - (returns - mean) / std) ** 2

When the statistics move, the critic's last layer is changed so that every value stays what it was (PopArt, van Hasselt et
al., 2016). They move right after a rollout, before the update on it: a reward that is a thousand times larger than all
before is then in the statistics when the critic first learns from it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

RATE = 0.1  # weight of the latest rollout in the statistics
SMALLEST = 0.1  # the deviation never falls below this part of its largest value so far
_FLAT = 1e-6  # returns that differ by less than this part of their size are all the same


class ValueScale(nn.Module):
    """Mean and deviation of returns. The last layer of the critic must start at 0: the first value is the mean."""

    mean: Tensor  # float64, as are the others
    square: Tensor  # mean of squared returns
    std: Tensor
    largest_std: Tensor
    seen: Tensor  # 0 until returns differed from each other

    def __init__(self) -> None:
        super().__init__()
        for name, start in (("mean", 0.0), ("square", 0.0), ("std", 1.0), ("largest_std", 0.0), ("seen", 0.0)):
            self.register_buffer(name, torch.tensor(start, dtype=torch.float64))

    def to_reward_units(self, out: Tensor) -> Tensor:
        """What the critic's last layer gives, as values."""
        return out * self.std.to(out.dtype) + self.mean.to(out.dtype)

    def to_loss_units(self, value: Tensor) -> Tensor:
        """Values or returns, as the critic's last layer gives them."""
        return (value - self.mean.to(value.dtype)) / self.std.to(value.dtype)

    @torch.no_grad()
    def move(self, mean: Tensor, var: Tensor, n: Tensor, last: nn.Linear) -> None:
        """Add the returns of a rollout (their mean, variance and number; ignored if not finite) and correct `last`.

        Without a look at a number: it may run on a GPU. In place, since captured graphs read these addresses.
        """
        usable = mean.isfinite() & var.isfinite() & (n > 0)
        mean, var = (torch.where(usable, x, 0.0) for x in (mean.double(), var.double()))
        square = var + mean**2
        first = self.seen == 0
        rate = torch.where(usable, torch.where(first, 1.0, RATE), 0.0)
        new_mean, new_square = torch.lerp(self.mean, mean, rate), torch.lerp(self.square, square, rate)
        new_var = (new_square - new_mean**2).clamp(min=0.0)
        varied = new_var > (_FLAT**2) * new_square
        # Returns contain the critic's own errors. Without a lower end a policy that always gets the same return would
        # shrink the unit to the size of these errors, then to that of the errors of the errors, and so on.
        largest = torch.where(usable & varied, torch.maximum(self.largest_std, new_var.sqrt()), self.largest_std)
        new_std = torch.where(varied, torch.maximum(new_var.sqrt(), SMALLEST * largest), self.std)
        # The first time there is nothing to keep: the critic has learned nothing yet.
        ratio = torch.where(first, 1.0, self.std / new_std)
        shift = torch.where(first, 0.0, (self.mean - new_mean) / new_std)
        last.weight.mul_(ratio.to(last.weight.dtype))
        last.bias.copy_(last.bias * ratio.to(last.bias.dtype) + shift.to(last.bias.dtype))
        self.mean.copy_(new_mean)
        self.square.copy_(new_square)
        self.std.copy_(new_std)
        self.largest_std.copy_(largest)
        self.seen.copy_(torch.maximum(self.seen, (usable & varied).double()))
