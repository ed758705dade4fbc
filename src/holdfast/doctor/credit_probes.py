"""Where gradients of the training leg are measured: at the observations, or behind them if none arrives there.

Observations of integers have no gradient, and a policy may round or detach them on purpose. Then the inputs of a recurrent
layer take their place, and where there is none, the outputs of the layers at which the graph begins. This module judges nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.doctor.recordings import Recordings
from holdfast.doctor.subjects.base import RecordedSegment, Replay
from holdfast.doctor.trees import map_tensors, tensors_in

#: gradients of the leaves, arranged as `[T, B, ...]`
Arrange = Callable[[list[Tensor]], list[Tensor]]


@dataclass(frozen=True)
class Measured:
    """`score` `[T, B]` of a replay, and `leaves` of its graph, whose gradients `arrange` puts in order."""

    score: Tensor
    leaves: list[Tensor]
    arrange: Arrange

    def gradients(self, score: Tensor) -> list[Tensor]:
        """Of a number, with respect to each step of each environment: `[T, B, ...]`, zeros where there is no path."""
        found: tuple[Tensor | None, ...] = (None,) * len(self.leaves)
        if score.requires_grad:
            found = torch.autograd.grad(score, self.leaves, retain_graph=True, allow_unused=True)
        return self.arrange([torch.zeros_like(x) if g is None else g.detach() for g, x in zip(found, self.leaves)])

    def credit(self) -> Tensor:
        """`[T, T, B]` sizes of d output[t] / d leaf[s]."""
        lines = []
        for t in range(len(self.score)):
            sizes = [g.double().abs().flatten(2).sum(-1) for g in self.gradients(self.score[t].sum())]
            lines.append(torch.stack(sizes).sum(0).cpu())
        return torch.stack(lines)


#: None if there is nothing to measure at
Probe = Callable[[Recordings, RecordedSegment], "Measured | None"]


def probes(recordings: Recordings) -> list[tuple[str, Probe]]:
    """Places to measure at, in words, the best first."""
    layers = [layer for layer in _layers(recordings) if is_recurrent(layer)]
    return [
        ("the observations", _at_observations),
        *[(f"the inputs of its {type(layer).__name__}", _at_inputs_of(layer)) for layer in layers],
        ("the outputs of its first layers", _at_first_layers),
    ]


def _at_observations(recordings: Recordings, segment: RecordedSegment) -> Measured | None:
    obs, leaves = differentiable(segment.obs)
    if not leaves:
        return None
    return Measured(score_of(recordings.replay_with_graph(segment.with_(obs=obs))), leaves, lambda found: found)


def _at_inputs_of(layer: nn.Module) -> Probe:
    def probe(recordings: Recordings, segment: RecordedSegment) -> Measured | None:
        captured: list[Tensor] = []

        def tap(_: nn.Module, args: Any) -> Any:
            if not args or not isinstance(args[0], Tensor):
                return None
            captured.append(torch.zeros_like(args[0], requires_grad=True))
            return (args[0] + captured[-1], *args[1:])

        with _removed_afterwards([layer.register_forward_pre_hook(tap)]):
            score = score_of(recordings.replay_with_graph(segment))
        arrange = _arrangement(captured, len(score), recordings.rows)
        return None if arrange is None else Measured(score, captured, lambda found: [arrange(found)])

    return probe


def _at_first_layers(recordings: Recordings, segment: RecordedSegment) -> Measured | None:
    captured: dict[nn.Module, list[Tensor]] = {}

    def tap(layer: nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.requires_grad or any(x.requires_grad for x in tensors_in(args)):
            return None
        captured.setdefault(layer, []).append(torch.zeros_like(output, requires_grad=True))
        return output + captured[layer][-1]

    plain = [x for x in _layers(recordings) if not is_recurrent(x) and not [*x.children()] and [*x.parameters()]]
    with _removed_afterwards([layer.register_forward_hook(tap) for layer in plain]):
        score = score_of(recordings.replay_with_graph(segment))
    groups = [(calls, _arrangement(calls, len(score), recordings.rows)) for calls in captured.values()]
    known = [(calls, arrange) for calls, arrange in groups if arrange is not None]
    if not known:
        return None

    def arrange_all(found: list[Tensor]) -> list[Tensor]:
        rest = iter(found)
        return [arrange([next(rest) for _ in calls]) for calls, arrange in known]

    return Measured(score, [x for calls, _ in known for x in calls], arrange_all)


def _arrangement(calls: list[Tensor], steps: int, rows: int) -> Callable[[list[Tensor]], Tensor] | None:
    """How to put what a layer saw, call by call, in order: `[T, B, ...]`. None if calls cannot be assigned to steps."""
    if not calls or any(x.dim() < 2 for x in calls):
        return None
    sequences = all(x.dim() > 2 for x in calls)
    if sequences and all(x.shape[1] == rows for x in calls) and sum(len(x) for x in calls) == steps:
        return lambda found: torch.cat(found)
    if sequences and all(len(x) == rows for x in calls) and sum(x.shape[1] for x in calls) == steps:
        return lambda found: torch.cat(found, dim=1).transpose(0, 1)
    if len(calls) == steps and all(rows in (len(x), x.shape[:-1].numel()) for x in calls):
        return lambda found: torch.stack([g.reshape(rows, -1) for g in found])
    return None


def score_of(result: Replay) -> Tensor:
    """`[T, B]` one number per step: the sum of its columns with fixed, unequal weights."""
    columns = result.output
    if result.log_prob is not None:
        columns = torch.cat([columns, result.log_prob.unsqueeze(-1).to(columns.dtype)], dim=-1)
    weights = torch.linspace(0.5, 1.5, columns.shape[-1], device=columns.device, dtype=columns.dtype)
    signs = 1 - 2 * (torch.arange(columns.shape[-1], device=columns.device) % 2)
    return (columns * weights * signs).sum(-1)


def differentiable(tree: Any) -> tuple[Any, list[Tensor]]:
    """A copy whose floating-point tensors require a gradient, and those tensors."""
    fresh = map_tensors(lambda x: x.detach().clone().requires_grad_() if x.is_floating_point() else x, tree)
    return fresh, [x for x in tensors_in(fresh) if x.requires_grad]


def is_recurrent(layer: nn.Module) -> bool:
    """A layer that carries a state: one of torch's, or one that can make an initial state."""
    return isinstance(layer, (nn.RNNBase, nn.RNNCellBase)) or (
        hasattr(layer, "initial_state") and hasattr(layer, "output_size")
    )


def _layers(recordings: Recordings) -> list[nn.Module]:
    return list(dict.fromkeys(layer for module in recordings.subject.modules() for layer in module.modules()))


@contextlib.contextmanager
def _removed_afterwards(handles: list[Any]) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
