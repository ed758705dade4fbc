"""Segments from environments: `hf.collect` for your own loop, `Collector` for the trainer.

    for segment in hf.collect(env, policy, steps=128):
        loss = hf.ppo_loss(policy, segment)

A segment is T steps of B environments with the state it started from. Truncated episodes are bootstrapped with
V(final observation) from the state *before* the reset, leaving memory as it was. `VectorEnvAdapter` drives the
environment.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from holdfast.memory import Memory
from holdfast.policies.base import RecurrentPolicy, Step
from holdfast.policies.precision import autocast
from holdfast.rollout.advantages import gae
from holdfast.rollout.exploration import CorrelatedNoise
from holdfast.rollout.segment import Segment
from holdfast.spans import span
from holdfast.state import State, tree_map


class Collector:
    """Rolls a policy through an environment, a segment at a time.

    memory: a new one unless given, so acting elsewhere with the same policy does not change it. bptt: length of
    the training chunks whose start states are kept (None: the whole segment). reward_scale: rewards are multiplied by it
    before advantages are computed; `segment.rewards` stay raw. noise_correlation: of the exploration noise from step to
    step, Box actions only (`exploration.py`).
    """

    slowed_by: str | None = None
    """What keeps a collector from running as it was made to, if that shows only when it is tried."""

    def __init__(
        self,
        env: Any,
        policy: RecurrentPolicy,
        steps: int = 128,
        *,
        gamma: float = 0.99,
        gae_lambda: float = 0.95,
        bptt: int | None = None,
        memory: Memory | None = None,
        inputs: tuple[str, ...] = ("obs",),
        autocast: torch.dtype | None = None,
        noise_correlation: float = 0.0,
        seed: int | None = None,
    ) -> None:
        from holdfast.rollout.vector_env import VectorEnvAdapter  # imports gymnasium

        self.adapter = VectorEnvAdapter(env, policy.core.device(), inputs)
        self.policy, self.steps, self.gamma, self.gae_lambda = policy, steps, gamma, gae_lambda
        self.bptt = bptt or steps
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}")
        if steps % self.bptt:
            raise ValueError(f"bptt={bptt} must divide steps={steps}")
        self.memory = Memory(policy.core) if memory is None else memory
        self._writes: int | None = None  # of the memory, after the last segment
        self.autocast = autocast
        self.seed = seed
        self.reward_scale = 1.0
        self.noise = self._make_noise(noise_correlation)
        self.started = False
        self._forget_open_episodes()

    def _make_noise(self, correlation: float) -> CorrelatedNoise | None:
        from gymnasium import spaces  # imported where it is used

        space = self.adapter.env.single_action_space
        if correlation == 0.0 or not isinstance(space, spaces.Box):
            return None
        actions = int(torch.Size(space.shape).numel())
        return CorrelatedNoise(self.adapter.num_envs, actions, correlation, self.adapter.device)

    def start(self) -> None:
        """Begin new episodes everywhere, with fresh memory."""
        self.adapter.start(self.seed)
        self.memory.reserve(self.adapter.num_envs)
        self.memory.reset()
        self.memory.update_in_place()
        self._writes = None
        self._forget_open_episodes()
        self.started = True

    def _forget_open_episodes(self) -> None:
        self._open_return = torch.zeros(self.adapter.num_envs, dtype=torch.float64, device=self.adapter.device)
        self._open_length = torch.zeros(self.adapter.num_envs, dtype=torch.int64, device=self.adapter.device)

    @torch.no_grad()
    def rollout(self) -> Segment:
        """The next segment."""
        self._notice_other_writers()
        with span("rollout"):
            segment = self._rollout()
        self._writes = self.memory.writes
        return segment

    def go_ahead(self, segment: Segment) -> Segment | None:
        """Start the next rollout, which `rollout` gives then: `segment`, with tensors that stay. None: not with this engine."""
        return None

    def take_back(self) -> None:
        """Be as before `go_ahead`. Call it before you save or change what a rollout uses."""

    def _notice_other_writers(self) -> None:
        if self._writes is not None and self._writes != self.memory.writes:
            warnings.warn(
                "other code has used this collector's memory since its last segment, so its environments would continue "
                "from wrong states; give each loop its own memory: memory=hf.Memory(policy.core)",
                stacklevel=4,
            )

    def _rollout(self) -> Segment:
        if not self.started:
            self.start()
        adapter, policy, memory, clock = self.adapter, self.policy, self.memory, time.perf_counter
        noise = self.noise
        rows: dict[str, list[Any]] = {name: [] for name in Segment.TIMED if name not in ("advantage", "returns")}
        chunk_states: list[State] = []
        final_values: dict[int, Tensor] = {}
        failed: list[int] = []  # steps in which the environments failed
        in_env, began = 0.0, clock()
        for t in range(self.steps):
            if t % self.bptt == 0:
                chunk_states.append(memory.read() if memory.in_place else memory.take(adapter.num_envs)[0])
            with span("policy"), autocast(adapter.device, self.autocast):
                step = self.act(None if noise is None else noise.advance(adapter.resets))
            for name in ("obs", "resets", "valid", "action_mask"):
                rows[name].append(getattr(adapter, name))
            rows["actions"].append(step.action)
            rows["log_prob"].append(step.log_prob)
            rows["value"].append(step.value)
            before = clock()
            with span("environment"):
                out = adapter.step(step.action)
            in_env += clock() - before
            for name in ("rewards", "terminated", "truncated"):
                rows[name].append(getattr(out, name))
            if out.failed:
                failed.append(t)
            if out.final_obs is not None:
                final_values[t] = self._value_of_final(out.final_obs, out.truncated)
        with span("values for bootstrapping"), autocast(adapter.device, self.autocast):
            last = policy.peek_value(adapter.obs, resets=adapter.resets, memory=memory).float()
        rows["action_mask"] = _fill_missing_masks(rows["action_mask"])
        stacked = {name: _stack(parts) for name, parts in rows.items() if parts}
        segment = self._finish(stacked, last, final_values, chunk_states, failed)
        segment.seconds = {"env": in_env, "policy": clock() - began - in_env}
        return segment

    def act(self, noise: Tensor | None) -> Step:
        """One step of the policy in all environments; memory moves on. noise: as in `RecurrentPolicy.act`."""
        adapter = self.adapter
        options: dict[str, Any] = {} if noise is None else {"noise": noise}
        return self.policy.act(
            adapter.obs, adapter.resets, memory=self.memory, action_mask=adapter.action_mask, **options
        )

    def _value_of_final(self, final_obs: Any, truncated: Tensor) -> Tensor:
        """V(final observation) for the truncated rows, from the state they had before the reset: [B]."""
        rows = truncated.nonzero().squeeze(1)
        obs = tree_map(lambda o: o.index_select(0, rows), final_obs)
        with span("values for bootstrapping"), autocast(self.adapter.device, self.autocast):
            value = self.policy.peek_value(obs, rows, memory=self.memory)
        return torch.zeros(len(truncated), device=truncated.device).index_copy(0, rows, value.float())

    def _finish(
        self,
        rows: dict[str, Any],
        last: Tensor,
        final_values: dict[int, Tensor],
        chunk_states: list[State],
        failed: Sequence[int],
    ) -> Segment:
        rows["value"], rows["log_prob"] = rows["value"].float(), rows["log_prob"].float()
        finals = None
        if final_values:
            finals = torch.zeros_like(rows["value"])
            for t, final in final_values.items():
                finals[t] = final
        advantage, returns = self.advantages(rows, last, finals)
        dones = rows["terminated"] | rows["truncated"]
        ended_returns, ended_lengths = self.finished_episodes(rows["rewards"], dones, rows["valid"], failed)
        return Segment(
            **rows,
            advantage=advantage,
            returns=returns,
            start_state=chunk_states[0],
            chunk_states=chunk_states,
            episode_returns=ended_returns,
            episode_lengths=ended_lengths,
        )

    def advantages(self, rows: dict[str, Any], last: Tensor, finals: Tensor | None) -> tuple[Tensor, Tensor]:
        """Advantages and returns [T, B]. last: the value [B] after the last step; finals: V(final observation) [T, B],
        used where an episode was truncated."""
        with span("advantages (GAE)"):
            return self._advantages(rows, last, finals)

    def _advantages(self, rows: dict[str, Any], last: Tensor, finals: Tensor | None) -> tuple[Tensor, Tensor]:
        value = rows["value"]
        next_values = torch.cat([value[1:], last.unsqueeze(0)])
        if finals is not None:
            next_values = torch.where(rows["truncated"], finals, next_values)
        next_values = next_values.masked_fill(rows["terminated"], 0.0)
        dones = rows["terminated"] | rows["truncated"]
        rewards = rows["rewards"] * self.reward_scale
        advantage, returns = gae(rewards, value, next_values, dones, self.gamma, self.gae_lambda)
        if self.adapter.has_dummy_steps:
            advantage = advantage.masked_fill(~rows["valid"], 0.0)
            returns = torch.where(rows["valid"], returns, value)
        return advantage, returns

    def finished_episodes(
        self, rewards: Tensor, dones: Tensor, valid: Tensor, failed: Sequence[int] = ()
    ) -> tuple[list[float], list[int]]:
        """Returns and lengths of the episodes that ended here, in order of time; interrupted ones are not counted."""
        with span("returns of the episodes that ended"):
            return self._finished_episodes(rewards, dones, valid, failed)

    def _finished_episodes(
        self, rewards: Tensor, dones: Tensor, valid: Tensor, failed: Sequence[int]
    ) -> tuple[list[float], list[int]]:
        returns, lengths, *still_open = episode_sums(rewards, dones, valid, self._open_return, self._open_length)
        self._open_return, self._open_length = still_open
        if failed:
            dones = dones.index_fill(0, torch.tensor(failed, device=rewards.device), False)
        return returns[dones].tolist(), lengths[dones].tolist()

    # --- saving ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "started": self.started,
            "feed": self.adapter.state_dict() if self.started else None,
            "memory": self.memory.state_dict(),
            "open_return": self._open_return.to("cpu", copy=True),
            "open_length": self._open_length.to("cpu", copy=True),
            **({} if self.noise is None else {"noise": self.noise.value.to("cpu", copy=True)}),
        }

    def load_state_dict(self, d: dict[str, Any]) -> bool:
        """Continue exactly. If the environment cannot restore its state, restart all episodes and return False."""
        if not d["started"]:
            return True
        if not self.adapter.load_state_dict(d["feed"]):
            self.start()
            return False
        self.memory.load_state_dict(d["memory"])
        self.memory.update_in_place()
        self._writes = None
        self._open_return = d["open_return"].to(self.adapter.device, copy=True)
        self._open_length = d["open_length"].to(self.adapter.device, copy=True)
        if self.noise is not None and "noise" in d:
            self.noise.value = d["noise"].to(self.adapter.device, copy=True)
        self.started = True
        return True


def collect(env: Any, policy: RecurrentPolicy, steps: int = 128, **options: Any) -> Iterator[Segment]:
    """Endless segments: `for segment in hf.collect(env, policy, steps=128)`. Options as `Collector`'s."""
    from holdfast.rollout.async_collector import AsyncCollector

    kind = AsyncCollector if getattr(env, "is_asynchronous", False) else Collector
    collector = kind(env, policy, steps, **options)
    while True:
        yield collector.rollout()


def episode_sums(
    rewards: Tensor, dones: Tensor, valid: Tensor, open_return: Tensor, open_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return and length [T, B] of each episode up to each step, and those of the open ones at the end [B].

    open_return, open_length: of the episodes that were open before the first step. Nothing here looks at a number.
    """
    # A non-finite reward would stay in these sums; the update that it spoils is counted and reported elsewhere.
    total = torch.where(rewards.isfinite(), rewards, 0.0).double().cumsum(0) + open_return
    length = valid.long().cumsum(0) + open_length
    # The step at which the episode before ended, -1 where there was none: [T + 1, B], the last row for open ones.
    steps = torch.arange(len(rewards), device=rewards.device).unsqueeze(1)
    ends = torch.where(dones, steps, -1).cummax(0).values
    before = torch.cat([torch.full_like(ends[:1], -1), ends])
    counted_return = torch.where(before >= 0, total.gather(0, before.clamp(min=0)), 0.0)
    counted_length = torch.where(before >= 0, length.gather(0, before.clamp(min=0)), 0)
    return (
        total - counted_return[:-1],
        length - counted_length[:-1],
        total[-1] - counted_return[-1],
        length[-1] - counted_length[-1],
    )


def _fill_missing_masks(masks: list[Tensor | None]) -> list[Tensor]:
    """Masks of each step; steps without one allow everything. [] if no step has a mask."""
    known = next((mask for mask in masks if mask is not None), None)
    return [] if known is None else [torch.ones_like(known) if mask is None else mask for mask in masks]


def _stack(parts: list[Any]) -> Any:
    return tree_map(lambda *x: torch.stack(x), parts[0], *parts[1:])
