"""The isolation check: law 2 for cores of users, once per run. What came before a reset is changed; what comes after must not
change.

The replay check cannot see a core that ignores `resets`, because both legs are equally wrong. Ours are tested and are not run
here. Each core of a user's own is run on inputs as it had them in the first rollout (and on random ones, where these tell
nothing), step by step and as a sequence. Outputs are compared, not states: what a state keeps without reading it does no harm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from holdfast import state as state_ops
from holdfast.causes import CAUSES
from holdfast.cores import Core
from holdfast.cores.base import reset_mode_of
from holdfast.policies.base import RecurrentPolicy
from holdfast.rollout.segment import Segment
from holdfast.state import State, tree_map
from holdfast.training.replay_check import ReplayError, tolerance

STEPS, RESET, ROWS = 12, 6, 4
"""Of the sequences that a core is run on, and the step at which episodes begin in them."""


class IsolationError(ReplayError):
    """A core of the user's own lets one episode reach another."""


class Leak(NamedTuple):
    """A cause of `holdfast.causes`, and the measurement."""

    cause: str
    evidence: str


def check(policy: RecurrentPolicy, segment: Segment, half_precision: bool = False) -> None:
    """Raise an `IsolationError` in the doctor's words if a core that is not ours is not isolated."""
    cores = [
        (name, core) for name, core in policy.core.named_modules() if isinstance(core, Core) and not _is_ours(core)
    ]
    if not cores:
        return
    allowed = 10 * tolerance(segment.resets.device, half_precision)
    seen = _inputs_of(policy, segment, [core for _, core in cores])
    for name, core in cores:
        leak = find_leak(core, seen.get(core), allowed)
        if leak is not None:
            cause, where = CAUSES[leak.cause], f" ({name})" if name else ""
            raise IsolationError(
                f"episodes are not isolated in your core {type(core).__name__}{where}. {cause.meaning} {leak.evidence}. "
                f"{cause.fix}\nCause: {leak.cause} (docs/doctor.md). A core that writes step(self, x, state) is given a state "
                "that is already reset; if memory should cross episodes, set its reset mode: self.reset = 'never'."
            )


def find_leak(core: Core, seen: Tensor | None = None, allowed: float = 1e-4) -> Leak | None:
    """What is wrong with the resets of a core; None if nothing is, or nothing can be said. seen: inputs that it had, [T, B, I].

    allowed: differences of outputs that are rounding, in units of the largest output.
    """
    mode = reset_mode_of(core)
    if mode == "never":
        return None
    dtype, device = core.dtype_and_device()
    noise = torch.randn(2 * STEPS, ROWS, core.input_size, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    for x in (noise,) if seen is None else (seen, noise):
        with suppress(RuntimeError, ValueError, IndexError, TypeError):  # an input that this core does not take
            leak = _Probe(core, x.detach().to(device, dtype), allowed).leak(mode)
            if leak is not None:
                return leak
    return None


class _Probe:
    """Runs one core on one input [2 * STEPS, B, I]: the first half makes the state that the second half starts from."""

    def __init__(self, core: Core, x: Tensor, allowed: float) -> None:
        self.core, self.allowed = core, allowed
        self.x, self.rows = x[STEPS:], x.shape[1]
        with torch.no_grad():
            self.start = state_ops.clone(core.sequence_unchecked(x[:STEPS], core.initial_state(self.rows), None)[1])
        self.none = torch.zeros(STEPS, self.rows, dtype=torch.bool, device=x.device)

    def leak(self, mode: str) -> Leak | None:
        for leg in (self._sequence, self._steps):
            usual = self._run(leg, self.x, self.none)
            if not usual.isfinite().all() or not torch.equal(usual, self._run(leg, self.x, self.none)):
                return None  # noise in a core: the replay check names it
            leak = None if mode == "detach" else self._leak_of_values(leg, usual)
            if leak is not None:
                return leak
        return self._leak_of_gradients()

    def _leak_of_values(self, leg: Any, usual: Tensor) -> Leak | None:
        scale = float(usual.abs().max())
        for at, row in ((RESET, 0), (RESET, 2), (0, 1)):
            flags, everybody, earlier, all_earlier = (
                self.none.clone(),
                self.none.clone(),
                self.x.clone(),
                self.x.clone(),
            )
            flags[at, row] = everybody[at] = True
            all_earlier[:at] = self.x[:at].roll((1, 1), (0, 1))
            earlier[:at, row] = all_earlier[:at, row]
            others = tree_map(lambda s: s.roll(1, 0), self.start)
            other = state_ops.where(flags[at], others, self.start)
            unreset = self._run(leg, earlier, self.none, other)
            effect = float((unreset - usual)[at:, row].abs().max())
            if not effect > self.allowed * scale:  # it remembers nothing of this, or too little to tell
                continue
            limit = max(self.allowed * scale, 1e-3 * effect)
            alone = self._run(leg, self.x, flags)
            after = (self._run(leg, earlier, flags, other) - alone)[at:, row].abs().amax(-1)  # [steps]
            if after.max() > limit:
                ignored = torch.equal(alone[at:, row], usual[at:, row])
                said = (
                    f"Other observations before an episode's start change outputs after it by {float(after.max()):.2g}"
                )
                late = bool(after[1:].max() < 1e-3 * after[0])
                return Leak(_name(at, ignored, late), said)
            together = self._run(leg, all_earlier, everybody, others) - self._run(leg, self.x, everybody)
            common = float(together[at:].abs().max())
            if common > limit:
                return Leak(
                    "common-ends-ignored",
                    f"Where all environments begin an episode, outputs after it change by {common:.2g}",
                )
            strangers = (alone - usual).abs().amax((0, 2))
            strangers[row] = 0
            if strangers.max() > limit:
                b = int(strangers.argmax())
                return Leak(
                    "resets-everybody",
                    f"An episode that begins in environment {row} changes outputs of environment {b}",
                )
        return None

    def _leak_of_gradients(self) -> Leak | None:
        flags = self.none.clone()
        flags[RESET] = True
        crossing, usual = self._gradient(flags), self._gradient(self.none)
        if crossing is None or usual is None or not crossing > 1e-3 * usual or not crossing > 0:
            return None
        evidence = (
            f"The gradient that reaches the episode before is {float(crossing):.2g} (without resets {float(usual):.2g})"
        )
        return Leak("gradient-crosses-reset", evidence)

    def _gradient(self, resets: Tensor) -> Tensor | None:
        """The largest gradient of outputs from RESET on with respect to inputs before it; None if there is none."""
        x = self.x.clone().requires_grad_()
        y = self.core.sequence_unchecked(x, self.start, resets)[0][RESET:]
        if not y.requires_grad:
            return None
        weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
        gradient = torch.autograd.grad((y * weights).sum(), x, allow_unused=True)[0]
        return None if gradient is None else gradient[:RESET].abs().max()

    def _run(self, leg: Callable[..., Tensor], x: Tensor, resets: Tensor, start: State = None) -> Tensor:
        with torch.no_grad():
            return leg(x, state_ops.clone(self.start if start is None else start), resets)

    def _sequence(self, x: Tensor, state: State, resets: Tensor) -> Tensor:
        return self.core.sequence_unchecked(x, state, resets)[0]

    def _steps(self, x: Tensor, state: State, resets: Tensor) -> Tensor:
        ys = []
        for x_t, flags in zip(x, resets):
            y, state = self.core.step_unchecked(x_t, state, flags)
            ys.append(y)
        return torch.stack(ys)


def _name(at: int, ignored: bool, late: bool) -> str:
    """The cause of a leak at step `at`: flags ignored, or seen one step too late, or something that is left."""
    if late:
        return "late-by-one"
    if not at:
        return "boundary-lost-at-segment-start"
    return "never-resets" if ignored else "partial-reset"


def _is_ours(core: Core) -> bool:
    return type(core).__module__.startswith("holdfast.cores")


@torch.no_grad()
def _inputs_of(policy: RecurrentPolicy, segment: Segment, cores: list[Core]) -> dict[Core, Tensor]:
    """What each core reads in the first steps of a segment, as often repeated as `_Probe` needs, by core."""
    seen: dict[Core, Tensor] = {}
    whole: list[Tensor] = []
    hook = policy.core.register_forward_pre_hook(lambda _, args: whole.append(args[0]))
    try:
        obs = tree_map(lambda o: o[: 2 * STEPS, :ROWS], segment.obs)
        B = min(ROWS, segment.num_envs)
        policy.features(obs, policy.core.initial_state(B), None)
    finally:
        hook.remove()
    with _recording(cores, seen):
        policy.core.sequence_unchecked(whole[0], policy.core.initial_state(B), None)
    return {core: _filled(x) for core, x in seen.items()}


@contextmanager
def _recording(cores: list[Core], seen: dict[Core, Tensor]) -> Iterator[None]:
    def recorder(core: Core) -> Callable[..., Any]:
        def record(x: Tensor, state: State, resets: Tensor | None) -> Any:
            seen[core] = x
            return type(core).sequence_unchecked(core, x, state, resets)

        return record

    for core in cores:
        core.__dict__["sequence_unchecked"] = recorder(core)
    try:
        yield
    finally:
        for core in cores:
            del core.__dict__["sequence_unchecked"]


def _filled(x: Tensor) -> Tensor:
    """[2 * STEPS, ROWS, I]: repeated along time and environments, shifted by a step in each environment."""
    T, B, _ = x.shape
    steps = torch.arange(2 * STEPS, device=x.device).unsqueeze(1)
    rows = torch.arange(ROWS, device=x.device)
    return x[(steps + rows // B) % T, rows % B]
