"""Runs of a subject on the script, recorded once and shared by all checks.

The reference is `alone(resets)`: what the policy returns when every episode is played by itself from a fresh start. It
needs no flags, so it cannot be wrong about them. For *any* pattern of resets it is a lookup in the same few recordings:
the run that began at step s, for the steps and rows whose last reset was at s. A leg is right when it equals
`alone(true resets)`; when it is wrong, the pattern that it does equal names the mistake. This module judges nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from holdfast.doctor.comparison import Difference, Recording, Tolerances, record, record_replay, to_numbers
from holdfast.doctor.report.credit import CreditMap
from holdfast.doctor.script import SEGMENTS, STEPS, TOTAL, Script, write_script
from holdfast.doctor.subjects.base import RecordedSegment, Replay, Subject, SubjectStep
from holdfast.runs import rng_state
from holdfast.state import map_tensors, tensors_in

#: the flags of a run: those of the script, all False, or None in their place
Flags = Literal["script", "false", "none"]


class Recordings:
    """One subject, one seed, and everything recorded so far."""

    def __init__(self, subject: Subject, seed: int = 0, tolerance: float | None = None) -> None:
        self.subject = subject
        self.seed = seed
        self.script: Script = write_script(subject, seed)
        self.tolerance = tolerance if tolerance is not None else tolerance_of(subject)
        #: buffers and plain attributes, with their values before anything was run
        self.parts = moving_parts(subject.modules())
        self.frozen: list[tuple[Tensor, Tensor]] = []
        #: set when training was found to depend on the live memory, which is then cleared before each training call
        self.clear_before_training = False
        self._train_from_copies = False
        #: causes that were found and then taken out of the copy: nothing later follows from them
        self.removed: set[str] = set()
        self._alone: dict[int, Recording] = {}
        self._rollout: Recording | None = None
        self._replays: dict[tuple[int, int], Recording] = {}
        self._tolerances: Tolerances | None = None
        #: `[N, B]` where the state must be fresh: at episode starts, or at step 0 only if memory is declared to carry on
        self.true_resets = self.script.resets
        if subject.carries_across_episodes:
            self.true_resets = torch.zeros_like(self.true_resets)
            self.true_resets[0] = True
        #: `[N, B]` where a rollout starts, if the subject does something there
        self.rollout_starts = torch.zeros_like(self.true_resets)
        if type(subject).begin_rollout is not Subject.begin_rollout:
            self.rollout_starts[STEPS::STEPS] = True
        #: set when rollouts were found to start with an empty memory
        self.fresh_rollouts = False
        #: the reset pattern that the rollout leg was found to follow; None when it follows no known pattern
        self.rollout_resets: Tensor | None = self.true_resets
        #: filled by the gradient check, for the report
        self.credit: CreditMap | None = None
        #: where that check found gradients (`credit_probes.Probe`)
        self.probe: Callable[..., Any] | None = None

    @property
    def rows(self) -> int:
        return self.script.rows

    # --- the rollout leg -------------------------------------------------------------------------------
    def run(
        self,
        first: int = 0,
        last: int = TOTAL,
        *,
        obs: Any = None,
        flags: Flags = "script",
        subject: Subject | None = None,
        seed_shift: int = 0,
        marks: bool = False,
    ) -> Recording:
        """A fresh run over the steps `first..last`. `marks`: record what the project would store, too."""
        subject = subject or self.subject
        obs = self.script.obs if obs is None else obs
        steps: list[SubjectStep] = []
        norms: list[Tensor] = []
        stored: list[Any] = []
        copies: list[Any] = []

        def keep_mark() -> None:
            stored.append(subject.mark())
            copies.append(_snapshot(stored[-1]))

        subject.begin(self.rows)
        for t in range(first, last):
            if flags == "script" and t != first:
                self.maybe_begin_rollout(t, subject)
            if marks:
                keep_mark()
            steps.append(self.step(t, obs, self.flags_at(t, flags, t == first), subject, seed_shift))
            if marks:
                norms.append(state_norms(subject, self.rows))
        recording = record(steps, first)
        if marks:
            keep_mark()
            recording.marks, recording.mark_copies, recording.norms = stored, copies, torch.stack(norms)
        return recording

    def step(
        self,
        t: int,
        obs: Any,
        flags: tuple[Tensor | None, Tensor | None],
        subject: Subject | None = None,
        seed_shift: int = 0,
        live: bool = False,
    ) -> SubjectStep:
        """One step of all environments. Its random numbers depend on the step alone."""
        subject = subject or self.subject
        rng_state.seed(self.seed * 1009 + 31 * t + seed_shift, self.script.terminated.device)
        if self.script.action_masks is not None:
            subject.action_mask = self.script.action_masks[t]
        step: Any = subject.live_step if live else subject.step
        result: SubjectStep = step(map_tensors(lambda x: x[t], obs), *flags, torch.arange(self.rows))
        self.restore_frozen()
        return result

    def play(self, first: int, last: int, begin: bool = True) -> Recording:
        """Steps of the script with its flags, from a fresh start or (`begin=False`) from where the subject is."""
        if begin:
            self.subject.begin(self.rows)
        steps = []
        for t in range(first, last):
            if t != first or not begin:
                self.maybe_begin_rollout(t)
            steps.append(self.step(t, self.script.obs, self.flags_at(t, "script", begin and t == first)))
        return record(steps, first) if steps else Recording(torch.empty(0), None, None, first)

    def maybe_begin_rollout(self, t: int, subject: Subject | None = None) -> None:
        """Tell the subject that a rollout starts, if one starts at step t."""
        if t % STEPS == 0:
            (subject or self.subject).begin_rollout()

    def play_first_rows(self, count: int, steps: int = 3) -> None:
        """A few steps of the first `count` environments, without resets and from where the subject is."""
        false = torch.zeros(count, dtype=torch.bool, device=self.script.terminated.device)
        for t in range(steps):
            if self.script.action_masks is not None:
                self.subject.action_mask = self.script.action_masks[t, :count]
            obs = map_tensors(lambda x, t=t: x[t, :count], self.script.obs)
            self.subject.step(obs, false, false, torch.arange(count))

    def flags_at(self, t: int, flags: Flags = "script", is_first: bool = False) -> tuple[Any, Any]:
        """(terminated, truncated) `[B]` of a step; all False at the first step of a run."""
        if flags == "none":
            return None, None
        if flags == "false" or is_first:
            false = torch.zeros_like(self.script.terminated[0])
            return false, false
        return self.script.terminated[t], self.script.truncated[t]

    def rollout(self) -> Recording:
        """The rollout leg over the whole script, with what the project would store."""
        if self._rollout is None:
            self._rollout = self.run(marks=True)
        return self._rollout

    def alone(self, resets: Tensor, first: int = 0, last: int = TOTAL) -> Recording:
        """Steps `first..last` if the state were fresh exactly where `resets` `[N, B]` says. Step 0 is always fresh.

        A `resets` of integers says directly since which step each step remembers.
        """
        since = last_reset(resets) if resets.dtype == torch.bool else resets.cpu()
        rollout = self.rollout()
        output = torch.empty_like(rollout.output[first:last])
        log_prob = None if rollout.log_prob is None else torch.empty_like(rollout.log_prob[first:last])
        actions = None if rollout.actions is None else map_tensors(lambda x: x[first:last].clone(), rollout.actions)
        for start in since[first:last].unique().tolist():
            here = since[first:last] == start  # [n, B]
            end = int(here.any(1).nonzero().max()) + first + 1
            recorded = self._run_from(start, end)
            n = max(start, first)
            window, source = slice(n - first, end - first), slice(n - start, end - start)
            part = here[window]
            output[window][part] = recorded.output[source][part]
            if log_prob is not None and recorded.log_prob is not None:
                log_prob[window][part] = recorded.log_prob[source][part]
            for mine, other in zip(tensors_in(actions), tensors_in(recorded.actions)):
                mine[window][part.to(mine.device)] = other[source][part.to(mine.device)]
        return Recording(output, log_prob, actions, first)

    def _run_from(self, start: int, end: int) -> Recording:
        known = self._alone.get(start)
        if known is None or len(known.output) < end - start:
            self._alone[start] = self.run(start, end, flags="false")
        return self._alone[start]

    # --- the training leg ------------------------------------------------------------------------------
    def segment(self, first: int, last: int, rollout: Recording | None = None) -> RecordedSegment:
        """Steps `first..last` as the project's buffer would hold them."""
        rollout = rollout or self.rollout()
        masks = self.script.action_masks
        return RecordedSegment(
            obs=map_tensors(lambda x: x[first:last], self.script.obs),
            actions=None if rollout.actions is None else map_tensors(lambda x: x[first:last], rollout.actions),
            terminated=self.script.terminated[first:last],
            truncated=self.script.truncated[first:last],
            marks=tuple((rollout.mark_copies if self._train_from_copies else rollout.marks)[first : last + 1]),
            begins=first == 0,
            log_prob=None if rollout.log_prob is None else rollout.log_prob[first:last].float(),
            action_mask=None if masks is None else masks[first:last],
        )

    def replay(self, segment: RecordedSegment, seed_shift: int = 0) -> Recording:
        """The training leg on a segment, recorded without its graph."""
        return record_replay(self.replay_with_graph(segment, seed_shift), segment.actions)

    def replay_with_graph(self, segment: RecordedSegment, seed_shift: int = 0) -> Replay:
        rng_state.seed(self.seed * 1009 + 7 + seed_shift, self.script.terminated.device)
        self.restore_frozen()
        if self.clear_before_training:
            self.subject.begin(self.rows)
        with torch.enable_grad():
            result = self.subject.replay(segment)
        self.restore_frozen()
        return result

    def replayed(self, first: int, last: int) -> Recording:
        """The training leg on the rollout's own steps `first..last`, recorded once."""
        if (first, last) not in self._replays:
            self._replays[first, last] = self.replay(self.segment(first, last))
        return self._replays[first, last]

    def windows(self) -> list[tuple[int, int]]:
        """The segments of the script as (first, last) steps: those that training replays."""
        if self.subject.whole_episodes:
            return [(0, STEPS)]
        return [(k * STEPS, (k + 1) * STEPS) for k in range(SEGMENTS)]

    @property
    def window(self) -> tuple[int, int]:
        """The one in the middle of episodes, if there is one."""
        return self.windows()[len(self.windows()) // 2]

    # --- comparing -------------------------------------------------------------------------------------
    @property
    def tolerances(self) -> Tolerances:
        if self._tolerances is None:
            self._tolerances = Tolerances(self.rollout(), self.tolerance)
        return self._tolerances

    def compare(self, left: Recording, right: Recording) -> Difference:
        """The difference of two recordings of the same steps."""
        return self.tolerances.compare(left, right)

    # --- removing a mistake that was found, so that it does not hide the next --------------------------
    def freeze(self, buffers: list[Tensor]) -> None:
        """From now on, restore these buffers after each call."""
        self.frozen = [(buffer, buffer.detach().clone()) for buffer in buffers]
        self.forget_recordings()

    def restore_frozen(self) -> None:
        with torch.no_grad():
            for buffer, value in self.frozen:
                buffer.copy_(value)

    def use_copies_of_marks(self) -> None:
        """From now on, train from copies of the stored states, made when they were stored."""
        self._train_from_copies = True
        self._replays = {}

    def forget_recordings(self) -> None:
        self._alone, self._rollout, self._replays, self._tolerances = {}, None, {}, None


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


def state_norms(subject: Subject, rows: int) -> Tensor:
    """`[B]` the size of what each environment carries; NaN if the subject does not show its state."""
    total = torch.zeros(rows, dtype=torch.float64)
    seen = False
    for x in tensors_in(subject.state()):
        if not x.is_floating_point() or rows not in x.shape:
            continue
        total += to_numbers(x).movedim(_batch_dim(x, rows), 0).reshape(rows, -1).square().sum(1)
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


# --- moving parts ----------------------------------------------------------------------------------------------------
# What a policy holds besides its weights and may change when it is called: buffers, tensors, numbers.


@dataclass(frozen=True)
class MovingPart:
    """A buffer, or a plain attribute that holds a tensor or a number, with its value when this was made."""

    module: nn.Module
    attribute: str
    name: str
    is_buffer: bool
    then: Any

    def now(self) -> Any:
        return getattr(self.module, self.attribute, None)

    def address(self) -> int | None:
        now = self.now()
        return now.data_ptr() if isinstance(now, Tensor) else None

    def moved(self) -> bool:
        now = self.now()
        if isinstance(now, Tensor) and isinstance(self.then, Tensor):
            return now.shape == self.then.shape and not torch.equal(now, self.then)
        return type(now) is type(self.then) and bool(now != self.then)

    def distance(self) -> float:
        return float((self.now() - self.then).abs().max())


def moving_parts(modules: list[nn.Module]) -> list[MovingPart]:
    """All buffers, tensors and numbers that the modules of the policy hold besides their weights."""
    found = []
    for module in modules:
        for path, inner in module.named_modules():
            prefix = f"{path}." if path else ""
            for name, buffer in inner.named_buffers(recurse=False):
                found.append(MovingPart(inner, name, prefix + name, True, buffer.detach().clone()))
            for name, value in vars(inner).items():
                if isinstance(value, Tensor):
                    found.append(MovingPart(inner, name, prefix + name, False, value.detach().clone()))
                elif isinstance(value, (int, float)) and not isinstance(value, bool):
                    found.append(MovingPart(inner, name, prefix + name, False, value))
    return found
