"""Where gradients of the training leg are measured: at the observations, or behind them if none arrives there.

Observations of integers have no gradient, and a policy may round or detach them on purpose. Then the inputs of a recurrent
layer take their place, and where there is none, the outputs of the layers at which the graph begins. This module judges nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.doctor.recordings import Recordings
from holdfast.doctor.subjects.base import RecordedSegment, Replay
from holdfast.state import map_tensors, tensors_in

#: how far numbers are moved in single precision, in units of their spread
COARSE = 1e-2
#: what belongs to the leaves, arranged as `[T, B, ...]`
Arrange = Callable[[list[Tensor]], list[Tensor]]


@dataclass(frozen=True)
class Measured:
    """`score` `[T, B]` of a replay, and `leaves` of its graph, whose gradients `arrange` puts in order.

    `sizes`: how far the numbers at each leaf spread.
    """

    score: Tensor
    leaves: list[Tensor]
    arrange: Arrange
    sizes: list[float]

    def gradients(self, score: Tensor) -> list[Tensor]:
        """Of a number, with respect to each step of each environment: `[T, B, ...]`, zeros where there is no path."""
        found: tuple[Tensor | None, ...] = (None,) * len(self.leaves)
        if score.requires_grad:
            found = torch.autograd.grad(score, self.leaves, retain_graph=True, allow_unused=True)
        return self.arrange([torch.zeros_like(x) if g is None else g.detach() for g, x in zip(found, self.leaves)])

    def credit(self) -> Tensor:
        """`[T, T, B]` sizes of d output[t] / d leaf[s]."""
        lines = [self.gradients(self.score[t].sum()) for t in range(len(self.score))]
        return torch.stack([_sum_of([g.double().abs() for g in line]) for line in lines]).cpu()

    def at_step(self, step: int) -> list[Tensor]:
        """Ones, in the layout of the leaves, at the numbers that belong to a step; elsewhere zeros."""
        marked = [torch.zeros_like(x, requires_grad=True) for x in self.leaves]
        with torch.enable_grad():
            chosen = torch.stack([x[step].sum() for x in self.arrange(marked)]).sum()
        found = torch.autograd.grad(chosen, marked, allow_unused=True)
        return [torch.zeros_like(x) if ones is None else ones for ones, x in zip(found, marked)]


def _sum_of(parts: list[Tensor]) -> Tensor:
    """`[T, B]` from parts `[T, B, ...]`."""
    return torch.stack([x.reshape(*x.shape[:2], -1).sum(-1) for x in parts]).sum(0)


#: the third argument is added to the leaves; None if there is nothing to measure at
Probe = Callable[[Recordings, RecordedSegment, Sequence[Tensor]], "Measured | None"]


def probes(recordings: Recordings) -> list[tuple[str, Probe]]:
    """Places to measure at, in words, the best first."""
    layers = [layer for layer in _layers(recordings) if is_recurrent(layer)]
    return [
        ("the observations", _at_observations),
        *[(f"the inputs of its {type(layer).__name__}", _at_inputs_of(layer)) for layer in layers],
        ("the outputs of its first layers", _at_first_layers),
    ]


def _at_observations(recordings: Recordings, segment: RecordedSegment, added: Sequence[Tensor] = ()) -> Measured | None:
    obs, leaves = differentiable(segment.obs)
    if not leaves:
        return None
    moved = {id(x): x + more for x, more in zip(leaves, added)}
    shown = map_tensors(lambda x: moved.get(id(x), x), obs)
    score = score_of(recordings.replay_with_graph(segment.with_(obs=shown)))
    return Measured(score, leaves, lambda found: found, [_spread(x) for x in leaves])


def _at_inputs_of(layer: nn.Module) -> Probe:
    def probe(recordings: Recordings, segment: RecordedSegment, added: Sequence[Tensor] = ()) -> Measured | None:
        taps = _Taps(added)

        def tap(_: nn.Module, args: Any) -> Any:
            return (taps.add(layer, args[0]), *args[1:]) if args and isinstance(args[0], Tensor) else None

        return taps.measured(recordings, segment, [layer.register_forward_pre_hook(tap)])

    return probe


def _at_first_layers(recordings: Recordings, segment: RecordedSegment, added: Sequence[Tensor] = ()) -> Measured | None:
    taps = _Taps(added)

    def tap(layer: nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.requires_grad or any(x.requires_grad for x in tensors_in(args)):
            return None
        return taps.add(layer, output)

    plain = [x for x in _layers(recordings) if not is_recurrent(x) and not [*x.children()] and [*x.parameters()]]
    return taps.measured(recordings, segment, [layer.register_forward_hook(tap) for layer in plain])


class _Taps:
    """Leaves that are added to what goes through layers, in the order of the calls."""

    def __init__(self, added: Sequence[Tensor]) -> None:
        self.added = added
        self.leaves: list[Tensor] = []
        self.sizes: list[float] = []
        self.calls: dict[nn.Module, list[int]] = {}

    def add(self, layer: nn.Module, x: Tensor) -> Tensor:
        number = len(self.leaves)
        self.leaves.append(torch.zeros_like(x, requires_grad=True))
        self.sizes.append(_spread(x))
        self.calls.setdefault(layer, []).append(number)
        x = x + self.leaves[-1]
        return x + self.added[number] if self.added else x

    def measured(self, recordings: Recordings, segment: RecordedSegment, hooks: list[Any]) -> Measured | None:
        """A replay with these hooks; None if no layer's calls can be assigned to steps."""
        try:
            score = score_of(recordings.replay_with_graph(segment))
        finally:
            for hook in hooks:
                hook.remove()
        groups = [
            (calls, _arrangement([self.leaves[i] for i in calls], len(score), recordings.rows))
            for calls in self.calls.values()
        ]
        known = [(calls, arrange) for calls, arrange in groups if arrange is not None]
        if not known:
            return None

        def arrange_all(found: list[Tensor]) -> list[Tensor]:
            return [arrange([found[i] for i in calls]) for calls, arrange in known]

        return Measured(score, self.leaves, arrange_all, self.sizes)


def _spread(x: Tensor) -> float:
    size = float(x.detach().double().std()) if x.numel() > 1 else 0.0
    return size if 0.0 < size < float("inf") else 1.0


@dataclass(frozen=True)
class Slopes:
    """How fast output[t] changes if step s moves in a random direction, `[T, T, B]`, found in two ways.

    `credit`: sizes of the gradients. `by_gradient`: along the direction. `by_difference`: from two replays with moved
    numbers. `smooth`: where the difference is well above rounding and the same to both sides, so that it can be relied on.
    """

    credit: Tensor
    by_gradient: Tensor
    by_difference: Tensor
    smooth: Tensor

    @property
    def lost(self) -> Tensor:
        """Where an output changes with a step and has no gradient there."""
        return self.smooth & (self.credit == 0)

    @property
    def agree(self) -> Tensor:
        largest = torch.maximum(self.by_gradient.abs(), self.by_difference.abs())
        return (self.by_gradient - self.by_difference).abs() <= 0.1 * largest


def slopes(recordings: Recordings, place: int, segment: RecordedSegment) -> Slopes:
    """Measured at a place of `probes`: in float64 if the policy can be converted, otherwise in its own precision."""
    try:
        double = _in_double(recordings)
        found = _slopes(double, probes(double)[place][1], _segment_in_double(segment), 1e-5, 1e-9)
        if found is not None:
            return found
    except Exception:  # a policy may fix its dtype anywhere, and fail in any way
        pass
    found = _slopes(recordings, probes(recordings)[place][1], segment, COARSE, 1e-3)
    assert found is not None
    return found


def _slopes(recordings: Recordings, probe: Probe, segment: RecordedSegment, step: float, floor: float) -> Slopes | None:
    """`step`: of the differences, in units of each number's spread; `floor`: the smallest slope, in units of the score."""
    measured = probe(recordings, segment, ())
    if measured is None or (measured.score.dtype != torch.float64 and step < COARSE):
        return None
    generator = torch.Generator().manual_seed(recordings.seed)
    directions = [
        (torch.randn(x.shape, generator=generator) * size).to(x) for x, size in zip(measured.leaves, measured.sizes)
    ]
    along = measured.arrange(directions)
    lines = [measured.gradients(measured.score[t].sum()) for t in range(len(measured.score))]
    credit = torch.stack([_sum_of([g.double().abs() for g in line]) for line in lines])
    by_gradient = torch.stack([_sum_of([(g * d).double() for g, d in zip(line, along)]) for line in lines])
    ahead: list[torch.Tensor] = []
    behind: list[torch.Tensor] = []
    base = measured.score.detach().double()
    for s in range(len(base)):
        moved = [step * d * ones for d, ones in zip(directions, measured.at_step(s))]
        for side, sign in ((ahead, 1), (behind, -1)):
            other = probe(recordings, segment, [sign * x for x in moved])
            assert other is not None
            side.append(sign * (other.score.detach().double() - base) / step)
    slope, smooth, noisy = _from_both_sides(torch.stack(ahead, 1), torch.stack(behind, 1), floor * base.abs().max())
    if noisy and step < COARSE:
        return None
    return Slopes(credit.cpu(), by_gradient.cpu(), slope.cpu(), smooth.cpu())


def _from_both_sides(forward: Tensor, backward: Tensor, floor: Tensor) -> tuple[Tensor, Tensor, bool]:
    """The mean slope, where it can be relied on, and whether there are too many places where it cannot."""
    slope = (forward + backward) / 2
    large = torch.maximum(forward.abs(), backward.abs()) > floor
    smooth = large & ((forward - backward).abs() < 0.3 * slope.abs())
    return slope, smooth, int(smooth.sum()) < 0.9 * int(large.sum())


def changes_in_rollout(recordings: Recordings, first: int, last: int) -> Tensor:
    """`[T, T, B]` where the rollout's output at step t changes with a small change of the observation at step s.

    Training may know the past from stored states only. Then its own outputs do not show what it should learn from.
    """
    generator = torch.Generator().manual_seed(recordings.seed)

    def outputs(obs: Any) -> Tensor:
        return score_of(Replay(recordings.run(0, last, obs=obs).cut(first, last).output))

    def noise(x: Tensor) -> Tensor:
        return (torch.randn(x.shape[1:], generator=generator) * COARSE * _spread(x)).to(x)

    base, found = outputs(recordings.script.obs), []
    for s in range(first, last):
        added = [noise(x) if x.is_floating_point() else None for x in tensors_in(recordings.script.obs)]
        sides = []
        for sign in (1, -1):
            rest = iter(added)

            def move(x: Tensor, s: int = s, sign: int = sign, rest: Any = rest) -> Tensor:
                more, moved = next(rest), x.clone()
                if more is not None:
                    moved[s] += sign * more
                return moved

            moved = map_tensors(move, recordings.script.obs)
            sides.append(sign * (outputs(moved) - base) / COARSE)
        found.append(_from_both_sides(sides[0], sides[1], 1e-3 * base.abs().max())[1])
    return torch.stack(found, 1)


def _in_double(recordings: Recordings) -> Recordings:
    double = copy.copy(recordings)
    double.subject = recordings.subject.isolated()
    modules = double.subject.modules()
    if not any(True for module in modules for _ in module.parameters()):
        raise TypeError("there are no weights to convert")
    for module in modules:
        module.double()
    if recordings.frozen:
        double.frozen = [(x, x.detach().clone()) for module in modules for x in module.buffers()]
    return double


def _segment_in_double(segment: RecordedSegment) -> RecordedSegment:
    def convert(tree: Any) -> Any:
        return map_tensors(lambda x: x.double() if x.is_floating_point() else x, tree)

    return segment.with_(
        obs=convert(segment.obs), actions=convert(segment.actions), marks=tuple(map(convert, segment.marks))
    )


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
    """A copy whose floating-point tensors require a gradient, and those of them that hold a number."""
    fresh = map_tensors(lambda x: x.detach().clone().requires_grad_() if x.is_floating_point() else x, tree)
    return fresh, [x for x in tensors_in(fresh) if x.requires_grad and x.numel()]


def is_recurrent(layer: nn.Module) -> bool:
    """A layer that carries a state: one of torch's, or one that can make an initial state."""
    return isinstance(layer, (nn.RNNBase, nn.RNNCellBase)) or (
        hasattr(layer, "initial_state") and hasattr(layer, "output_size")
    )


def _layers(recordings: Recordings) -> list[nn.Module]:
    return list(dict.fromkeys(layer for module in recordings.subject.modules() for layer in module.modules()))
