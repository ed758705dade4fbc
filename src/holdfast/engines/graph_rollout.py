"""Whole rollouts as one CUDA graph: policy, environment, bootstrap and advantages of all T steps, launched once.

For our torch environments on a GPU. It computes what `Collector` computes, from the same parts.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from holdfast import state as state_ops
from holdfast.engines import fused_policy
from holdfast.engines.cuda_graph import NotCapturable, capturing, copy_into, rehearsal, side_stream
from holdfast.engines.fused_policy import FusedPolicy, FusedSteps
from holdfast.envs.base import TorchVectorEnv
from holdfast.policies.actor_critic import ActorCritic
from holdfast.policies.precision import autocast
from holdfast.rollout.collector import Collector, episode_sums
from holdfast.rollout.segment import Segment
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


class GraphCollector(Collector):
    """As `Collector`, which plays the rollout itself if the policy waits for the GPU. The next rollout reuses the tensors of a
    segment: train on it first."""

    _graph: torch.cuda.CUDAGraph | None = None
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

    def _rollout(self) -> Segment:
        if not self.started:
            self.start()
        began = time.perf_counter()
        if self._graph is None and self.slowed_by is None:
            self._capture()
        if self.slowed_by is not None:
            return super()._rollout()
        assert self._graph is not None
        adapter, env = self.adapter, self.adapter.env
        copy_into(self._inputs, self._present())
        with span("policy, environment, GAE (one CUDA graph)"):
            self._graph.replay()
        rows, last, state, noise, _ = self._outputs
        adapter.obs, adapter.resets, env.state = last
        if self.noise is not None:
            self.noise.value = noise
        self.memory.put(state_ops.clone(state), None)
        with span("returns of the episodes that ended"):
            returns, lengths = self._ended_episodes()
        chunks = self._chunk_states
        return Segment(
            **rows,
            start_state=chunks[0],
            chunk_states=chunks,
            episode_returns=returns,
            episode_lengths=lengths,
            seconds={"env": 0.0, "policy": time.perf_counter() - began},
        )

    def _present(self) -> State:
        return (
            self.adapter.obs,
            self.adapter.resets,
            self.memory.take(self.adapter.num_envs)[0],
            self.adapter.env.state,
            () if self.noise is None else self.noise.value,
            (self._open_return, self._open_length),
        )

    def _ended_episodes(self) -> tuple[list[float], list[int]]:
        """As `finished_episodes`. It waits for the rollout."""
        returns, lengths, ended, *still_open = self._outputs[-1]
        self._open_return, self._open_length = still_open
        at = ended.flatten().nonzero().squeeze(1)
        picked = [part.flatten().index_select(0, at) for part in (returns, lengths.view(torch.float64))]
        on_host = torch.stack(picked).cpu()  # one copy: the bits of the lengths travel as floats
        return on_host[0].tolist(), on_host[1].view(torch.int64).tolist()

    def _capture(self) -> None:
        generator = self.adapter.env.generator
        kept = torch.cuda.get_rng_state(), generator.get_state()
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
                    action = dist.sample() if self.noise is None else dist.sample(noise)
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
