"""One minibatch (select, forward, backward, optimizer step) as a CUDA graph over copies of the rollout, for any `Loss`."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from holdfast.algorithms.loss import Loss
from holdfast.engines.autograd import Minibatches, average_gradient
from holdfast.engines.cuda_graph import NotCapturable, capturing, copy_into, rehearsal, side_stream
from holdfast.rollout.segment import PER_STEP, Segment
from holdfast.spans import span
from holdfast.state import map_tensors

_UNUSED = ("final_obs", "final_value")
_USED = (*(name for name in PER_STEP if name not in _UNUSED), "start_state")
"""The parts of a segment that a loss may read, once its targets are made."""


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

    def __init__(self, eager: Minibatches, batch: Segment, loss: Loss, size: int) -> None:
        self.size, self._eager, self._parameters = size, eager, eager.parameters
        self._joined = eager.ranks.joined
        used = {name: map_tensors(_contiguous_copy, part) for name, part in _parts(batch).items()}
        unused: dict[str, Any] = {name: None for name in _UNUSED}
        self._batch = batch.changed(**unused, **used, chunk_states=[])
        if batch.all_valid:
            self._batch.mark_all_valid()
        self._shapes, self._constants = _shapes(batch), loss.constants()
        self._columns = torch.arange(size, device=batch.resets.device)
        self._rank_weight: Any = torch.ones((), device=batch.resets.device) if self._joined else 1.0
        eager.load(self._batch, loss)
        self._capture()

    @property
    def names(self) -> tuple[str, ...]:
        """What the numbers that `step` gives are."""
        return self._eager.names

    def fits(self, batch: Segment, loss: Loss, size: int) -> bool:
        """Whether the captured graph serves this batch and loss too."""
        same = size == self.size and _shapes(batch) == self._shapes and loss.constants() == self._constants
        return same and [t.data_ptr() for t in self._tensors_written()] == self._addresses

    def load(self, batch: Segment, loss: Loss) -> None:
        """Copy a rollout's numbers into the tensors that the graph reads. What changes in a loss are tensors that it reads."""
        with span("copying the rollout into the graph"):
            mine = _parts(self._batch)
            for name, part in _parts(batch).items():
                copy_into(mine[name], part)

    def step(self, columns: Tensor | None, rank_weight: Any = 1.0) -> Tensor:
        """One optimizer step on these columns: the numbers of `names`."""
        self._columns.copy_(columns)  # type: ignore[arg-type]
        if not self._joined:
            with span("forward, backward, optimizer (one CUDA graph)"):
                self._graph.replay()
            return self._result
        self._rank_weight.copy_(rank_weight)
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
        terms = map_tensors(Tensor.detach, self._eager.columns_backward(self._columns, self._rank_weight))
        return terms, torch.cat([grad.flatten() for grad in self._gradients()]) if self._joined else None

    def _from_gradients(self, terms: Any, flat: Tensor | None) -> Tensor:
        if flat is not None:
            grads = self._gradients()
            parts = flat.split([grad.numel() for grad in grads])
            torch._foreach_copy_(grads, [part.view_as(grad) for part, grad in zip(parts, grads)])
        return self._eager.finish_step(terms, self._rank_weight)

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


def _parts(batch: Segment) -> dict[str, Any]:
    """What a loss may read, where it is there. Advantages that nobody made are not computed."""
    return {name: part for name in _USED if (part := vars(batch)[name]) is not None}


def _contiguous_copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _shapes(batch: Segment) -> dict[str, Any]:
    return {name: map_tensors(lambda x: (tuple(x.shape), x.dtype), part) for name, part in _parts(batch).items()}
