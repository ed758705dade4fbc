"""Runs all checks on one subject and sorts what they found: one bug is one finding, with what follows from it beneath."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.backends import cuda, cudnn, mkldnn

from holdfast.doctor.checks import ITSELF, REGISTRY, Case, Check, NotApplicable
from holdfast.doctor.recordings import Recordings
from holdfast.doctor.report import Finding, Outcome, Report, make_finding
from holdfast.doctor.report.consequences import follows_from
from holdfast.doctor.subjects.base import NotOffered, Subject
from holdfast.doctor.subjects.choose import as_subject
from holdfast.shown_text import printable


class CannotExamine(Exception):
    """The policy does not run as the subject says it does; the text says where it stopped."""


#: a policy with fewer parameters is faster in one thread, and on a busy machine many times so
FEW_PARAMETERS = 2_000_000

OnProgress = Callable[[int, int, str], None]


def examine(
    subject: Any,
    *,
    seed: int = 0,
    compile: bool = False,
    tolerance: float | None = None,
    bptt: int | None = None,
    progress: OnProgress | None = None,
) -> Report:
    """Examine a recurrent policy and report what is wrong with its memory.

    `subject`: a subject (`holdfast.doctor.subjects`, or your own), or anything the doctor knows: a Holdfast policy or
    core, `nn.LSTM`, `nn.GRU`, a `RecurrentPPO`. Deterministic for a seed. The policy is left as it was: weights,
    buffers, memory and all random generators. `compile` adds the (slow) torch.compile check. `tolerance`: differences
    that count as rounding; by default 1e-5, and 1e-2 for half precision. `bptt`: over how many steps gradients flow on
    purpose, if training cuts them (`Subject.bptt`). Raises `CannotExamine` if it does not run.
    """
    given = as_subject(subject)
    started = time.perf_counter()
    with _everything_restored(given) as copy:
        declared, copy.bptt = copy.bptt, copy.bptt if bptt is None else bptt
        report = _examine(copy, seed, compile, tolerance, progress)
        if not report.ok:
            report = _blame_on_alternatives(copy, report, seed, tolerance)
        copy.bptt = declared
        if copy is given:
            note = make_finding("repeatable", "examined-in-place", f"{type(given).__name__}.isolated() failed")
            report = replace(report, findings=(*report.findings, note))
    return replace(report, seconds=time.perf_counter() - started, examined_as=given.recognized_as)


def assert_healthy(
    subject: Any, *, seed: int = 0, tolerance: float | None = None, bptt: int | None = None, warnings: bool = False
) -> Report:
    """For pytest: raises AssertionError with the findings if the policy has an error (`warnings`: or a warning)."""
    report = examine(subject, seed=seed, tolerance=tolerance, bptt=bptt)
    if not report.judged(strict=warnings).ok:
        raise AssertionError(report.to_text())
    return report


def _examine(
    subject: Subject, seed: int, compile: bool, tolerance: float | None, progress: OnProgress | None
) -> Report:
    recordings = Recordings(subject, seed, tolerance)
    roots: list[Finding] = []
    outcomes: list[Outcome] = []
    checks = [c for c in REGISTRY if compile or not c.extra]
    try:
        recordings.rollout()
        recordings.replayed(*recordings.windows()[0])
    except (Exception, SystemExit) as error:  # a policy that calls exit() must not pass
        roots.append(_why_it_does_not_run(subject, error, seed))
        return Report(printable(subject.name), tuple(roots), tuple(outcomes), seed)
    _refuse_constant_outputs(recordings)
    for number, check in enumerate(checks):
        if progress is not None:
            progress(number, len(checks), check.name)
        outcomes.append(_run_check(check, recordings, roots))
    if progress is not None:
        progress(len(checks), len(checks), "done")
    roots.extend(make_finding("replay", cause, evidence) for cause, evidence in subject.notes())
    order = {"error": 0, "warning": 1, "note": 2}
    roots.sort(key=lambda f: order[f.severity])
    return Report(
        printable(subject.name),
        tuple(roots),
        tuple(outcomes),
        seed,
        credit=recordings.credit,
        norms=recordings.rollout().norms,
        resets=recordings.script.resets.cpu(),
    )


def _run_check(check: Check, recordings: Recordings, roots: list[Finding]) -> Outcome:
    """Run one check and add what it found to `roots`, or beneath the root that it follows from."""
    outcome = Outcome(check.name, check.protects, "passed")
    case = Case(recordings, check.name, [], frozenset(f.cause for f in roots))
    try:
        outcome.said = check.run(case)
    except (NotApplicable, NotOffered) as reason:
        outcome.status, outcome.said = "not applicable", str(reason)
    except (Exception, SystemExit) as error:
        first_line = str(error).splitlines()[0][:200] if str(error) else ""
        outcome.status, outcome.said = "not examined", f"{type(error).__name__}: {first_line}"
        case.report(_cause_of_crash(error), outcome.said)
    if case.findings:
        outcome.status = "failed" if outcome.status == "passed" else outcome.status
        outcome.findings = [f for f, _ in case.findings]
    for found, because_of in case.findings:
        _add(found, because_of, roots, recordings.removed)
    return outcome


def _add(found: Finding, because_of: str | None, roots: list[Finding], removed: set[str]) -> None:
    for i, root in enumerate(roots):
        can_cause = root.severity == "error" and root.cause not in removed and because_of != ITSELF
        follows = can_cause and (follows_from(found, root) or because_of in ("any", root.cause))
        if follows or found.cause == root.cause:
            roots[i] = replace(root, consequences=(*root.consequences, found))
            return
    roots.append(found)


def _cause_of_crash(error: BaseException) -> str:
    text = str(error)
    if "second time" in text:
        return "graph-kept"
    if "Inference tensors" in text or "inference tensor" in text:
        return "inference-tensor-state"
    return "check-failed-to-run"


def _why_it_does_not_run(subject: Subject, error: BaseException, seed: int) -> Finding:
    """A leg cannot be recorded. Name the reason if it is known; otherwise raise `CannotExamine`."""
    said = f"{type(error).__name__}: {error}"
    cause = _cause_of_crash(error)
    for other_cause, other in [(c, s) for c, s in subject.alternatives() if isinstance(c, str)]:
        with contextlib.suppress(Exception):
            recordings = Recordings(other, seed)
            recordings.rollout()
            recordings.replayed(*recordings.windows()[0])
            cause = other_cause
    if cause == "check-failed-to-run":
        shown = f"it was shown observations of {subject.space.space}; observation_space= or --obs-shape sets others"
        hint = f" ({shown})" if hasattr(subject, "space") else ""
        raise CannotExamine(f"{subject.name} does not run as {type(subject).__name__} runs it: {said}{hint}") from error
    return make_finding("replay", cause, said.splitlines()[0], framework=subject.framework)


def _refuse_constant_outputs(recordings: Recordings) -> None:
    """Outputs that no observation changes say nothing about memory."""
    other = recordings.run(
        0, 2, obs=recordings.script.other_obs, flags="false"
    )  # no episode ends in the first two steps
    if torch.equal(other.output, recordings.rollout().output[:2]):
        raise CannotExamine(
            f"the outputs of {recordings.subject.name} do not depend on what it observes; if its last layers start at "
            "zero, give it trained or random weights, or features in place of logits"
        )


def _blame_on_alternatives(subject: Subject, report: Report, seed: int, tolerance: float | None) -> Report:
    """If one known change removes every error, that is the cause, and all errors are its consequences.

    A change that removes two mistakes has a tuple of causes; the errors are listed under the first.
    """
    for cause, other in subject.alternatives():
        causes = cause if isinstance(cause, tuple) else (cause,)
        if any(f.cause in causes for f in report.findings) and len(causes) == 1:
            continue
        if _examine(other, seed, False, tolerance, None).ok:
            errors = [f for f in report.findings if f.severity == "error"]
            rest = [f for f in report.findings if f.severity != "error"]
            removed = "this" if len(causes) == 1 else " and ".join(causes)
            several = f"all {len(errors)} errors are gone; the first was"
            gone = several if len(errors) > 1 else "the error is gone; it was"
            evidence = f"without {removed}, {gone}: {errors[0].evidence}"
            first, *more = [make_finding(errors[0].check, c, evidence, framework=subject.framework) for c in causes]
            flat = [inner for f in errors for inner in (replace(f, consequences=()), *f.consequences)]
            return replace(report, findings=(replace(first, consequences=tuple(flat)), *more, *rest))
    return report


@contextlib.contextmanager
def _everything_restored(given: Subject) -> Iterator[Subject]:
    """A copy to work on; random generators and settings are restored, and so is a subject that cannot be copied."""
    numpy_state, python_state = np.random.get_state(), random.getstate()
    threads = torch.get_num_threads()
    if sum(p.numel() for module in given.modules() for p in module.parameters()) < FEW_PARAMETERS:
        torch.set_num_threads(1)
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices), full_float32():
        restore: Callable[[], None] | None = None
        try:
            copy = given.isolated()
        except Exception:
            copy, restore = given, _restorer_of_weights(given)
        try:
            yield copy
        finally:
            if restore is not None:
                restore()
            torch.set_num_threads(threads)
            np.random.set_state(numpy_state)
            random.setstate(python_state)


def _restorer_of_weights(subject: Subject) -> Callable[[], None]:
    kept = [
        (module, {key: value.detach().clone() for key, value in module.state_dict().items()}, module.training)
        for module in subject.modules()
    ]

    def restore() -> None:
        for module, weights, training in kept:
            module.load_state_dict(weights, strict=False)
            module.train(training)

    return restore


# --- full float32 ----------------------------------------------------------------------------------------------------
# Full float32 for an examination, whatever the user set: in TF32 or bfloat16 the same product differs from leg to leg.


@contextmanager
def full_float32() -> Iterator[None]:
    """Products of float32 numbers are computed in float32 inside; the settings are restored.

    A GPU rounds factors to TF32 (1e-3 of their size) only in some of its algorithms, and one step is computed by another
    algorithm than a segment.
    """
    parts: list[Any] = [cuda.matmul, *_parts(cudnn, "conv", "rnn"), *_parts(mkldnn, "matmul", "conv", "rnn")]
    before = [part.fp32_precision for part in parts]
    # torch has older names for the same settings and refuses to read them if they disagree: those are then left alone.
    matmul = in_cudnn = None
    with suppress(RuntimeError):
        matmul = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
    with suppress(RuntimeError):
        in_cudnn, cudnn.allow_tf32 = cudnn.allow_tf32, False
    for part in parts:
        part.fp32_precision = "ieee"
    try:
        yield
    finally:
        if matmul is not None:
            torch.set_float32_matmul_precision(matmul)
        if in_cudnn is not None:
            cudnn.allow_tf32 = in_cudnn
        for part, precision in zip(parts, before):
            part.fp32_precision = precision


def _parts(backend: Any, *names: str) -> list[Any]:
    return [getattr(backend, name) for name in names]
