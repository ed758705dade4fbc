"""GPU memory in which a wrong address is always a fault. Needs a GPU and a C compiler; not part of `make test`.

torch gives out parts of large blocks, so a kernel that reads past a tensor, or a CUDA graph that reads a tensor which is gone,
usually meets other memory of the process: nothing happens, or wrong numbers. Here every tensor has pages of its own
(guarded_memory.c), and both end the process. Run it over tests, or over its own planted faults:

    CUDA_ENABLE_COREDUMP_ON_EXCEPTION=1 PYTHONPATH=tests/kernels/guard python -m pytest -p guarded_memory tests/engines
    python tests/kernels/guard/guarded_memory.py
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path

import torch

SOURCE = Path(__file__).with_suffix(".c")


def install() -> None:
    """Give all CUDA tensors of this process memory of that kind. Call it before the first one is made."""
    library = _compiled()
    allocator = torch.cuda.memory.CUDAPluggableAllocator(str(library), "guarded_malloc", "guarded_free")
    torch.cuda.memory.change_current_allocator(allocator)
    calls = ctypes.CDLL(str(library))
    begin, end = torch.cuda.CUDAGraph.capture_begin, torch.cuda.CUDAGraph.capture_end

    def capture_begin(self, *args, **kwargs):
        weakref.finalize(self, calls.guarded_graph_gone, calls.guarded_capture_begins())
        try:
            return begin(self, *args, **kwargs)
        except BaseException:
            calls.guarded_capture_ends()
            raise

    def capture_end(self):
        try:
            return end(self)
        finally:
            calls.guarded_capture_ends()

    torch.cuda.CUDAGraph.capture_begin, torch.cuda.CUDAGraph.capture_end = capture_begin, capture_end


def _compiled() -> Path:
    import triton

    headers = Path(triton.__file__).parent / "backends/nvidia/include"
    library = Path(tempfile.mkdtemp()) / "guarded_memory.so"
    command = ["cc", "-O1", "-shared", "-fPIC", f"-I{headers}", str(SOURCE), "-o", str(library), "-ldl", "-lpthread"]
    subprocess.run(command, check=True)
    return library


def pytest_configure() -> None:
    if torch.cuda.is_available():
        install()


# --- planted faults ------------------------------------------------------------------------------------------------------


def _copy_kernel():
    import triton
    import triton.language as tl

    @triton.jit
    def copy(source, target, SIZE: tl.constexpr):
        at = tl.arange(0, SIZE)
        tl.store(target + at, tl.load(source + at))

    return copy


def nothing_wrong() -> None:
    x, y = torch.arange(1024.0, device="cuda"), torch.empty(1024, device="cuda")
    _copy_kernel()[(1,)](x, y, SIZE=1024)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        z = (y + 1) * 2 - torch.ones_like(y)
    for _ in range(3):
        y += 1
        torch.cuda.empty_cache()
        graph.replay()
    assert torch.equal(z, (x + 3) * 2 + 1)


def read_past_the_end() -> None:
    x, y = torch.arange(1020.0, device="cuda"), torch.empty(1024, device="cuda")
    _copy_kernel()[(1,)](x, y, SIZE=1024)


def backward_in_a_thread_of_torch() -> None:
    x = torch.ones(1024, device="cuda", requires_grad=True)
    (x * x).sum().backward()
    assert x.grad.sum() == 2048


def graph_reads_a_tensor_that_is_gone() -> None:
    x = torch.ones(1024, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
    del x
    graph.replay()
    y.sum().item()


def uninitialized() -> None:
    assert torch.empty(1024, device="cuda").isnan().all()
    raise SystemExit(3)


FAULTS = {
    nothing_wrong: "exit 0",
    backward_in_a_thread_of_torch: "exit 0",
    uninitialized: "exit 3",
    read_past_the_end: "fault",
    graph_reads_a_tensor_that_is_gone: "fault",
}


def main() -> int:
    if len(sys.argv) > 1:
        install()
        {case.__name__: case for case in FAULTS}[sys.argv[1]]()
        torch.cuda.synchronize()
        return 0
    wrong = 0
    for case, expected in FAULTS.items():
        environment = {**os.environ, "CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "0"}
        done = subprocess.run(
            [sys.executable, __file__, case.__name__], capture_output=True, text=True, env=environment
        )
        seen = "fault" if "illegal memory access" in done.stderr else f"exit {done.returncode}"
        wrong += seen != expected
        print(f"{case.__name__}: {seen}" + ("" if seen == expected else f", expected {expected}\n{done.stderr}"))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
