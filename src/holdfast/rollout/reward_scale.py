"""Reward scaling by the running deviation of discounted returns; constant during a rollout and its update."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from holdfast.distributed.ranks import ALONE, Ranks


class RewardScale:
    """`value` multiplies rewards; `update` moves it, and is called between an update and the next rollout."""

    def __init__(self, num_envs: int, gamma: float, device: torch.device | str = "cpu") -> None:
        self.num_envs, self.gamma = num_envs, gamma
        self.open_return = torch.zeros(num_envs, dtype=torch.float64, device=device)
        self.count, self.mean, self.var = 0.0, 0.0, 0.0

    @property
    def value(self) -> float:
        """1 as long as all returns were 0. Returns that differ by less than 1e-6 of their size are all the same."""
        return 1.0 / (max(self.var**0.5, 1e-6 * abs(self.mean)) or 1.0)

    def update(self, rewards: Tensor, dones: Tensor, valid: Tensor, ranks: Ranks = ALONE) -> None:
        """Add a rollout's raw rewards and ends, [T, B], of this rank; the deviation is that of all `ranks`.

        Steps that are not `valid` and returns that are not finite are ignored.
        """
        returns = torch.empty(rewards.shape, dtype=torch.float64, device=rewards.device)
        for t in range(len(rewards)):
            going_on = self.open_return * self.gamma + rewards[t]
            returns[t] = self.open_return = torch.where(valid[t], going_on, self.open_return)
            self.open_return = self.open_return.masked_fill(dones[t], 0.0)
        self.open_return = torch.where(self.open_return.isfinite(), self.open_return, 0.0)
        returns = returns[valid & returns.isfinite()]
        mean, var, n = (float(number) for number in ranks.moments(returns))
        if n == 0:
            return
        total, delta = self.count + n, mean - self.mean
        self.var = (self.var * self.count + var * n + delta**2 * self.count * n / total) / total
        self.mean += delta * n / total
        self.count = total

    def drop_open_episodes(self) -> None:
        """Every environment begins a new episode."""
        self.open_return = torch.zeros(self.num_envs, dtype=torch.float64, device=self.open_return.device)

    def state_dict(self) -> dict[str, Any]:
        return {"open_return": self.open_return.cpu().clone(), "count": self.count, "mean": self.mean, "var": self.var}

    def load_state_dict(self, d: dict[str, Any]) -> None:
        self.open_return = d["open_return"].to(self.open_return.device)
        self.count, self.mean, self.var = d["count"], d["mean"], d["var"]
