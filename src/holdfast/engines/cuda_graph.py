"""Capturing CUDA graphs so that several runs in one process do not disturb each other. What is captured is elsewhere.

While one thread captures, no other may synchronize with the GPU or allocate on it: the capture would end. So runs in
several threads take turns, a rollout or an update at a time.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from holdfast.state import State, tree_map

_turn = threading.RLock()


def gpu_turn(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, no other run of this process uses the GPU; no-op on other devices."""
    return _turn if device.type == "cuda" else nullcontext()


@contextmanager
def side_stream() -> Iterator[None]:
    """Warm-up runs on a stream of its own, as capturing requires."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """Work inside goes into the graph.

    Garbage collection is off during a capture. A finished run is a reference cycle, so the collector could free its graphs
    at any time. Freeing a graph aborts the capture and leaves the random generator in capture mode. "thread_local" lets
    NCCL's watchdog thread query events.
    """
    with _turn:
        gc.collect()
        enabled = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                yield
        finally:
            if enabled:
                gc.enable()


def read_later(numbers: torch.Tensor) -> Callable[[], list[float]]:
    """Copy numbers to the host. The result waits for this copy and for nothing that is queued after it."""
    if not numbers.is_cuda:
        return numbers.tolist
    on_host = torch.empty_like(numbers, device="cpu", pin_memory=True)
    on_host.copy_(numbers, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def read() -> list[float]:
        copied.synchronize()
        return on_host.tolist()

    return read


def copy_into(target: State, source: State) -> None:
    """Copy every leaf in place."""
    tree_map(lambda a, b: a.copy_(b), target, source)
