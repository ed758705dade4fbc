"""One minibatch of PPO (select, forward, backward, optimizer step) as a CUDA graph over copies of the rollout."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from holdfast.algorithms.ppo import LossSettings
from holdfast.engines.cuda_graph import NotCapturable, capturing, copy_into, rehearsal, side_stream
from holdfast.engines.eager import AutogradMinibatches
from holdfast.engines.ranks import average_gradient
from holdfast.rollout.segment import Segment
from holdfast.spans import span
from holdfast.state import tree_map

_USED = ("obs", "actions", "resets", "log_prob", "value", "advantage", "returns", "valid", "start_state")
"""The parts of a segment that a minibatch reads."""


def obstacle(sequences: int, minibatches: int, masked: bool) -> str | None:
    """Why minibatches of so many sequences cannot be a graph; None if they can."""
    if minibatches == 1:
        return "one minibatch holds the whole rollout"
    if sequences % minibatches:
        return f"{sequences} sequences do not divide into {minibatches} equal minibatches"
    if masked:
        return "the environment masks actions"
    return None


class GraphMinibatches:
    """Captures the step of `eager` for one shape of batch, then replays it.

    With several ranks the gradients are averaged between two graphs, one up to the gradients and one from there; the
    exchange itself is in neither.
    """

    def __init__(self, eager: AutogradMinibatches, batch: Segment, settings: LossSettings, size: int) -> None:
        self.size, self._eager, self._parameters = size, eager, eager.parameters
        self._joined = eager.ranks.joined
        used = {name: tree_map(_contiguous_copy, getattr(batch, name)) for name in _USED}
        unused: dict[str, Any] = {"rewards": None, "terminated": None, "truncated": None, "chunk_states": []}
        self._batch = replace(batch, **used, **unused)
        self._shapes = _shapes(batch)
        self._columns = torch.arange(size, device=batch.resets.device)
        self._share: Any = torch.ones((), device=batch.resets.device) if self._joined else 1.0
        schedules = {"clip_range": eager.config.clip_schedule, "entropy_coef": eager.config.entropy_schedule}
        changing = [name for name, schedule in schedules.items() if schedule != "constant"]
        self._scheduled: dict[str, Any] = {
            n: torch.tensor(getattr(settings, n), device=batch.resets.device) for n in changing
        }
        eager.load(self._batch, settings._replace(**self._scheduled))
        self._capture()

    def fits(self, batch: Segment, size: int) -> bool:
        """Whether the captured graph serves this batch too."""
        same = size == self.size and _shapes(batch) == self._shapes
        return same and [t.data_ptr() for t in self._tensors_written()] == self._addresses

    def load(self, batch: Segment, settings: LossSettings) -> None:
        """Copy a rollout's numbers, and coefficients that have a schedule, into the tensors that the graph reads."""
        for name, number in self._scheduled.items():
            number.fill_(getattr(settings, name))
        with span("copying the rollout into the graph"):
            for name in _USED:
                copy_into(getattr(self._batch, name), getattr(batch, name))

    def step(self, columns: Tensor | None, share: Any = 1.0) -> Tensor:
        """One optimizer step on these columns: `MinibatchMetrics` as a tensor."""
        self._columns.copy_(columns)  # type: ignore[arg-type]
        if not self._joined:
            with span("forward, backward, optimizer (one CUDA graph)"):
                self._graph.replay()
            return self._result
        self._share.copy_(share)
        with span("forward, backward (one CUDA graph)"):
            self._graph.replay()
        self._average()
        with span("optimizer (one CUDA graph)"):
            self._rest.replay()
        return self._result

    # --- what is captured --------------------------------------------------------------------------------------------

    def _to_gradients(self) -> tuple[Any, Tensor | None]:
        """What `finish_step` takes, and with several ranks all gradients in one flat tensor."""
        # Without their history: it would keep autograd nodes of another stream than the captured one.
        terms = tree_map(Tensor.detach, self._eager.columns_backward(self._columns, self._share))
        return terms, torch.cat([grad.flatten() for grad in self._gradients()]) if self._joined else None

    def _from_gradients(self, terms: Any, flat: Tensor | None) -> Tensor:
        if flat is not None:
            grads = self._gradients()
            parts = flat.split([grad.numel() for grad in grads])
            torch._foreach_copy_(grads, [part.view_as(grad) for part, grad in zip(parts, grads)])
        return self._eager.finish_step(terms, self._share)

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self._parameters if p.grad is not None]

    def _average(self) -> None:
        assert self._flat is not None
        with span("averaging gradients over ranks"):
            average_gradient(self._flat, self._eager.ranks)

    def _capture(self) -> None:
        kept = self._weights_and_moments()  # warming up takes real optimizer steps, which are undone
        try:
            with side_stream():
                for checked in (nullcontext, rehearsal):  # the first one may compile
                    with checked():
                        terms, self._flat = self._to_gradients()
                    if self._joined:
                        self._average()
                    self._eager.find_gradients()
                    with checked():
                        self._from_gradients(terms, self._flat)
        except NotCapturable:
            self._restore(*kept)
            raise
        finally:
            self._eager.optimizer.zero_grad(set_to_none=True)
        self._graph = torch.cuda.CUDAGraph()
        with capturing(self._graph):
            terms, self._flat = self._to_gradients()
            if not self._joined:
                self._result = self._from_gradients(terms, None)
        if self._joined:
            self._rest = torch.cuda.CUDAGraph()
            with capturing(self._rest):
                self._result = self._from_gradients(terms, self._flat)
        self._eager.find_gradients()
        self._restore(*kept)
        # The graph writes to these addresses, so it owns the memory: somebody may put other tensors into the optimizer.
        self._owned = [t.detach() for t in self._tensors_written()]
        self._addresses = [t.data_ptr() for t in self._owned]

    def _tensors_written(self) -> list[Tensor]:
        moments = self._eager.optimizer.state
        return [t for p in self._parameters for t in (p, *moments.get(p, {}).values()) if isinstance(t, Tensor)]

    @torch.no_grad()
    def _weights_and_moments(self) -> tuple[list[Tensor], dict[Any, dict[str, Tensor]]]:
        moments = self._eager.optimizer.state
        copies = {p: {k: v.clone() for k, v in moments[p].items()} for p in self._parameters if p in moments}
        return [p.clone() for p in self._parameters], copies

    @torch.no_grad()
    def _restore(self, weights: list[Tensor], moments: dict[Any, dict[str, Tensor]]) -> None:
        for p, weight in zip(self._parameters, weights):
            p.copy_(weight)
            for name, value in self._eager.optimizer.state[p].items():
                value.copy_(moments[p][name]) if p in moments else value.zero_()


def _contiguous_copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _shapes(batch: Segment) -> list[Any]:
    return [tree_map(lambda x: (tuple(x.shape), x.dtype), getattr(batch, name)) for name in _USED]
