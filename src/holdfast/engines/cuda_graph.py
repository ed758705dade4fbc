"""Capturing CUDA graphs so that several runs in one process do not disturb each other. What is captured is elsewhere."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from holdfast.state import State, tree_map

# Captures of a process run one at a time: an allocation elsewhere must not fall into the middle of one.
_one_at_a_time = threading.RLock()


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

    The garbage collector is off meanwhile. An earlier run is a reference cycle, so the collector frees its graphs, at any
    allocation; freeing a graph during a capture ends the capture, and the random number generator never leaves it.
    "thread_local": other threads (NCCL's watchdog, a second run) may use CUDA while this one captures.
    """
    with _one_at_a_time:
        gc.collect()
        enabled = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                yield
        finally:
            if enabled:
                gc.enable()


def copy_into(target: State, source: State) -> None:
    """Copy every leaf in place."""
    tree_map(lambda a, b: a.copy_(b), target, source)
