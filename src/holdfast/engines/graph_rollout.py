"""Whole rollouts as one CUDA graph: policy, environment, bootstrap and advantages of all T steps, launched once.

For our torch environments on a GPU. It computes what `Collector` computes, from the same parts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from holdfast import state as state_ops
from holdfast.engines import fused_policy
from holdfast.engines.cuda_graph import NotCapturable, capturing, copy_into, gpu_turn, rehearsal, side_stream
from holdfast.engines.fused_policy import FusedPolicy, FusedSteps
from holdfast.envs.base import TorchVectorEnv
from holdfast.policies.actor_critic import ActorCritic
from holdfast.policies.heads import draw_action
from holdfast.policies.precision import autocast
from holdfast.rollout.collector import Collector, episode_sums
from holdfast.rollout.segment import Segment
from holdfast.spans import span
from holdfast.state import State, map_tensors, tree_map

Episodes = tuple[Any, Any, float]
"""Returns and lengths of the episodes that ended in a rollout, and its seconds."""


def obstacle(env: Any, device: torch.device) -> str | None:
    """Why rollouts in this environment cannot be one graph; None if they can."""
    if not isinstance(env, TorchVectorEnv):
        return f"{type(env).__name__} is not a torch environment of holdfast.envs"
    if not env.can_be_captured:
        return f"a step of {type(env).__name__} cannot be captured"
    if env.device.type != "cuda":
        return "the environment is not on the GPU"
    return None


class GraphSegment(Segment):
    """A segment that may still be being played. Work queued after it finds its tensors finished; its episodes, and how long it
    took, are read when somebody first asks for them, which waits for the rollout and for nothing queued later."""

    read: Callable[[], Episodes] | None = None
    launched = 0.0  # on the clock of `time.perf_counter`
    _episodes: Episodes = ((), (), 0.0)

    def _ended(self) -> Episodes:
        if self.read is not None:
            self._episodes = self.read()
            self.read = None
            self.seconds["policy"] = self._episodes[2]
        return self._episodes

    @property
    def over_at(self) -> float:
        """When the rollout was over, on the clock of `time.perf_counter`."""
        return self.launched + self._ended()[2]

    @property
    def episode_returns(self) -> Any:
        return self._ended()[0]

    @episode_returns.setter
    def episode_returns(self, returns: list[float]) -> None:
        self._episodes = (returns, *self._episodes[1:])

    @property
    def episode_lengths(self) -> Any:
        return self._ended()[1]

    @episode_lengths.setter
    def episode_lengths(self, lengths: list[int]) -> None:
        self._episodes = (self._episodes[0], lengths, self._episodes[2])


class GraphCollector(Collector):
    """As `Collector`, which plays the rollout itself if the policy waits for the GPU; otherwise nothing does (`GraphSegment`).
    The next rollout reuses the tensors of a segment: train on it first."""

    goes_ahead = True  # False: `go_ahead` is refused

    _graph: torch.cuda.CUDAGraph | None = None
    _reader: torch.cuda.Stream | None = None  # None without a GPU
    _ahead: GraphSegment | None = None  # what `rollout` will give
    _random: Sequence[tuple[Tensor, Tensor]] = ()  # states of the random generators before and after it
    _scale: Tensor | None = None
    _fused: FusedPolicy | None = None

    @property
    def reward_scale(self) -> Any:
        """A tensor, so that a captured rollout reads its current value."""
        return self._scale

    @reward_scale.setter
    def reward_scale(self, value: float) -> None:
        if self._scale is None:
            self._scale = torch.ones((), device=self.adapter.device)
        self._scale.fill_(value)

    # --- a rollout that starts before it is asked for -----------------------------------------------------------------

    def rollout(self) -> Segment:
        if self._ahead is None:
            return super().rollout()
        self._notice_other_writers()
        segment, self._ahead = self._ahead, None
        segment.launched = time.perf_counter()  # the GPU was not idle until then
        return segment

    def go_ahead(self, segment: Segment) -> Segment | None:
        if self._graph is None or not self.goes_ahead:
            return None
        kept = copied(segment)
        before = [generator.get_state() for generator in self._generators()]
        ahead = super().rollout()
        assert isinstance(ahead, GraphSegment)
        self._ahead, self._random = ahead, list(zip(before, [g.get_state() for g in self._generators()]))
        return kept

    @torch.no_grad()
    def take_back(self) -> None:
        if self._ahead is None:
            return
        self._ahead = None
        for generator, (before, after) in zip(self._generators(), self._random):
            if torch.equal(
                generator.get_state(), after
            ):  # otherwise another run of this process has drawn from it since
                generator.set_state(before)
        adapter = self.adapter
        obs, resets, _, env_state, noise, still_open = tree_map(torch.clone, self._inputs)  # a rollout leaves them
        adapter.obs, adapter.resets, adapter.env.state = obs, resets, env_state
        if self.noise is not None:
            self.noise.value = noise
        self.memory.put(state_ops.clone(self._chunk_states[0]), None)  # cores may advance the input in place
        self._writes = self.memory.writes
        self._open_return, self._open_length = still_open

    def start(self) -> None:
        self._ahead = None
        super().start()

    def load_state_dict(self, d: dict[str, Any]) -> bool:
        self._ahead = None
        return super().load_state_dict(d)

    def _generators(self) -> tuple[torch.Generator, torch.Generator]:
        """All that a rollout draws from."""
        device = self.adapter.device
        on_gpu = device.type == "cuda"
        return self.adapter.env.generator, (
            torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
            if on_gpu
            else torch.default_generator
        )

    # --- a rollout ----------------------------------------------------------------------------------------------------

    def _rollout(self) -> Segment:
        if not self.started:
            self.start()
        launched = time.perf_counter()
        if self._graph is None and self.slowed_by is None:
            self._capture()
        if self.slowed_by is not None:
            return super()._rollout()
        assert self._graph is not None
        adapter, env, began = self.adapter, self.adapter.env, self._moment()
        copy_into(self._inputs, self._present())
        with span("policy, environment, GAE (one CUDA graph)"):
            self._graph.replay()
        rows, last, state, noise, _ = self._outputs
        adapter.obs, adapter.resets, env.state = last
        if self.noise is not None:
            self.noise.value = noise
        self.memory.put(state_ops.clone(state), None)
        # Copies, since they may be read after the next rollout.
        returns, lengths, ended = (part.clone() for part in self._outputs[-1][:3])
        self._open_return, self._open_length = self._outputs[-1][3:]
        chunks, over = self._chunk_states, self._moment()
        segment = GraphSegment(**rows, start_state=chunks[0], chunk_states=chunks, seconds={"env": 0.0, "policy": 0.0})
        segment.launched = launched
        segment.read = lambda: self._ended_episodes(returns, lengths, ended, began, over)
        return segment

    def _moment(self) -> Any:
        """Now, on the GPU; its clock counts only while the GPU works on what was queued."""
        if self._reader is None:
            return time.perf_counter()
        moment = torch.cuda.Event(enable_timing=True)
        moment.record()
        return moment

    def _present(self) -> State:
        return (
            self.adapter.obs,
            self.adapter.resets,
            self.memory.take(self.adapter.num_envs)[0],
            self.adapter.env.state,
            () if self.noise is None else self.noise.value,
            (self._open_return, self._open_length),
        )

    def _ended_episodes(self, returns: Tensor, lengths: Tensor, ended: Tensor, began: Any, over: Any) -> Episodes:
        """As `finished_episodes`, and the rollout's seconds. Waits for the rollout alone."""
        with gpu_turn(self.adapter.device), span("returns of the episodes that ended"):
            if self._reader is None:
                return (*_picked(returns, lengths, ended), over - began)
            self._reader.wait_event(over)
            try:
                with torch.cuda.stream(self._reader):
                    episodes = _picked(returns, lengths, ended)
            finally:
                # If no episode ended, nothing was copied to the host, so nothing has waited. The allocator knows only the stream
                # that made these tensors: it would give their memory to the next operation there while this stream reads them.
                self._reader.synchronize()
            return (*episodes, began.elapsed_time(over) / 1e3)

    def _capture(self) -> None:
        generator = self.adapter.env.generator
        kept = torch.cuda.get_rng_state(), generator.get_state()
        self._reader = torch.cuda.Stream()
        self._inputs = tree_map(torch.clone, self._present())
        precision = "fp32" if self.autocast is None else str(self.autocast)
        if fused_policy.obstacle(self.policy, precision) is None:
            assert isinstance(self.policy, ActorCritic)
            self._fused = FusedPolicy(self.policy)
        try:
            with side_stream():
                self._roll(2)
                with rehearsal():
                    self._roll(2)
        except NotCapturable as reason:
            self.slowed_by = str(reason)
            return
        finally:
            torch.cuda.set_rng_state(kept[0])
            generator.set_state(kept[1])
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(generator)
        with capturing(graph):
            self._outputs = self._roll(self.steps)
        self._graph = graph

    def _value(self, obs: Any, state: State, resets: Tensor | None) -> Tensor:
        return self.policy.step(obs, state, resets).value.float()

    def _roll(self, steps: int) -> tuple[dict[str, Any], tuple[Any, Tensor, Any], State, Any, tuple[Tensor, ...]]:
        """All that a rollout does, as a function of `self._inputs`; nothing here looks at a number."""
        policy, env, adapter = self.policy, self.adapter.env, self.adapter
        obs, resets, state, env_state, noise, open_episodes = self._inputs
        names = ("obs", "actions", "resets", "rewards", "log_prob", "value", "terminated", "truncated")
        rows: dict[str, list[Any]] = {name: [] for name in names}
        self._chunk_states = []
        finals: list[Tensor] = []
        fused = None if self._fused is None else FusedSteps(self._fused, steps, resets, drawn=self.noise is not None)
        value_of = self._value if fused is None else fused.value
        with autocast(self.adapter.device, self.autocast):
            for t in range(steps):
                if t % self.bptt == 0:
                    self._chunk_states.append(state_ops.clone(state))
                if self.noise is not None:
                    noise = self.noise.draw(noise, resets)
                if fused is None:
                    dist, value, state = policy.step(obs, state, resets, in_place=policy.core.supports_advance)
                    action = draw_action(dist, None if self.noise is None else noise)
                    log_prob = dist.log_prob(action).float()
                else:
                    action, log_prob, value, state = fused.act(t, obs, state, resets, noise)
                step = env.transition(env_state, adapter.to_env(action), env.draw())
                parts = (obs, action, resets, step.rewards, log_prob, value.float(), step.terminated, step.truncated)
                for name, part in zip(names, parts):
                    rows[name].append(part)
                if env.can_truncate:  # V(final observation) from the state before the reset; used where truncated
                    final_obs = adapter.compose(step.final_obs, action, step.rewards)
                    finals.append(value_of(final_obs, state, None))
                obs = adapter.compose(step.obs, action, step.rewards, fresh=step.done)
                resets, env_state = step.done, step.state
            last = value_of(obs, state, resets)
        in_place = {} if fused is None else fused.written()
        stacked = {
            name: in_place[name] if name in in_place else tree_map(lambda *x: torch.stack(x), *parts)
            for name, parts in rows.items()
        }
        stacked["valid"] = torch.ones_like(stacked["resets"])
        stacked["advantage"], stacked["returns"] = self.advantages(
            stacked, last, torch.stack(finals) if finals else None
        )
        ended = stacked["terminated"] | stacked["truncated"]
        returns, lengths, *still_open = episode_sums(stacked["rewards"], ended, stacked["valid"], *open_episodes)
        return stacked, (obs, resets, env_state), state, noise, (returns, lengths, ended, *still_open)


def copied(segment: Segment) -> Segment:
    """The same numbers in tensors of their own; episodes that were not read yet are read when they are asked for."""
    parts = {field.name: getattr(segment, field.name) for field in fields(segment) if "episode" not in field.name}
    own = {name: part if name == "seconds" else map_tensors(torch.clone, part) for name, part in parts.items()}
    if not isinstance(segment, GraphSegment):
        return Segment(**own, episode_returns=segment.episode_returns, episode_lengths=segment.episode_lengths)
    copy = GraphSegment(**own)
    copy.read, copy.launched, copy._episodes = segment.read, segment.launched, segment._episodes
    return copy


def _picked(returns: Tensor, lengths: Tensor, ended: Tensor) -> tuple[list[float], list[int]]:
    """The entries where an episode ended, in order of time."""
    at = ended.flatten().nonzero().squeeze(1)
    picked = [part.flatten().index_select(0, at) for part in (returns, lengths.view(torch.float64))]
    on_host = torch.stack(picked).cpu()  # one copy: the bits of the lengths travel as floats
    return on_host[0].tolist(), on_host[1].view(torch.int64).tolist()
