"""`holdfast info --core NAME`: what a memory costs. Parameters, state per environment, arithmetic and time per step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

Row = tuple[str, str]
_ENVIRONMENTS = 64
_SEQUENCE = 32  # steps of the timed sequence


def core_rows(name: str, hidden_size: int, num_layers: int) -> list[Row]:
    """The memory that `--core NAME` makes, with as many inputs as hidden units, as in the trainer."""
    import torch

    from holdfast import state as state_ops
    from holdfast.cores import Core
    from holdfast.cores.named import CORES, made_of, make_core

    if name not in CORES:
        raise ValueError(f"unknown core {name!r}; one of {', '.join(CORES)}")
    core: Core = make_core(name, hidden_size, hidden_size, num_layers, "zero")
    leaves = state_ops.named_leaves(core.initial_state(1))
    total = sum(leaf.nbytes for leaf in leaves.values())
    shapes = ", ".join(
        f"{path} {list(leaf.shape[1:])} {str(leaf.dtype).removeprefix('torch.')}" for path, leaf in leaves.items()
    )
    x = torch.randn(_SEQUENCE, _ENVIRONMENTS, hidden_size)
    state, resets = core.initial_state(_ENVIRONMENTS), torch.rand(_SEQUENCE, _ENVIRONMENTS) < 0.01

    def step() -> None:
        with torch.no_grad():
            core(x[0], state, resets[0])

    def training() -> None:
        core(x, state, resets)[0].sum().backward()

    count = _ENVIRONMENTS * _SEQUENCE
    return [
        (
            "core",
            f"{name}, {hidden_size} unit{'s' * (hidden_size != 1)}"
            + (f", {num_layers} layers" if num_layers > 1 else ""),
        ),
        ("made of", made_of(core)),
        ("parameters", f"{sum(p.numel() for p in core.parameters()):,}"),
        ("state", f"{_bytes(total)} per environment: {shapes}"),
        (
            "arithmetic",
            f"{_multiplications(core, hidden_size):,} multiplications per step and environment, in products",
        ),
        ("one step", f"{_best(step) * 1e6:,.0f} us for {_ENVIRONMENTS} environments on this CPU, {_threads(torch)}"),
        ("training", f"{_best(training) / count * 1e6:.2f} us per step, forward and backward, {_threads(torch)}"),
    ]


def _threads(torch: Any) -> str:
    number = torch.get_num_threads()
    return f"{number} thread{'' if number == 1 else 's'}"


def _bytes(number: int) -> str:
    return f"{number:,} bytes" if number < 1024 else f"{number / 1024:,.1f} KiB"


def _multiplications(core: Any, inputs: int) -> int:
    """Of one step of one environment, as torch counts its products; the reference kernels show them all."""
    import copy

    import torch
    from torch.utils.flop_counter import FlopCounterMode

    twin = copy.deepcopy(core)
    for part in twin.modules():
        if hasattr(part, "kernel"):
            part.kernel = "reference"
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        # A sequence of one: a single step may run in an operator that torch cannot count.
        twin(torch.zeros(1, 1, inputs))
    return counter.get_total_flops() // 2


def _best(run: Callable[[], None]) -> float:
    """Seconds: the smallest of a few runs. With one thread the process's time, which a busy machine does not stretch."""
    import torch

    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    seconds = math.inf
    for _ in range(8):
        begin = clock()
        run()
        seconds = min(seconds, clock() - begin)
    return seconds
