"""Attention over a window in plain torch: whole sequences, and single steps.

`reference/window.py` specifies what is computed. One rule is added: a query that may not see a key multiplies it by 0,
and 0 x NaN is NaN. So steps that are not finite are replaced by 0 before the products, and exactly the queries that see
one of them get NaN afterwards.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.checks import values_are_readable
from holdfast.kernels.operands import Ring
from holdfast.kernels.portable.band import attend_in_band


def sequence(q: Tensor, k: Tensor, v: Tensor, ring: Ring, resets: Tensor | None, bias: Tensor) -> tuple[Tensor, Ring]:
    """q, k, v [T, B, h, d]; resets [T, B]; bias [h, window] -> y [T, B, h, d], the ring after the last step."""
    seen = _Seen(q, k, v, ring, resets)
    return seen.attend(bias), seen.ring_after()


def output(q: Tensor, k: Tensor, v: Tensor, ring: Ring, resets: Tensor | None, bias: Tensor) -> Tensor:
    """y of `sequence` alone."""
    return _Seen(q, k, v, ring, resets).attend(bias)


class _Seen:
    """A sequence with the steps before it in one row: queries [B, h, T, d], keys and values [B, h, R + T, d]."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, ring: Ring, resets: Tensor | None) -> None:
        self.ring, R = ring, ring.slots
        self.before = _steps_before(q.shape[0], ring.age, resets)  # [B, T]
        order = (ring.age.unsqueeze(1) + _count(R, ring.age)) % R  # the slot that is written next is the oldest
        self.queries = q.permute(1, 2, 0, 3)
        self.keys = torch.cat([_pick(ring.keys, order), k.permute(1, 2, 0, 3)], 2)
        self.values = torch.cat([_pick(ring.values, order), v.permute(1, 2, 0, 3)], 2)
        sums = _sum_of_steps(self.keys) + _sum_of_steps(self.values) + F.pad(_sum_of_steps(self.queries), (R, 0))
        bad = is_not_finite(sums)  # [B, R + T]
        self.bad = None if values_are_readable(bad) and not bad.any() else bad
        """Steps that are not finite; None: there are none."""

    def attend(self, bias: Tensor) -> Tensor:
        """y [T, B, h, d]."""
        R, reach = self.ring.slots, self.before.clamp(max=self.ring.slots)
        queries, keys, values = self.queries, self.keys, self.values
        if self.bad is not None:
            rows = self.bad[:, None, :, None]
            queries = queries.masked_fill(rows[:, :, R:], 0.0)
            keys, values = keys.masked_fill(rows, 0.0), values.masked_fill(rows, 0.0)
        y = attend_in_band(queries, keys, values, reach, bias)
        if self.bad is not None:
            y = y.masked_fill(_sees_bad(self.bad, reach)[:, None, :, None], torch.nan)
        return y.permute(2, 0, 1, 3)

    def ring_after(self) -> Ring:
        """The ring after the last step."""
        keys, values = self.keys, self.values
        if self.bad is not None:
            rows = self.bad[:, None, :, None]
            keys, values = keys.masked_fill(rows, torch.nan), values.masked_fill(rows, torch.nan)
        return _last_slots(keys, values, self.before, self.ring)


def attend_once(q: Tensor, k: Tensor, v: Tensor, ring: Ring, bias: Tensor) -> Tensor:
    """y of one step, [B, h, d], from a ring that is already reset and stays as it is.

    Whatever is not finite in a ring belongs to the row's own episode, and may spread.
    """
    R, age = ring.slots, ring.age.unsqueeze(1)  # [B, 1]
    q = q * q.shape[-1] ** -0.5
    distance = 1 + (age - 1 - _count(R, age)) % R  # of each slot: [B, R], from 1 to R
    scores = torch.matmul(ring.keys, q.unsqueeze(-1)).squeeze(-1)  # [B, h, R]
    scores = (scores + bias.t()[distance.long()].transpose(1, 2)).masked_fill((distance > age).unsqueeze(1), -torch.inf)
    own = (q * k).sum(-1, keepdim=True) + bias[:, :1]
    weights = torch.cat([scores, own], -1).softmax(-1)  # [B, h, R + 1]
    past = torch.matmul(weights[..., :R].unsqueeze(2), ring.values).squeeze(2)
    return past + weights[..., R:] * v


def stored_age(age: Tensor, slots: int) -> Tensor:
    """A number of steps as a ring stores it; see `Ring`."""
    return torch.where(age >= 2 * slots, slots + age % slots, age)


def is_not_finite(x: Tensor) -> Tensor:
    """As ~x.isfinite(), in two launches on a GPU instead of five: a number that is not finite, less itself, is NaN."""
    return (x - x) != 0


def _count(n: int, like: Tensor) -> Tensor:
    return torch.arange(n, device=like.device, dtype=like.dtype)


def _steps_before(T: int, age: Tensor, resets: Tensor | None) -> Tensor:
    """How many steps of its episode come before each step: [B, T]."""
    now, first = _count(T, age), -age.unsqueeze(1)  # first: the time of the episode's first step
    if resets is None:
        return now - first
    return now - torch.where(resets.t(), now, first).cummax(1).values


def _pick(steps: Tensor, index: Tensor) -> Tensor:
    """steps [B, h, n, d], index [B, m] -> [B, h, m, d]."""
    return steps.gather(2, index.long()[:, None, :, None].expand(-1, steps.shape[1], -1, steps.shape[3]))


def _sum_of_steps(steps: Tensor) -> Tensor:
    """[B, h, n, d] -> [B, n]. A sum is not finite if a part is not, and much cheaper than looking at each part; where it
    overflows, the products would too."""
    return steps.detach().sum((1, 3))


def _sees_bad(bad: Tensor, reach: Tensor) -> Tensor:
    """Whether one of the steps that a query sees is bad; bad [B, R + T], reach [B, T] -> [B, T]."""
    T = reach.shape[1]
    count = F.pad(bad.long().cumsum(1), (1, 0))  # [B, R + T + 1]
    end = count.shape[1] - T + _count(T, reach)  # one past the query itself
    return count[:, -T:] > count.gather(1, (end - 1 - reach).long())


def _last_slots(keys: Tensor, values: Tensor, before: Tensor, ring: Ring) -> Ring:
    """The ring after the sequence, from all keys and values [B, h, R + T, d]."""
    R, total = ring.slots, keys.shape[2]
    age = before[:, -1:] + 1  # [B, 1]
    back = (age - 1 - _count(R, age)) % R  # how many steps before the last one each slot was written: [B, R]
    empty = (back >= age)[:, None, :, None]
    keys, values = (_pick(part, total - 1 - back).masked_fill(empty, 0.0) for part in (keys, values))
    return Ring(keys, values, stored_age(age.squeeze(1), R))
