"""The text that `--profile` prints: a table of spans, and one of operations or GPU kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.distributed.ranks import EXCHANGE
from holdfast.profiling.clock import SpanPath, Spent
from holdfast.profiling.trace import Cost, Trace, readable

ROWS = 12
"""Operations or kernels listed."""
WIDTH = 60
SMALL = 0.005
"""Time outside the inner spans gets no line if it is below this share of the total."""

FIRST = "rollout"
"""The loop begins with this span, but the clock starts after an update, so that it sees the end of the loop first."""
# What a span does outside the spans inside it. Such time has a name, and counts as accounted for.
REST = {
    "rollout": "keeping the steps",
    "update": "cutting minibatches, metrics",
}


@dataclass
class Timed:
    """Some updates in a row, timed."""

    first: int  # number of the first update, from 1
    updates: int
    steps: int
    seconds: float
    spent: Mapping[SpanPath, Spent] = field(default_factory=dict)


def spans_table(timed: Timed, unobserved_speed: float | None = None) -> list[str]:
    """Milliseconds per update and shares; inner spans are indented. `unobserved_speed`: steps per second before."""
    each = 1e3 * timed.seconds / timed.updates
    last = timed.first + timed.updates - 1
    which = f"update {last}" if timed.updates == 1 else f"updates {timed.first} to {last}"
    lines = [f"where the time goes: {which}, {each:,.1f} ms each, {timed.steps / timed.seconds:,.0f} steps/s", ""]
    lines.append(f"  {'part':{WIDTH}}{'ms per update':>14}{'share':>8}{'calls':>8}")
    lines += _rows((), timed.seconds, timed)
    lines += ["", f"  {accounted(timed):.1%} of the time is accounted for"]
    if unobserved_speed is not None:
        speed = f"{unobserved_speed:,.0f} steps/s"
        lines += ["", f"  (The clock waits for the GPU at both ends of every part; without it: {speed}.)"]
    return lines


def accounted(timed: Timed) -> float:
    """The share of the time that has a name: spans without others inside, and rests of the others that have one."""
    parents = {(): timed.seconds, **{path: spent.seconds for path, spent in timed.spent.items()}}
    unnamed = 0.0
    for path, seconds in parents.items():
        inside = [inner for inner in timed.spent if inner and inner[:-1] == path]
        if inside and _name_of_rest(path, inside) is None:
            unnamed += seconds - sum(timed.spent[inner].seconds for inner in inside)
    return 1 - unnamed / timed.seconds


def _name_of_rest(parent: SpanPath, inside: list[SpanPath]) -> str | None:
    """What a span does outside the spans inside it; None if nobody has given it a name."""
    if parent and all(path[-1] == EXCHANGE for path in inside):
        return "on this rank"
    return REST.get(parent[-1]) if parent else None


def _rows(parent: SpanPath, seconds: float, timed: Timed) -> list[str]:
    inner = [path for path in timed.spent if path[:-1] == parent]
    if (FIRST,) in inner:
        start = inner.index((FIRST,))
        inner = inner[start:] + inner[:start]
    lines = []
    for path in inner:
        spent = timed.spent[path]
        lines.append(_row(path[-1], len(parent), spent.seconds, timed, spent.calls))
        lines += _rows(path, spent.seconds, timed)
    rest = seconds - sum(timed.spent[path].seconds for path in inner)
    if inner and rest > SMALL * timed.seconds:
        name = _name_of_rest(parent, inner) or ("the rest of it" if parent else "everything else")
        lines.append(_row(name, len(parent), rest, timed, None))
    return lines


def _row(name: str, depth: int, seconds: float, timed: Timed, calls: int | None) -> str:
    per_update = "" if calls is None else _count(calls / timed.updates)
    each, share = 1e3 * seconds / timed.updates, seconds / timed.seconds
    return f"  {'  ' * depth + name:{WIDTH}}{each:14,.2f}{share:8.1%}{per_update:>8}"


def costs_table(trace: Trace, on_gpu: bool, updates: int, seconds: float) -> list[str]:
    """Operations (on a CPU) or kernels (on a GPU) by total time, from a trace of `updates` in `seconds`."""
    costs: Sequence[Cost] = trace.kernels() if on_gpu else trace.operations()
    if not costs:
        return ["the trace holds no kernels" if on_gpu else "the trace holds no operations"]
    total = sum(cost.seconds for cost in costs)
    traced = f"{updates} traced update{'s' if updates > 1 else ''}"
    if on_gpu:
        busy = trace.busy_seconds()
        lines = [f"the GPU was busy for {busy / seconds:.0%} of {1e3 * seconds:,.1f} ms ({traced}); its kernels:"]
    else:
        lines = [f"operations, without those inside them ({traced}; tracing slows small ones down):"]
    lines += ["", f"  {'kernel' if on_gpu else 'operation':{WIDTH}}{'ms per update':>14}{'share':>8}{'calls':>8}"]
    for cost in costs[:ROWS]:
        name, calls = readable(cost.name, WIDTH - 2), _count(cost.calls / updates)
        lines.append(f"  {name:{WIDTH}}{1e3 * cost.seconds / updates:14,.2f}{cost.seconds / total:8.1%}{calls:>8}")
    others = costs[ROWS:]
    if others:
        name = f"{len(others)} other{'s' * (len(others) != 1)}"
        rest, calls = sum(cost.seconds for cost in others), _count(sum(cost.calls for cost in others) / updates)
        lines.append(f"  {name:{WIDTH}}{1e3 * rest / updates:14,.2f}{rest / total:8.1%}{calls:>8}")
    return lines


def _count(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 or number == int(number) else f"{number:.2g}"
