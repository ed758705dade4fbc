"""Segments from environments: `hf.collect` for your own loop, `Collector` for the trainer.

    for segment in hf.collect(env, policy, steps=128):
        loss = hf.ppo_loss(policy, segment)

A segment is T steps of B environments with the state it started from. `Collector._play` is the only loop over the steps of a
rollout: engines write faster forms of `Acting`, the policy's part of a step, or capture the loop. Truncated episodes are
bootstrapped with V(final observation) from the state *before* the reset, leaving memory as it was. `VectorEnvAdapter` drives the
environment.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from holdfast.cores.base import reset_mode_of
from holdfast.memory import Memory
from holdfast.policies.base import RecurrentPolicy, autocast
from holdfast.policies.heads import parameters_of
from holdfast.rollout.advantages import segment_advantages
from holdfast.rollout.exploration import CorrelatedNoise, Noise
from holdfast.rollout.segment import Recording, Segment
from holdfast.spans import span
from holdfast.state import State, tree_map

RECENT_TRIALS = 100
"""`Collector.recent_trials`: the returns of their episodes."""


class Acted(NamedTuple):
    """A step of the policy, each [B, ...]. params: what the distribution is made from, if it is recorded."""

    action: Any
    log_prob: Tensor
    value: Any
    params: Any = None


class Acting:
    """Steps of a policy with a memory. A rollout calls `begin`, then for each step `state` where a chunk begins, `act`, and
    `add_final` where episodes were truncated, then `finish`."""

    def __init__(
        self,
        policy: RecurrentPolicy,
        memory: Memory,
        noise: Noise | None = None,
        autocast: torch.dtype | None = None,
        records: frozenset[str] = frozenset(),
    ) -> None:
        self.policy, self.memory, self.noise, self.autocast, self.records = policy, memory, noise, autocast, records
        self.device = policy.core.device()
        self._finals: dict[int, Tensor] = {}

    def begin(self, adapter: Any, steps: int) -> None:
        """Before a rollout: weights may have changed or moved. adapter: what the policy sees first."""
        self._finals = {}
        adapter.takes_every_final_obs = False

    def state(self, rows: Tensor | None) -> State:
        """The states before the next step, which nobody changes later. rows: of these environments; None: of all."""
        if rows is not None or self.memory.in_place:
            return self.memory.read(rows)
        return self.memory.take(self.memory.num_envs)[0]

    def act(self, obs: Any, resets: Tensor, mask: Any, rows: Tensor | None) -> Acted:
        """One step of the environments in `rows`, None: of all; memory and noise move on."""
        drawn = None if self.noise is None else self.noise.advance(resets, rows)
        options: dict[str, Any] = {} if drawn is None else {"noise": drawn}
        with autocast(self.device, self.autocast):
            if "params" in self.records:
                step, dist = self.policy.act_and_decode(obs, resets, rows, self.memory, mask, drawn)
                return Acted(*step, parameters_of(dist))
            return Acted(*self.policy.act(obs, resets, rows, memory=self.memory, action_mask=mask, **options))

    def value(self, obs: Any, resets: Tensor | None, rows: Tensor | None = None) -> Tensor:
        """V(obs) with the present state, which stays as it is."""
        with span("values for bootstrapping"), autocast(self.device, self.autocast):
            return self.policy.peek_value(obs, rows, resets=resets, memory=self.memory).float()

    def add_final(self, t: int, final_obs: Any, truncated: Tensor) -> None:
        """After step t: V(final observation) of the truncated episodes, from the state they had before the reset."""
        rows = truncated.nonzero().squeeze(1)
        values = self.value(tree_map(lambda o: o.index_select(0, rows), final_obs), None, rows)
        self._finals[t] = torch.zeros(len(truncated), device=truncated.device).index_copy(0, rows, values)

    def final_values(self, like: Tensor) -> Tensor | None:
        """V(final observation) [T, B] where episodes were truncated; None if none was."""
        if not self._finals:
            return None
        values = torch.zeros_like(like, dtype=torch.float32)
        for t, final in self._finals.items():
            values[t] = final
        return values

    def finish(self) -> None:
        """After a rollout: the memory holds the states that follow it."""


class Played(NamedTuple):
    """The steps of a rollout."""

    parts: dict[str, Any]  # fields of a segment
    chunk_states: list[State]
    failed: list[int]  # steps in which the environments failed and were rebuilt
    seconds_in_env: float


class Collector:
    """Rolls a policy through an environment, a segment at a time.

    memory: a new one unless given, so acting elsewhere with the same policy does not change it. bptt: length of the training
    chunks whose start states are kept (None: the whole segment). gamma, gae_lambda: of advantages and returns, which are computed
    at once, if gamma is not None and values are recorded. reward_scale: rewards are multiplied by it before; `segment.rewards` stay
    raw. records: what is kept besides what was played, out of log_prob, value, params and final_obs. noise: exploration noise; by
    default noise_correlation makes it, for Box actions (`exploration.py`). acting: what steps the policy.
    """

    prefetches = False
    """Whether `prefetch` does something."""
    choose_acting: Callable[[Collector], Acting] | None = None
    """Chooses what steps the policy, before each rollout: hooks come and go (`engines/choose.py`)."""

    def __init__(
        self,
        env: Any,
        policy: RecurrentPolicy,
        steps: int = 128,
        *,
        gamma: float | None = 0.99,
        gae_lambda: float = 0.95,
        bptt: int | None = None,
        memory: Memory | None = None,
        inputs: tuple[str, ...] = ("obs",),
        autocast: torch.dtype | None = None,
        noise_correlation: float = 0.0,
        seed: int | None = None,
        records: Collection[str] = ("log_prob", "value"),
        noise: Noise | None = None,
        acting: type[Acting] = Acting,
    ) -> None:
        from holdfast.rollout.vector_env import make_adapter  # imports gymnasium

        self.adapter = make_adapter(env, policy.core.device(), inputs, reset_mode_of(policy.core) == "never")
        self.recent_trials: deque[Any] = deque(maxlen=RECENT_TRIALS)
        self.policy, self.steps, self.gamma, self.gae_lambda = policy, steps, gamma, gae_lambda
        self.bptt = bptt or steps
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}")
        if steps % self.bptt:
            raise ValueError(f"bptt={bptt} must divide steps={steps}")
        self.memory = Memory(policy.core) if memory is None else memory
        self.records = frozenset(records)
        self._writes: int | None = None  # of the memory, after the last segment
        self.autocast = autocast
        self.seed = seed
        self.reward_scale: Any = 1.0
        self.noise = noise
        if noise is None:
            device = self.adapter.device
            space, count = self.adapter.action_space, self.adapter.num_envs
            self.noise = CorrelatedNoise.for_actions(space, count, noise_correlation, device)
        self.acting = acting(policy, self.memory, self.noise, autocast, self.records)
        self.started = False
        self._forget_open_episodes()

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
        if not self.started:
            self.start()
        with span("rollout"):
            segment = self._rollout()
        self._writes = self.memory.writes
        return segment

    def prefetch(self, segment: Segment) -> Segment | None:
        """Start the next rollout; the next `rollout()` returns it. Returns `segment` in tensors of its own, or None if this
        collector cannot."""
        return None

    def cancel_prefetch(self) -> None:
        """Be as before `prefetch`. Call it before you save or change what a rollout uses."""

    def _notice_other_writers(self) -> None:
        if self._writes is not None and self._writes != self.memory.writes:
            warnings.warn(
                "other code has used this collector's memory since its last segment, so its environments would continue "
                "from wrong states; give each loop its own memory: memory=hf.Memory(policy.core)",
                stacklevel=4,
            )

    # --- a rollout ---------------------------------------------------------------------------------------------------

    def _rollout(self) -> Segment:
        began = time.perf_counter()
        played = self._play(self.steps, self.acting if self.choose_acting is None else self.choose_acting(self))
        parts = played.parts
        ends = parts["terminated"] | parts["truncated"]
        returns, lengths = self._finished_episodes(parts["rewards"], ends, parts["valid"], played.failed)
        in_env = played.seconds_in_env
        seconds = {"env": in_env, "policy": time.perf_counter() - began - in_env}
        return self._segment(played, episode_returns=returns, episode_lengths=lengths, seconds=seconds)

    def _play(self, steps: int, acting: Acting) -> Played:
        """`steps` steps of every environment: read memory, act, step the environment, store. Also what a captured rollout runs,
        so nothing here looks at a number on the device."""
        adapter, records, clock = self.adapter, self.records, time.perf_counter
        recording, failed, in_env = Recording(steps, adapter.num_envs, min(self.bptt, steps)), [], 0.0
        recorded = records & _OF_THE_POLICY
        acting.begin(adapter, steps)
        for turn in adapter.turns(steps):
            recording.keep_state(turn, acting.state)
            obs, resets, valid, mask = adapter.seen(turn.rows)
            with span("policy"):
                acted = acting.act(obs, resets, mask, turn.rows)
            recording.add(turn, obs=obs, resets=resets, valid=valid, action_mask=mask, actions=acted.action)
            recording.add(turn, **{name: getattr(acted, name) for name in recorded})
            before = clock()
            with span("environment"):
                outcomes = adapter.step_turn(acted.action, turn)
            in_env += clock() - before
            for came, out in outcomes:
                recording.add(came, rewards=out.rewards, terminated=out.terminated, truncated=out.truncated)
                if out.failed:
                    failed.append(came.t)
                if out.trial_returns is not None:
                    self.recent_trials.extend(out.trial_returns[(out.terminated | out.truncated).cpu().numpy()])
                if out.final_obs is not None and "value" in records:
                    acting.add_final(came.t, out.final_obs, out.truncated)
                if out.final_obs is not None and "final_obs" in records:
                    recording.add_final(came.t, out.final_obs, out.truncated)
        parts = recording.finished()
        if "value" in records:
            parts["last_value"] = acting.value(adapter.obs, adapter.resets)
            parts["final_value"] = acting.final_values(parts["resets"])
        acting.finish()
        return Played(parts, recording.chunk_states(), failed, in_env)

    def _segment(self, played: Played, **known: Any) -> Segment:
        """The segment of what was played. known: its episodes and seconds."""
        parts, chunks = played.parts, played.chunk_states
        for name in ("value", "log_prob"):
            if name in parts:
                parts[name] = parts[name].float()
        if played.failed:
            steps = torch.tensor(played.failed, device=parts["terminated"].device)
            parts["failed"] = torch.zeros_like(parts["terminated"]).index_fill(0, steps, True)
        segment = Segment(**parts, start_state=chunks[0], chunk_states=chunks, **known)
        if not self.adapter.has_dummy_steps:
            segment.mark_all_valid()
        if self.gamma is not None and segment.value is not None:
            segment.advantage, segment.returns = segment_advantages(
                segment, self.gamma, self.gae_lambda, self.reward_scale
            )
        return segment

    def _finished_episodes(
        self, rewards: Tensor, dones: Tensor, valid: Tensor, failed: list[int]
    ) -> tuple[list[float], list[int]]:
        """Returns and lengths of the episodes that ended here, in order of time; interrupted ones are not counted."""
        with span("returns of the episodes that ended"):
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


_OF_THE_POLICY = frozenset(("log_prob", "value", "params"))


def collect(env: Any, policy: RecurrentPolicy, steps: int = 128, **options: Any) -> Iterator[Segment]:
    """Endless segments: `for segment in hf.collect(env, policy, steps=128)`. Options as `Collector`'s."""
    collector = Collector(env, policy, steps, **options)
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
