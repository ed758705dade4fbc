"""Runs all checks on one subject and sorts what they found: one bug, one finding, the rest beneath it."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from holdfast.doctor.checks import REGISTRY, Case, Check, NotApplicable
from holdfast.doctor.consequences import FOLLOWS
from holdfast.doctor.exam import Exam
from holdfast.doctor.findings import Finding, Outcome, finding
from holdfast.doctor.report import Report
from holdfast.doctor.subject import NotOffered, Subject


class CannotExamine(Exception):
    """The policy does not run as the subject says it does; the text says where it stopped."""


#: fewer parameters than this are faster in one thread, and many times so on a busy machine
SMALL = 2_000_000

Progress = Callable[[int, int, str], None]


def examine(
    subject: Any,
    *,
    seed: int = 0,
    compile: bool = False,
    tolerance: float | None = None,
    progress: Progress | None = None,
) -> Report:
    """Examines a recurrent policy and says what is wrong with its memory.

    `subject`: a `holdfast.doctor.subjects` subject, one of your own, or anything one can be made of (a Holdfast policy
    or core, `nn.LSTM`, `nn.GRU`, a `RecurrentPPO`). Deterministic for a seed. The policy is left as it was: weights,
    buffers, memory and all random generators. `compile` adds the (slow) torch.compile check. `tolerance`: differences
    that count as rounding; by default 1e-5, and 1e-2 for half precision. Raises `CannotExamine` when it does not run.
    """
    from holdfast.doctor.choose import as_subject

    given = as_subject(subject)
    started = time.perf_counter()
    with _everything_restored(given) as copy:
        report = _examine(copy, seed, compile, tolerance, progress)
        if not report.ok:
            report = _blame_on_alternatives(copy, report, seed, tolerance)
        if copy is given:
            note = finding("repeatable", "examined-in-place", f"{type(given).__name__}.isolated() failed")
            report = replace(report, findings=(*report.findings, note))
    return replace(report, seconds=time.perf_counter() - started)


def assert_healthy(subject: Any, *, seed: int = 0, tolerance: float | None = None) -> Report:
    """For pytest: raises AssertionError with the findings when the policy has an error."""
    report = examine(subject, seed=seed, tolerance=tolerance)
    if not report.ok:
        raise AssertionError(report.to_text())
    return report


def _examine(subject: Subject, seed: int, compile: bool, tolerance: float | None, progress: Progress | None) -> Report:
    exam = Exam(subject, seed, tolerance)
    roots: list[Finding] = []
    outcomes: list[Outcome] = []
    checks = [c for c in REGISTRY if compile or not c.extra]
    try:
        exam.rollout()
        exam.replayed(*exam.windows()[0])
    except Exception as error:
        _why_it_does_not_run(subject, error, roots, seed)
        return Report(subject.name, tuple(roots), tuple(outcomes), seed)
    for number, item in enumerate(checks):
        if progress is not None:
            progress(number, len(checks), item.name)
        outcomes.append(_one_check(item, exam, roots))
    if progress is not None:
        progress(len(checks), len(checks), "done")
    roots.extend(finding("replay", cause, evidence) for cause, evidence in subject.notes())
    order = {"error": 0, "warning": 1, "note": 2}
    roots.sort(key=lambda f: order[f.severity])
    trace = exam.rollout()
    return Report(
        subject.name,
        tuple(roots),
        tuple(outcomes),
        seed,
        credit=exam.credit,
        norms=trace.norms,
        resets=exam.script.resets.cpu(),
    )


def _one_check(item: Check, exam: Exam, roots: list[Finding]) -> Outcome:
    """Runs one check and files what it found: on its own, or beneath what it follows from."""
    outcome = Outcome(item.name, item.protects, "passed")
    case = Case(exam, item.name, [], frozenset(f.cause for f in roots))
    try:
        outcome.said = item.run(case)
    except (NotApplicable, NotOffered) as reason:
        outcome.status, outcome.said = "not applicable", str(reason)
    except Exception as error:
        outcome.status, outcome.said = (
            "not examined",
            f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}",
        )
        case.report(*_of_a_crash(error, outcome.said))
    if case.findings:
        outcome.status = "failed" if outcome.status == "passed" else outcome.status
        outcome.findings = [f for f, _ in case.findings]
    for found, because_of in case.findings:
        _file(found, because_of, roots)
    return outcome


def _file(found: Finding, because_of: str | None, roots: list[Finding]) -> None:
    for i, root in enumerate(roots):
        follows = found.cause in FOLLOWS.get(root.cause, frozenset()) or found.cause == root.cause
        if root.severity == "error" and (follows or because_of in ("any", root.cause)):
            roots[i] = replace(root, consequences=(*root.consequences, found))
            return
    roots.append(found)


def _of_a_crash(error: Exception, said: str) -> tuple[str, str]:
    text = str(error)
    if "second time" in text:
        return "graph-kept", said
    if "Inference tensors" in text or "inference tensor" in text:
        return "inference-tensor-state", said
    return "check-failed-to-run", said


def _why_it_does_not_run(subject: Subject, error: Exception, roots: list[Finding], seed: int) -> None:
    """Neither leg can be recorded: name the reason if it can be told, else give up."""
    said = f"{type(error).__name__}: {error}"
    cause, evidence = _of_a_crash(error, said)
    for other_cause, other in subject.alternatives():
        with contextlib.suppress(Exception):
            exam = Exam(other, seed)
            exam.rollout()
            exam.replayed(*exam.windows()[0])
            cause = other_cause
    if cause == "check-failed-to-run":
        shown = f"it was shown observations of {subject.space.space}; observation_space= sets others"
        hint = f" ({shown})" if hasattr(subject, "space") else ""
        raise CannotExamine(f"{subject.name} does not run as {type(subject).__name__} runs it: {said}{hint}") from error
    roots.append(finding("replay", cause, evidence.splitlines()[0]))


def _blame_on_alternatives(subject: Subject, report: Report, seed: int, tolerance: float | None) -> Report:
    """If one known change makes every error go away, that is the cause, and all errors are its consequences."""
    for cause, other in subject.alternatives():
        if any(f.cause == cause for f in report.findings):
            continue
        if _examine(other, seed, False, tolerance, None).ok:
            errors = [f for f in report.findings if f.severity == "error"]
            rest = [f for f in report.findings if f.severity != "error"]
            root = finding(
                errors[0].check,
                cause,
                f"without this, all {len(errors)} errors are gone; the first was: {errors[0].evidence}",
            )
            flat = [inner for f in errors for inner in (replace(f, consequences=()), *f.consequences)]
            return replace(report, findings=(replace(root, consequences=tuple(flat)), *rest))
    return report


@contextlib.contextmanager
def _everything_restored(given: Subject) -> Iterator[Subject]:
    """Works on a copy, and puts back every random generator; a subject that cannot be copied is put back itself."""
    import numpy as np

    numpy_state, python_state = np.random.get_state(), random.getstate()
    threads = torch.get_num_threads()
    if sum(p.numel() for module in given.modules() for p in module.parameters()) < SMALL:
        torch.set_num_threads(1)
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        try:
            copy = given.isolated()
            put_back: Callable[[], None] = _nothing
        except Exception:
            copy, put_back = given, _weights_of(given)
        try:
            yield copy
        finally:
            put_back()
            torch.set_num_threads(threads)
            np.random.set_state(numpy_state)
            random.setstate(python_state)


def _weights_of(subject: Subject) -> Callable[[], None]:
    kept = [
        (module, {key: value.detach().clone() for key, value in module.state_dict().items()}, module.training)
        for module in subject.modules()
    ]

    def put_back() -> None:
        for module, weights, training in kept:
            module.load_state_dict(weights, strict=False)
            module.train(training)

    return put_back


def _nothing() -> None:
    pass
