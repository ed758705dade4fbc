"""`BatchEnvAdapter`: environments that answer in batches, in any order (EnvPool's asynchronous mode).

Every environment takes exactly T steps per rollout. One that has them waits for the others, so no step crosses an update.
Memory is addressed by environment id.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from holdfast.rollout.segment import Turn
from holdfast.rollout.vector_env import EnvStep, VectorEnvAdapter
from holdfast.state import tree_map


class BatchEnvAdapter(VectorEnvAdapter):
    """Actions go out and results come in in batches of `env.batch_size`, which divides the number of environments.

    `recv` waits for a whole batch, so there must always be enough environments under way to fill one. Batches are sent
    only if the steps that remain can still be divided into whole batches: no environment may have more of them left than
    there are batches. Where one lags that far behind, the others wait for it. The mode is NEXT_STEP.
    """

    def turns(self, steps: int) -> Iterator[Turn]:
        self._steps, self._left = steps, torch.full((self.num_envs,), steps)
        self._ready, self._under_way = list(range(self.num_envs)), 0
        self._actions: Tensor | None = None  # the last one of every environment
        while (batch := next_batch(self._ready, self._left, self.env.batch_size)) is not None:
            rows = torch.tensor(batch)
            yield Turn(steps - self._left[rows], rows)

    def seen(self, rows: Tensor | None) -> tuple[Any, Tensor, Tensor, Any]:
        if rows is None:
            return super().seen(None)
        at = rows.to(self.device)
        return tree_map(lambda part: None if part is None else part.index_select(0, at), super().seen(None))

    def step_turn(self, action: Tensor, turn: Turn) -> list[tuple[Turn, EnvStep]]:
        """Send a batch; wait for results until another one can be sent, or until all have come."""
        assert turn.rows is not None
        batch, size = turn.rows.tolist(), self.env.batch_size
        if self._actions is None:
            self._actions = action.new_zeros((self.num_envs, *action.shape[1:]))
        self._actions = self._actions.index_copy(0, turn.rows.to(self.device), action)
        self.env.send(self.to_env(action), batch)
        self._left[turn.rows] -= 1
        sent = set(batch)
        self._ready = [row for row in self._ready if row not in sent]
        self._under_way += size
        outcomes = []
        while self._under_way and next_batch(self._ready, self._left, size) is None:
            *result, env_ids = self.env.recv()
            rows = torch.as_tensor(env_ids)
            outcomes.append(
                (Turn(self._steps - self._left[rows] - 1, rows), self._take_in(rows.to(self.device), result))
            )
            self._ready += [row for row in rows.tolist() if self._left[row] > 0]
            self._under_way -= size
        return outcomes

    def _take_in(self, rows: Tensor, result: Any) -> EnvStep:
        """What some environments returned: (observations, rewards, terminated, truncated), a row per entry of `rows`. What is
        known of the others stays."""
        obs, rewards, terminated, truncated = result
        assert self._actions is not None
        played, count = self.valid.index_select(0, rows), len(rows)
        rewards = self._per_env("rewards", rewards, torch.float32, count).masked_fill(~played, 0.0)
        terminated = self._per_env("terminated", terminated, torch.bool, count) & played
        truncated = self._per_env("truncated", truncated, torch.bool, count) & played
        self.resets = self.resets.index_copy(0, rows, ~played)
        self.valid = self.valid.index_copy(0, rows, ~(terminated | truncated))
        actions = self._actions.index_select(0, rows)
        new = self.compose(self._tensors(obs, "recv", count), actions, rewards, fresh=~played)
        self.obs = tree_map(lambda o, n: o.index_copy(0, rows, n), self.obs, new)
        masks = self._read_mask({})
        if masks is not None:
            # After its end an episode may allow nothing. A dummy step's action is ignored, so allow all.
            masks = masks | ~self.valid.view(-1, *(1,) * (masks.dim() - 1))
            before = torch.ones_like(masks) if self.action_mask is None else self.action_mask
            self.action_mask = before.index_copy(0, rows, masks.index_select(0, rows))
        return EnvStep(rewards, terminated, truncated, None)


def next_batch(ready: list[int], left: Tensor, size: int) -> list[int] | None:
    """Environments to send next, those with the most steps left; None if results must be waited for.

    >>> next_batch([0, 1], torch.tensor([3, 3, 3, 3]), 2)
    [0, 1]
    >>> next_batch([0, 1], torch.tensor([1, 1, 1, 3]), 2)  # two batches would be left, too few for environment 3
    """
    if len(ready) < size:
        return None
    batch = sorted(ready, key=lambda row: -int(left[row]))[:size]
    after = left.clone()
    after[batch] -= 1
    return batch if int(after.max()) <= int(after.sum()) // size else None
