"""Whole rollouts as one CUDA graph: the collector's loop over policy and environment, captured and launched once.

For our torch environments on a GPU. What is captured is `Collector._play`; this module holds how it is captured and replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from holdfast import state as state_ops
from holdfast.engines.cuda_graph import NotCapturable, capturing, copy_into, exclusive_gpu, rehearsal, side_stream
from holdfast.engines.fused_policy import FusedPolicy, FusedSteps
from holdfast.envs.base import TorchVectorEnv
from holdfast.policies.base import autocast
from holdfast.policies.heads import draw_action, parameters_of
from holdfast.rollout.collector import Acted, Acting, Collector, Played, episode_sums
from holdfast.rollout.segment import Later, Segment
from holdfast.spans import span
from holdfast.state import State, tree_map


def obstacle(env: Any, device: torch.device) -> str | None:
    """Why rollouts in this environment cannot be one graph; None if they can."""
    if not isinstance(env, TorchVectorEnv):
        return f"{type(env).__name__} is not a torch environment of holdfast.envs"
    if not env.can_be_captured:
        return f"a step of {type(env).__name__} cannot be captured"
    if env.device.type != "cuda":
        return "the environment is not on the GPU"
    return None


class CapturedActing(Acting):
    """Steps of a policy inside a capture: nothing looks at a number, and memory is not touched.

    present: the states of all environments, set before a rollout. fused: the policy's first and last layers as single launches,
    if they can be.
    """

    present: State = None
    fused: FusedPolicy | None = None
    _steps: FusedSteps | None = None

    def begin(self, adapter: Any, steps: int) -> None:
        super().begin(adapter, steps)
        adapter.takes_every_final_obs = True
        if self.fused is not None:
            self._steps = FusedSteps(self.fused, steps, adapter.resets, drawn=self.noise is not None)
        self._t = 0

    def state(self, rows: Tensor | None) -> State:
        return state_ops.clone(self.present)

    def act(self, obs: Any, resets: Tensor, mask: Any, rows: Tensor | None) -> Acted:
        noise, params = None if self.noise is None else self.noise.advance(resets), None
        with autocast(self.device, self.autocast):
            if self._steps is None:
                dist, value, self.present = self.policy.step(
                    obs, self.present, resets, action_mask=mask, in_place=self.policy.core.supports_advance
                )
                action = draw_action(dist, noise)
                log_prob = dist.log_prob(action).float()
                params = parameters_of(dist) if "params" in self.records else None
            else:
                any_noise = torch.empty(()) if noise is None else noise
                action, log_prob, value, self.present = self._steps.act(self._t, obs, self.present, resets, any_noise)
        self._t += 1
        return Acted(action, log_prob, None if value is None else value.float(), params)

    def value(self, obs: Any, resets: Tensor | None, rows: Tensor | None = None) -> Tensor:
        with autocast(self.device, self.autocast):
            if self._steps is None:
                return self.policy.step(obs, self.present, resets).value.float()
            return self._steps.value(obs, self.present, resets)

    def add_final(self, t: int, final_obs: Any, truncated: Tensor) -> None:
        self._finals[t] = self.value(final_obs, None)

    def final_values(self, like: Tensor) -> Tensor | None:
        return torch.stack(list(self._finals.values())) if self._finals else None


class GraphCollector(Collector):
    """As `Collector`, whose loop it captures. The next rollout reuses the tensors of a segment: train on it first. If the policy
    waits for the GPU, rollouts are played step by step (`refused`)."""

    prefetches = True
    refused: Callable[[str], None] = staticmethod(lambda reason: None)
    """Told why the loop cannot be captured."""
    make_fused: Callable[[], FusedPolicy | None] = staticmethod(lambda: None)
    """The policy's layers in fused form, if a captured rollout uses them."""

    _captured: CapturedRollout | None = None
    _prefetched: Segment | None = None  # what `rollout` will return
    _random: Sequence[tuple[Tensor, Tensor]] = ()  # states of the random generators before and after it
    _was_refused = False

    # --- a rollout that starts before it is asked for -----------------------------------------------------------------

    def rollout(self) -> Segment:
        if self._prefetched is None:
            return super().rollout()
        self._notice_other_writers()
        segment, self._prefetched = self._prefetched, None
        return segment

    def prefetch(self, segment: Segment) -> Segment | None:
        if self._captured is None or not self.prefetches:
            return None
        kept = segment.map_tensors(torch.clone)
        before = [generator.get_state() for generator in self._generators()]
        self._prefetched = super().rollout()
        self._random = list(zip(before, [g.get_state() for g in self._generators()]))
        return kept

    @torch.no_grad()
    def cancel_prefetch(self) -> None:
        if self._prefetched is None:
            return
        self._prefetched = None
        for generator, (before, after) in zip(self._generators(), self._random):
            # Otherwise another run of this process has drawn from it since.
            if torch.equal(generator.get_state(), after):
                generator.set_state(before)
        assert self._captured is not None
        self._set(tree_map(torch.clone, self._captured.inputs[0]))
        self.memory.put(state_ops.clone(self._captured.start_state), None)
        self._writes = self.memory.writes

    def start(self) -> None:
        self._prefetched = None
        super().start()

    def load_state_dict(self, d: dict[str, Any]) -> bool:
        self._prefetched = None
        return super().load_state_dict(d)

    def _generators(self) -> tuple[torch.Generator, torch.Generator]:
        """All that a rollout draws from."""
        device = self.adapter.device
        if device.type != "cuda":
            return self.adapter.env.generator, torch.default_generator
        index = torch.cuda.current_device() if device.index is None else device.index
        return self.adapter.env.generator, torch.cuda.default_generators[index]

    # --- a rollout ----------------------------------------------------------------------------------------------------

    def _rollout(self) -> Segment:
        if self._captured is None and not self._was_refused:
            try:
                self._captured = self._capture()
            except NotCapturable as reason:
                self._was_refused = True
                self.refused(str(reason))
        if self._captured is None:
            return super()._rollout()
        began = self._captured.moment()
        copy_into(self._captured.inputs, self.rollout_inputs())
        with span("policy and environment (one CUDA graph)"):
            self._captured.replay()
        over = self._captured.moment()
        played, after, state, sums = self._captured.outputs
        self._set(after)
        self.memory.put(state_ops.clone(state), None)
        # Copies, since they may be read after the next rollout.
        episodes = EpisodesLater(self._captured, [part.clone() for part in sums], began, over)
        return self._segment(
            played._replace(parts=dict(played.parts)),
            episode_returns=Later(lambda: episodes.read()[0]),
            episode_lengths=Later(lambda: episodes.read()[1]),
            seconds=episodes.seconds,
        )

    def rollout_inputs(self) -> tuple[dict[str, Any], State]:
        """What a rollout starts from: what the environments show, and the states."""
        return self._present(), self.memory.take(self.adapter.num_envs)[0]

    def _present(self) -> dict[str, Any]:
        """What a rollout starts from, besides the memory."""
        adapter = self.adapter
        return {
            "obs": adapter.obs,
            "resets": adapter.resets,
            "valid": adapter.valid,
            "mask": () if adapter.action_mask is None else adapter.action_mask,
            "env": adapter.env.state,
            "noise": () if self.noise is None else self.noise.value,
            "open": (self._open_return, self._open_length),
        }

    def _set(self, present: dict[str, Any]) -> None:
        """Continue from there. These tensors are used as they are."""
        adapter = self.adapter
        adapter.obs, adapter.resets, adapter.valid = present["obs"], present["resets"], present["valid"]
        adapter.action_mask = None if isinstance(present["mask"], tuple) else present["mask"]
        adapter.env.state = present["env"]
        self._open_return, self._open_length = present["open"]
        if self.noise is not None:
            self.noise.value = present["noise"]

    def _capture(self) -> CapturedRollout:
        return CapturedRollout(self, self._make_acting())

    def _make_acting(self) -> CapturedActing:
        acting = CapturedActing(self.policy, self.memory, self.noise, self.autocast, self.records)
        acting.fused = self.make_fused()
        return acting

    def roll(self, inputs: tuple[dict[str, Any], State], steps: int, acting: CapturedActing) -> Any:
        """All that a rollout does, as a function of `inputs`; nothing here looks at a number. Returns what was played, what the
        next rollout starts from, the states afterwards, and the sums of episodes."""
        before = self._present()
        present, acting.present = inputs
        self._set(present)
        try:
            with autocast(self.adapter.device, self.autocast):  # around all steps: weights are converted once
                played = self._play(steps, acting)
            parts = played.parts
            ended = parts["terminated"] | parts["truncated"]
            sums = episode_sums(parts["rewards"], ended, parts["valid"], self._open_return, self._open_length)
            returns, lengths, self._open_return, self._open_length = sums
            return played, self._present(), acting.present, (returns, lengths, ended)
        finally:
            self._set(before)
            self.adapter.takes_every_final_obs = False


class CapturedRollout:
    """The graph of a collector's rollout; `NotCapturable` if the policy waits for the GPU."""

    def __init__(self, collector: GraphCollector, acting: CapturedActing) -> None:
        generator = collector.adapter.env.generator
        kept = torch.cuda.get_rng_state(), generator.get_state()
        self.device = collector.adapter.device
        self.reader: torch.cuda.Stream | None = torch.cuda.Stream()
        self.inputs = tree_map(torch.clone, collector.rollout_inputs())
        try:
            with side_stream():
                collector.roll(self.inputs, 2, acting)
                with rehearsal():
                    collector.roll(self.inputs, 2, acting)
        finally:
            torch.cuda.set_rng_state(kept[0])
            generator.set_state(kept[1])
        self._graph = torch.cuda.CUDAGraph()
        self._graph.register_generator_state(generator)
        with capturing(self._graph):
            self.outputs = collector.roll(self.inputs, collector.steps, acting)

    @property
    def start_state(self) -> State:
        """Where the last rollout started."""
        played: Played = self.outputs[0]
        return played.chunk_states[0]

    def replay(self) -> None:
        self._graph.replay()

    def moment(self) -> Any:
        """Now, on the GPU; its clock counts only while the GPU works on what was queued."""
        moment = torch.cuda.Event(enable_timing=True)
        moment.record()
        return moment


class EpisodesLater:
    """The episodes that ended in a rollout and how long it took, read when somebody first asks, which waits for the rollout and
    for nothing queued later."""

    def __init__(self, rollout: Any, sums: list[Tensor], began: Any, over: Any) -> None:
        self._rollout, self._sums, self._began, self._over = rollout, sums, began, over
        self._read: tuple[list[float], list[int]] | None = None
        self.seconds = {"env": 0.0, "policy": 0.0}

    def read(self) -> tuple[list[float], list[int]]:
        """Returns and lengths, in order of time."""
        if self._read is None:
            with exclusive_gpu(self._rollout.device), span("returns of the episodes that ended"):
                self._read = self._wait()
        return self._read

    def _wait(self) -> tuple[list[float], list[int]]:
        reader = self._rollout.reader
        if reader is None:  # played on a CPU
            self.seconds["policy"] = self._over - self._began
            return _picked(*self._sums)
        reader.wait_event(self._over)
        try:
            with torch.cuda.stream(reader):
                episodes = _picked(*self._sums)
        finally:
            # If no episode ended, nothing was copied to the host, so nothing has waited. The allocator knows only the stream
            # that made these tensors: it would give their memory to the next operation there while this stream reads them.
            reader.synchronize()
        self.seconds["policy"] = self._began.elapsed_time(self._over) / 1e3
        return episodes


def _picked(returns: Tensor, lengths: Tensor, ended: Tensor) -> tuple[list[float], list[int]]:
    """The entries where an episode ended, in order of time."""
    at = ended.flatten().nonzero().squeeze(1)
    picked = [part.flatten().index_select(0, at) for part in (returns, lengths.view(torch.float64))]
    on_host = torch.stack(picked).cpu()  # one copy: the bits of the lengths travel as floats
    return on_host[0].tolist(), on_host[1].view(torch.int64).tolist()
