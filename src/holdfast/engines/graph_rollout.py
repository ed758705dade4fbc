"""Whole rollouts as one CUDA graph: policy, environment, bootstrap and advantages of all T steps, launched once.

For our torch environments on a GPU. It computes what `Collector` computes, from the same parts.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from holdfast import state as state_ops
from holdfast.engines.cuda_graph import capturing, copy_into, side_stream
from holdfast.envs.base import TorchVectorEnv
from holdfast.policies.precision import autocast
from holdfast.rollout.collector import Collector
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
    """As `Collector`. The next rollout reuses the tensors of a segment: train on it first."""

    _graph: torch.cuda.CUDAGraph | None = None
    _scale: Tensor | None = None

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
        if self._graph is None:
            self._capture()
        assert self._graph is not None
        adapter, env = self.adapter, self.adapter.env
        copy_into(self._inputs, self._present())
        with span("policy, environment, GAE (one CUDA graph)"):
            self._graph.replay()
        rows, last, state, noise = self._outputs
        adapter.obs, adapter.resets, env.state = last
        if self.noise is not None:
            self.noise.value = noise
        self.memory.put(state_ops.clone(state), None)
        returns, lengths = self.finished_episodes(
            rows["rewards"], rows["terminated"] | rows["truncated"], rows["valid"]
        )
        torch.cuda.synchronize()
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
        )

    def _capture(self) -> None:
        generator = self.adapter.env.generator
        kept = torch.cuda.get_rng_state(), generator.get_state()
        self._inputs = tree_map(torch.clone, self._present())
        with side_stream():
            for _ in range(2):
                self._roll(2)
        torch.cuda.set_rng_state(kept[0])
        generator.set_state(kept[1])
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(generator)
        with capturing(graph):
            self._outputs = self._roll(self.steps)
        self._graph = graph

    def _roll(self, steps: int) -> tuple[dict[str, Any], tuple[Any, Tensor, Any], State, Any]:
        """All that a rollout does, as a function of `self._inputs`; nothing here looks at a number."""
        policy, env, adapter = self.policy, self.adapter.env, self.adapter
        obs, resets, state, env_state, noise = self._inputs
        names = ("obs", "actions", "resets", "rewards", "log_prob", "value", "terminated", "truncated", "valid")
        rows: dict[str, list[Any]] = {name: [] for name in names}
        self._chunk_states = []
        finals: list[Tensor] = []
        with autocast(self.adapter.device, self.autocast):
            for t in range(steps):
                if t % self.bptt == 0:
                    self._chunk_states.append(state_ops.clone(state))
                dist, value, state = policy.step(obs, state, resets, in_place=policy.core.supports_advance)
                if self.noise is None:
                    action = dist.sample()
                else:
                    noise = self.noise.draw(noise, resets)
                    action = dist.sample(noise)
                step = env.transition(env_state, adapter.to_env(action), env.draw())
                log_prob, valid = dist.log_prob(action).float(), torch.ones_like(resets)
                parts = (
                    obs,
                    action,
                    resets,
                    step.rewards,
                    log_prob,
                    value.float(),
                    step.terminated,
                    step.truncated,
                    valid,
                )
                for name, part in zip(names, parts):
                    rows[name].append(part)
                if env.can_truncate:  # V(final observation) from the state before the reset; used where truncated
                    final_obs = adapter.compose(step.final_obs, action, step.rewards)
                    finals.append(policy.step(final_obs, state).value.float())
                obs = adapter.compose(step.obs, action, step.rewards, fresh=step.done)
                resets, env_state = step.done, step.state
            last = policy.step(obs, state, resets).value.float()
        stacked = {name: tree_map(lambda *x: torch.stack(x), *parts) for name, parts in rows.items()}
        stacked["advantage"], stacked["returns"] = self.advantages(
            stacked, last, torch.stack(finals) if finals else None
        )
        return stacked, (obs, resets, env_state), state, noise
