"""The examination room: runs of a subject on the script, recorded once and shared by all checks.

The heart is `alone(resets)`: what the policy gives when every episode is played by itself from a fresh start. It needs
no flags, so it cannot be wrong about them, and for *any* pattern of resets it is a lookup in the same few recordings:
the run that began at step s, for the steps and rows whose last reset was at s. A leg is right when it equals
`alone(true resets)`; when it is wrong, the pattern that it does equal names the mistake.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from holdfast.doctor.credit import CreditMap
from holdfast.doctor.observations import map_tensors, tensors_in
from holdfast.doctor.script import SEGMENTS, STEPS, TOTAL, Script, write_script
from holdfast.doctor.subject import Replay, Segment, Step, Subject
from holdfast.doctor.traces import Ruler, Trace, fill, to_numbers


class Exam:
    """One subject, one seed, and everything recorded so far."""

    def __init__(self, subject: Subject, seed: int = 0, tolerance: float | None = None) -> None:
        self.subject = subject
        self.seed = seed
        self.script: Script = write_script(subject, seed)
        self.tolerance = tolerance if tolerance is not None else tolerance_of(subject)
        self.frozen: list[tuple[Tensor, Tensor]] = []
        #: set when training was found to depend on the live memory: it is then cleared before each training call
        self.clear_before_training = False
        self._alone: dict[int, Trace] = {}
        self._rollout: Trace | None = None
        self._replays: dict[tuple[int, int], Trace] = {}
        self._ruler: Ruler | None = None
        #: `[N, B]` where the state must be fresh: at episode starts, or at none but the first by declaration
        self.true_resets = self.script.resets
        if subject.carries_across_episodes:
            self.true_resets = torch.zeros_like(self.true_resets)
            self.true_resets[0] = True
        #: the reset pattern that the rollout leg was found to follow; None when it follows none that we know
        self.rollout_resets: Tensor | None = self.true_resets
        #: filled by the gradient check, for the report
        self.credit: CreditMap | None = None

    @property
    def rows(self) -> int:
        return self.script.rows

    # --- runs of the rollout leg -----------------------------------------------------------------------
    def run(
        self,
        first: int = 0,
        last: int = TOTAL,
        *,
        obs: Any = None,
        flags: Any = True,
        subject: Subject | None = None,
        seed_shift: int = 0,
        marks: bool = False,
    ) -> Trace:
        """A fresh run over the steps `first..last`. `flags`: True the script's, None all False, "none" not given."""
        subject = subject or self.subject
        story = self.script.obs if obs is None else obs
        trace = Trace(torch.empty(0), None, None, first)
        steps: list[Step] = []
        norms: list[Tensor] = []
        subject.begin(self.rows)
        for t in range(first, last):
            if marks:
                trace.marks.append(subject.mark())
                trace.mark_copies.append(_snapshot(trace.marks[-1]))
            steps.append(self.step(t, story, self.flags_at(t, flags, t == first), subject, seed_shift))
            if marks:
                norms.append(state_norms(subject, self.rows))
        if marks:
            trace.marks.append(subject.mark())
            trace.mark_copies.append(_snapshot(trace.marks[-1]))
            trace.norms = torch.stack(norms)
        return fill(trace, steps)

    def step(
        self,
        t: int,
        story: Any,
        flags: tuple[Tensor, Tensor],
        subject: Subject | None = None,
        seed_shift: int = 0,
        live: bool = False,
    ) -> Step:
        """One step of all environments, with randomness that depends on the step alone."""
        subject = subject or self.subject
        seed_everything(self.seed * 1009 + 31 * t + seed_shift)
        if self.script.action_masks is not None:
            subject.action_mask = self.script.action_masks[t]
        step = subject.live_step if live else subject.step
        result = step(map_tensors(lambda x: x[t], story), *flags, torch.arange(self.rows))
        self.thaw()
        return result

    def flags_at(self, t: int, flags: Any, is_first: bool) -> Any:
        none = torch.zeros_like(self.script.terminated[0])
        if flags == "none":
            return None, None
        if flags is None or is_first:
            return none, none
        return self.script.terminated[t], self.script.truncated[t]

    def rollout(self) -> Trace:
        """The rollout leg over the whole script, with what the project would store."""
        if self._rollout is None:
            self._rollout = self.run(marks=True)
        return self._rollout

    @property
    def ruler(self) -> Ruler:
        if self._ruler is None:
            self._ruler = Ruler(self.rollout(), self.tolerance)
        return self._ruler

    def alone(self, resets: Tensor, first: int = 0, last: int = TOTAL) -> Trace:
        """Steps `first..last` if the state were fresh exactly where `resets` `[N, B]` says. Step 0 is always fresh.

        A whole-number `resets` says directly since which step each step remembers.
        """
        since = last_reset(resets) if resets.dtype == torch.bool else resets.cpu()
        rollout = self.rollout()
        output = torch.empty_like(rollout.output[first:last])
        score = None if rollout.log_prob is None else torch.empty_like(rollout.log_prob[first:last])
        actions = None if rollout.actions is None else map_tensors(lambda x: x[first:last].clone(), rollout.actions)
        for start in since[first:last].unique().tolist():
            here = since[first:last] == start  # [n, B]
            end = int(here.any(1).nonzero().max()) + first + 1
            recorded = self._from(start, end)
            n = max(start, first)
            window = slice(n - first, end - first)
            part, source = here[window], slice(n - start, end - start)
            output[window][part] = recorded.output[source][part]
            if score is not None and recorded.log_prob is not None:
                score[window][part] = recorded.log_prob[source][part]
            if actions is not None:
                _copy_where(actions, recorded.actions, window, source, part)
        return Trace(output, score, actions, first)

    def _from(self, start: int, end: int) -> Trace:
        known = self._alone.get(start)
        if known is None or len(known.output) < end - start:
            self._alone[start] = self.run(start, end, flags=None)
        return self._alone[start]

    # --- the training leg ------------------------------------------------------------------------------
    def segment(self, first: int, last: int, rollout: Trace | None = None) -> Segment:
        """Steps `first..last` as the project's buffer would hold them."""
        rollout = rollout or self.rollout()
        masks = self.script.action_masks
        return Segment(
            obs=map_tensors(lambda x: x[first:last], self.script.obs),
            actions=None if rollout.actions is None else map_tensors(lambda x: x[first:last], rollout.actions),
            terminated=self.script.terminated[first:last],
            truncated=self.script.truncated[first:last],
            marks=tuple(rollout.marks[first : last + 1]),
            begins=first == 0,
            log_prob=None if rollout.log_prob is None else rollout.log_prob[first:last].float(),
            action_mask=None if masks is None else masks[first:last],
        )

    def replay(self, segment: Segment, seed_shift: int = 0) -> Trace:
        """The training leg on a segment, as a trace without a graph."""
        result = self.replay_with_graph(segment, seed_shift)
        return Trace(
            to_numbers(result.output),
            None if result.log_prob is None else to_numbers(result.log_prob),
            segment.actions,
        )

    def replay_with_graph(self, segment: Segment, seed_shift: int = 0) -> Replay:
        seed_everything(self.seed * 1009 + 7 + seed_shift)
        self.thaw()
        if self.clear_before_training:
            self.subject.begin(self.rows)
        with torch.enable_grad():
            result = self.subject.replay(segment)
        self.thaw()
        return result

    def replayed(self, first: int, last: int) -> Trace:
        """The training leg on the rollout's own steps `first..last`, recorded once."""
        if (first, last) not in self._replays:
            self._replays[first, last] = self.replay(self.segment(first, last))
        return self._replays[first, last]

    def windows(self) -> list[tuple[int, int]]:
        """The segments of the script as (first, last) steps."""
        return [(k * STEPS, (k + 1) * STEPS) for k in range(SEGMENTS)]

    # --- treatment, so that one illness does not hide the next ------------------------------------------
    def freeze(self, buffers: list[Tensor]) -> None:
        """From now on, put these buffers back after each call."""
        self.frozen = [(buffer, buffer.detach().clone()) for buffer in buffers]
        self.forget_recordings()

    def thaw(self) -> None:
        with torch.no_grad():
            for buffer, value in self.frozen:
                buffer.copy_(value)

    def forget_recordings(self) -> None:
        self._alone, self._rollout, self._replays, self._ruler = {}, None, {}, None


def last_reset(resets: Tensor) -> Tensor:
    """`[N, B]` the step at which the state of each step was last fresh."""
    steps = torch.arange(len(resets)).unsqueeze(1).expand(resets.shape)
    return torch.where(resets.cpu(), steps, torch.zeros_like(steps)).cummax(0).values


def tolerance_of(subject: Subject) -> float:
    """1e-5 in single precision on the CPU, 1e-3 on a GPU (TF32), 1e-2 in half precision, by the coarsest parameter."""
    parameters = [p for module in subject.modules() for p in module.parameters()]
    if any(p.dtype in (torch.float16, torch.bfloat16) for p in parameters):
        return 1e-2
    return 1e-3 if any(p.is_cuda for p in parameters) else 1e-5


def seed_everything(seed: int) -> None:
    """Torch, numpy and Python's generators. The examiner restores them when it is done."""
    import random

    import numpy as np

    torch.default_generator.manual_seed(seed)  # torch.manual_seed formats a stack trace per device type, 0.8 ms
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    np.random.seed(seed % (2**32))
    random.seed(seed)


def state_norms(subject: Subject, rows: int) -> Tensor:
    """`[B]` the size of what each environment carries; NaN where the subject does not show its state."""
    total = torch.zeros(rows, dtype=torch.float64)
    seen = False
    for x in tensors_in(subject.state()):
        if not x.is_floating_point() or rows not in x.shape:
            continue
        batch = _batch_dim(x, rows)
        total += to_numbers(x).movedim(batch, 0).flatten(1).square().sum(1)
        seen = True
    return total.sqrt() if seen else torch.full((rows,), float("nan"), dtype=torch.float64)


def _batch_dim(x: Tensor, rows: int) -> int:
    """torch.nn keeps `[L, B, H]`, most others `[B, ...]`."""
    if x.dim() == 3 and x.shape[1] == rows and x.shape[0] != rows:
        return 1
    return list(x.shape).index(rows)


def _snapshot(mark: Any) -> Any:
    tensors = map_tensors(lambda x: x.detach().clone(), mark)
    try:
        return tensors if tensors_in(mark) else copy.deepcopy(mark)
    except (TypeError, RuntimeError):
        return None


def _copy_where(into: Any, source: Any, window: slice, where: slice, part: Tensor) -> None:
    for mine, other in zip(tensors_in(into), tensors_in(source)):
        mine[window][part.to(mine.device)] = other[where][part.to(mine.device)]
