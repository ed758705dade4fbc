"""`AsyncCollector`: segments from environments that answer in batches, in any order (EnvPool's asynchronous mode).

Every environment takes exactly T steps per segment. One that has them waits for the others, so no step crosses an update.
Memory is addressed by environment id. Everything after the last step is as in `Collector`.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from holdfast.policies.precision import autocast
from holdfast.rollout.collector import Collector
from holdfast.rollout.segment import Segment
from holdfast.spans import span
from holdfast.state import State, tree_map


class AsyncCollector(Collector):
    """Actions go out and results come in in batches of `env.batch_size`, which divides the number of environments.

    `recv` waits for a whole batch, so there must always be enough environments under way to fill one. Batches are sent
    only if the steps that remain can still be divided into whole batches: no environment may have more of them left than
    there are batches. Where one lags that far behind, the others wait for it.
    """

    _rows: dict[str, Any]  # the parts of the segment so far, [T, B, ...]
    _chunk_states: list[State]
    _actions: Any  # the last action of every environment

    def _rollout(self) -> Segment:
        if not self.started:
            self.start()
        adapter, env, clock = self.adapter, self.adapter.env, time.perf_counter
        self._rows, self._chunk_states, self._actions = {}, [], None
        count, size = adapter.num_envs, env.batch_size
        left = torch.full((count,), self.steps)
        ready = list(range(count))  # environments that can be sent
        under_way, in_env, began = 0, 0.0, clock()
        while ready or under_way:
            batch = _next_batch(ready, left, size)
            before = clock()
            if batch is not None:
                ids = torch.tensor(batch)
                actions = self._act(ids, self.steps - left[ids])
                before = clock()
                with span("environment"):
                    env.send(adapter.to_env(actions), batch)
                left[ids] -= 1
                sent = set(batch)
                ready = [row for row in ready if row not in sent]
                under_way += size
            else:
                with span("environment"):
                    *result, env_ids = env.recv()
                ids = torch.as_tensor(env_ids)
                out = adapter.step_rows(ids.to(adapter.device), self._actions, result)
                for name in ("rewards", "terminated", "truncated"):
                    self._store(name, self.steps - left[ids] - 1, ids, getattr(out, name))
                ready += [row for row in ids.tolist() if left[row] > 0]
                under_way -= size
            in_env += clock() - before
        with span("values for bootstrapping"), autocast(adapter.device, self.autocast):
            last = self.policy.peek_value(adapter.obs, resets=adapter.resets, memory=self.memory).float()
        segment = self._finish(self._rows, last, {}, self._chunk_states, [])
        segment.seconds = {"env": in_env, "policy": clock() - began - in_env}
        return segment

    def _act(self, ids: Tensor, t: Tensor) -> Tensor:
        """Act in some environments, each at its own step t, and store what was seen and done."""
        adapter = self.adapter
        rows = ids.to(adapter.device)
        obs = tree_map(lambda o: o.index_select(0, rows), adapter.obs)
        resets = adapter.resets.index_select(0, rows)
        self._keep_chunk_states(ids, t)
        with span("policy"), autocast(adapter.device, self.autocast):
            step = self.policy.act(obs, resets, rows, memory=self.memory)
        seen = {"obs": obs, "resets": resets, "valid": adapter.valid.index_select(0, rows)}
        for name, value in {**seen, "actions": step.action, "log_prob": step.log_prob, "value": step.value}.items():
            self._store(name, t, ids, value)
        if self._actions is None:
            self._actions = step.action.new_zeros((adapter.num_envs, *step.action.shape[1:]))
        self._actions = self._actions.index_copy(0, rows, step.action)
        return step.action

    def _keep_chunk_states(self, ids: Tensor, t: Tensor) -> None:
        for chunk in (t[t % self.bptt == 0] // self.bptt).unique().tolist():
            if chunk == len(self._chunk_states):  # the first environments to get there; the others' rows follow
                self._chunk_states.append(tree_map(torch.clone, self.memory.read(range(self.adapter.num_envs))))
            rows = ids[t == chunk * self.bptt].to(self.adapter.device)
            kept, states = self._chunk_states[chunk], self.memory.read(rows)
            self._chunk_states[chunk] = tree_map(lambda k, s, rows=rows: k.index_copy(0, rows, s), kept, states)

    def _store(self, name: str, t: Tensor, ids: Tensor, value: Any) -> None:
        """Row (t, id) of a part of the segment [T, B, ...], for a batch of environments."""
        if name not in self._rows:
            shape = (self.steps, self.adapter.num_envs)
            self._rows[name] = tree_map(lambda v: v.new_zeros((*shape, *v.shape[1:])), value)
        where = t.to(self.adapter.device), ids.to(self.adapter.device)
        tree_map(lambda kept, v: kept.index_put_(where, v), self._rows[name], value)


def _next_batch(ready: list[int], left: Tensor, size: int) -> list[int] | None:
    """Environments to send next, those with the most steps left; None if results must be waited for.

    >>> _next_batch([0, 1], torch.tensor([3, 3, 3, 3]), 2)
    [0, 1]
    >>> _next_batch([0, 1], torch.tensor([1, 1, 1, 3]), 2)  # two batches would be left, too few for environment 3
    """
    if len(ready) < size:
        return None
    batch = sorted(ready, key=lambda row: -int(left[row]))[:size]
    after = left.clone()
    after[batch] -= 1
    return batch if int(after.max()) <= int(after.sum()) // size else None
