"""Capturing CUDA graphs so that several runs in one process do not disturb each other. What is captured is elsewhere.

While one thread captures, no other may synchronize with the GPU or allocate on it: the capture would end. So runs in
several threads take turns, a rollout or an update at a time.
"""

from __future__ import annotations

import functools
import gc
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributions import Distribution

from holdfast.state import State, tree_map

_turn = threading.RLock()
_LIBRARIES = tuple(f"{Path(file).parents[depth]}/" for file, depth in ((torch.__file__, 0), (__file__, 1)))


class NotCapturable(Exception):
    """What was to be captured waits for the GPU; the text says where."""


@contextmanager
def exclusive_gpu(device: torch.device) -> Iterator[None]:
    """Inside, no other run of this process uses the GPU, and it is the current one; no-op on other devices."""
    if device.type != "cuda":
        yield
        return
    with _turn, torch.cuda.device(device):
        yield


@functools.cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """torch's own is one for the whole process, on the GPU of the first capture."""
    return torch.cuda.Stream(device)


@contextmanager
def side_stream() -> Iterator[None]:
    """Warm-up runs on a stream of its own, as capturing requires."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        torch.cuda.current_stream().wait_stream(stream)


@contextmanager
def rehearsal() -> Iterator[None]:
    """Work inside is to be captured next. Raises `NotCapturable` if it waits for the GPU: a capture would not survive that."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this mode may miss something
        torch.cuda.set_sync_debug_mode("error")
    try:
        with unchecked_distributions():
            yield
    except RuntimeError as error:
        if "synchronizing CUDA operation" not in str(error):
            raise
        raise NotCapturable(_place_of(error)) from error
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _place_of(error: BaseException) -> str:
    """The line that waits for the GPU, in words: the last one that is neither torch's nor ours, if there is one."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    place = (theirs or frames)[-1]
    return f"{Path(place.filename).name}:{place.lineno} waits for the GPU ({place.line})"


@contextmanager
def unchecked_distributions() -> Iterator[None]:
    """Distributions of torch look at their arguments by default, which waits for the GPU, and a trace has no values to look at."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """Work inside goes into the graph.

    Garbage collection is off during a capture. A finished run is a reference cycle, so the collector could free its graphs
    at any time. Freeing a graph aborts the capture and leaves the random generator in capture mode. "thread_local" lets
    NCCL's watchdog thread query events. After an error the process can go on as if there had been no capture.

    cuBLAS gets a workspace of its own from the graph's memory. torch keeps one for all captures, and in versions after 2.11 gives
    it back when any of these graphs is freed: the others would go on to use it (pytorch/pytorch#193402).
    """
    with _turn, unchecked_distributions():
        gc.collect()
        enabled = gc.isenabled()
        gc.disable()
        device = torch.cuda.current_device()
        generator = torch.cuda.default_generators[device]
        stream, random_state, pool = torch.cuda.current_stream(), generator.get_state(), torch.cuda.graph_pool_handle()
        torch._C._cuda_clearCublasWorkspaces()
        try:
            with torch.cuda.graph(graph, pool, _capture_stream(device), capture_error_mode="thread_local"):
                yield
        except BaseException:
            _abandon(pool, stream, generator, random_state)
            raise
        finally:
            torch._C._cuda_clearCublasWorkspaces()
            if enabled:
                gc.enable()


def read_later(numbers: torch.Tensor) -> Callable[[], list[float]]:
    """Copy numbers to the host. The result waits for this copy and for nothing that is queued after it."""
    if not numbers.is_cuda:
        return numbers.tolist
    on_host = torch.empty_like(numbers, device="cpu", pin_memory=True)
    on_host.copy_(numbers, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(numbers.device))

    def read() -> list[float]:
        copied.synchronize()
        return on_host.tolist()

    return read


def _abandon(pool: Any, stream: torch.cuda.Stream, generator: torch.Generator, state: Any) -> None:
    """torch leaves a failed capture halfway: its stream stays the current one, and the random generator and the allocator stay in
    capture mode, so that the next random number is an error and memory is never given back."""
    torch.cuda.set_stream(stream)
    fresh = torch.Generator(generator.device)
    fresh.set_state(state)
    generator.graphsafe_set_state(fresh)
    with suppress(RuntimeError, AttributeError):
        # Refused if torch has done it: the graph releases its pool.
        torch._C._cuda_endAllocateToPool(generator.device.index, pool)
        torch._C._cuda_releasePool(generator.device.index, pool)


def copy_into(target: State, source: State) -> None:
    """Copy every leaf in place."""
    tree_map(lambda a, b: a.copy_(b), target, source)
