"""Training on a GPU without waiting for Python: a whole rollout, and each minibatch, replayed as a CUDA graph.

`GraphCollector` plays our torch environments: policy, environment, bootstrap and advantages of all T steps are one
graph, launched once per rollout. `GraphedMinibatch` is one optimiser step of PPO. Both compute what `Collector` and
`PPO` compute, from the same parts; what they cannot take stays with those.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from holdfast import state as state_ops
from holdfast.rollout.collector import Collector
from holdfast.rollout.segment import Segment
from holdfast.state import State, tree_map


def can_graph(env: Any, device: torch.device, inputs: tuple[str, ...]) -> bool:
    """Whether rollouts in this environment can be one graph: ours, on the same GPU, observations alone."""
    from holdfast.envs.base import TorchVectorEnv

    return (
        device.type == "cuda" and isinstance(env, TorchVectorEnv) and env.device.type == "cuda" and inputs == ("obs",)
    )


@contextmanager
def _side_stream() -> Iterator[None]:
    """Warm-up runs on a stream of its own, as capturing requires."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def _capturing(graph: torch.cuda.CUDAGraph) -> Any:
    """Work inside goes into the graph. With NCCL its watchdog looks at events meanwhile, in a thread of its own."""
    joined = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.cuda.graph(graph, capture_error_mode="thread_local" if joined else "global")


def _copy(into: State, source: State) -> None:
    tree_map(lambda a, b: a.copy_(b), into, source)


class GraphCollector(Collector):
    """As `Collector`. The tensors of a segment are reused by the next rollout: train on it first."""

    _graph: torch.cuda.CUDAGraph | None = None
    _scale: Tensor | None = None

    @property
    def reward_scale(self) -> Any:
        """A tensor, so that a captured rollout reads its present value."""
        return self._scale

    @reward_scale.setter
    def reward_scale(self, value: float) -> None:
        if self._scale is None:
            self._scale = torch.ones((), device=self.feed.device)
        self._scale.fill_(value)

    @torch.no_grad()
    def rollout(self) -> Segment:
        if not self.started:
            self.start()
        began = time.perf_counter()
        if self._graph is None:
            self._capture()
        assert self._graph is not None
        feed, env = self.feed, self.feed.env
        _copy(self._inputs, self._present())
        self._graph.replay()
        rows, last, state = self._outputs
        feed.obs, feed.resets, env.state = last
        self.memory.put(state_ops.clone(state), None)
        returns, lengths = self._episodes(rows["rewards"], rows["terminated"] | rows["truncated"], rows["valid"])
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
        return (self.feed.obs, self.feed.resets, self.memory.take(self.feed.num_envs, None)[0], self.feed.env.state)

    def _capture(self) -> None:
        generator = self.feed.env.generator
        kept = torch.cuda.get_rng_state(), generator.get_state()
        self._inputs = tree_map(torch.clone, self._present())
        with _side_stream():
            for _ in range(2):
                self._roll(2)
        torch.cuda.set_rng_state(kept[0])
        generator.set_state(kept[1])
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(generator)
        with _capturing(graph):
            self._outputs = self._roll(self.steps)
        self._graph = graph

    def _roll(self, steps: int) -> tuple[dict[str, Any], tuple[Any, Tensor, Any], State]:
        """All that a rollout does, as a function of `self._inputs`; nothing here looks at a number."""
        policy, env, feed = self.policy, self.feed.env, self.feed
        obs, resets, state, env_state = self._inputs
        names = ("obs", "actions", "resets", "rewards", "log_prob", "value", "terminated", "truncated", "valid")
        rows: dict[str, list[Any]] = {name: [] for name in names}
        self._chunk_states = []
        finals: list[Tensor] = []
        with self._precision():
            for t in range(steps):
                if t % self.bptt == 0:
                    self._chunk_states.append(state_ops.clone(state))
                y, state = policy.core(policy._encode(obs), state, resets)
                dist, value = policy._decode(y, None)
                action = dist.sample()
                step = env.transition(env_state, feed.to_env(action), env.draw())
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
                    y, _ = policy.core(policy._encode(step.final_obs), state, None)
                    finals.append(policy._decode(y, None)[1].float())
                obs, resets, env_state = step.obs, step.done, step.state
            y, _ = policy.core(policy._encode(obs), state, resets)
            last = policy._decode(y, None)[1].float()
        stacked = {name: tree_map(lambda *x: torch.stack(x), *parts) for name, parts in rows.items()}
        stacked["advantage"], stacked["returns"] = self._advantages(
            stacked, last, torch.stack(finals) if finals else None
        )
        return stacked, (obs, resets, env_state), state


class GraphedMinibatch:
    """One minibatch of PPO (select, forward, backward, optimiser step) as a graph over copies of the rollout.

    gradients: from a part of the rollout and this rank's share of it, gradients in the parameters and the loss's terms.
    step: the optimiser step, and what is told about it. average: makes a gradient, flat, that of all ranks; it is called
    between two graphs then, one up to the gradients and one from there, and is itself in none.
    """

    _USED = ("obs", "actions", "resets", "log_prob", "value", "advantage", "returns", "valid", "start_state")

    def __init__(
        self,
        batch: Segment,
        size: int,
        gradients: Callable[[Segment, Any], Any],
        step: Callable[[Any, Any], Tensor],
        parameters: Sequence[Tensor],
        optimizer: Any,
        average: Callable[[Tensor], None] | None = None,
    ) -> None:
        self.size = size
        used = {name: tree_map(torch.clone, getattr(batch, name)) for name in self._USED}
        unused: dict[str, Any] = {"rewards": None, "terminated": None, "truncated": None, "chunk_states": []}
        self._batch = replace(batch, **used, **unused)
        self._columns = torch.arange(size, device=batch.resets.device)
        self._shapes = _shapes(batch)

        self._average = average
        self._share: Any = 1.0 if average is None else torch.ones((), device=batch.resets.device)

        def to_gradients() -> Any:
            # Without their history: it would keep nodes of autograd for another stream than the one captured on.
            terms = tree_map(Tensor.detach, gradients(self._batch.select(self._columns), self._share))
            grads = [p.grad for p in parameters if p.grad is not None]
            return terms, None if average is None else torch.cat([grad.flatten() for grad in grads])

        def from_gradients(terms: Any, flat: Tensor | None) -> Tensor:
            if flat is not None:
                grads = [p.grad for p in parameters if p.grad is not None]
                parts = flat.split([grad.numel() for grad in grads])
                torch._foreach_copy_(grads, [part.view_as(grad) for part, grad in zip(parts, grads)])
            return step(terms, self._share)

        with torch.no_grad():  # warming up takes real optimiser steps: they are undone
            weights = [p.clone() for p in parameters]
            moments = {
                p: {k: v.clone() for k, v in optimizer.state[p].items()} for p in parameters if p in optimizer.state
            }
        with _side_stream():
            for _ in range(2):
                terms, flat = to_gradients()
                if average is not None:
                    average(flat)
                from_gradients(terms, flat)
        optimizer.zero_grad(set_to_none=True)
        self._graph, self._rest = torch.cuda.CUDAGraph(), None
        with _capturing(self._graph):
            self._terms, self._flat = to_gradients()
            if average is None:
                self._result = from_gradients(self._terms, None)
        if average is not None:
            self._rest = torch.cuda.CUDAGraph()
            with _capturing(self._rest):
                self._result = from_gradients(self._terms, self._flat)
        with torch.no_grad():
            for p, weight in zip(parameters, weights):
                p.copy_(weight)
                for name, value in optimizer.state[p].items():
                    value.copy_(moments[p][name]) if p in moments else value.zero_()

    def fits(self, batch: Segment, size: int) -> bool:
        return size == self.size and _shapes(batch) == self._shapes

    def load(self, batch: Segment) -> None:
        """Take over a rollout's numbers."""
        for name in self._USED:
            _copy(getattr(self._batch, name), getattr(batch, name))

    def __call__(self, columns: Tensor, share: Any = 1.0) -> Tensor:
        """Take the step on these columns; what is told about it."""
        self._columns.copy_(columns)
        if self._average is None or self._rest is None:
            self._graph.replay()
            return self._result
        self._share.copy_(share)
        self._graph.replay()
        self._average(self._flat)
        self._rest.replay()
        return self._result


def _shapes(batch: Segment) -> list[Any]:
    return [tree_map(lambda x: (tuple(x.shape), x.dtype), getattr(batch, name)) for name in GraphedMinibatch._USED]
