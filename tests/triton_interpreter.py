"""Runs scripts with Triton's kernels interpreted on the CPU, and makes the interpreter of Triton 3.6 work with numpy 2.4."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def run(script: Path) -> Any:
    """What a script prints as JSON, in a process of its own: Triton decides when a kernel is defined whether it is interpreted."""
    search = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    interpreted = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": search}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300, env=interpreted)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def accept_arrays_as_numbers() -> None:
    """Triton 3.6's interpreter takes `int` of an array [1] for the end of a loop, which numpy 2.4 refuses."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor


class OutOfBoundsError(Exception):
    """A kernel touched memory that is not its own."""


def check_memory() -> list[Any]:
    """From now on, kernels that load or store outside the tensors they are given raise `OutOfBoundsError`.

    Returns a list for tensors that a kernel finds by other ways than its arguments. On a GPU such an access is often silent.
    """
    from triton.runtime import interpreter

    others: list[Any] = []
    memory = _CheckedMemory(interpreter._interpreter, others)
    interpreter._interpreter = memory
    prepare = interpreter.GridExecutor._init_args_hst

    def prepare_and_note(self: Any, args: Any, kwargs: Any) -> Any:
        prepared = prepare(self, args, kwargs)
        memory.arguments = [arg for arg in (*prepared[0], *prepared[1].values()) if hasattr(arg, "data_ptr")]
        memory.kernel = self.fn.__name__
        return prepared

    interpreter.GridExecutor._init_args_hst = prepare_and_note
    return others


class _CheckedMemory:
    """Stands in for the interpreter's access to memory."""

    def __init__(self, real: Any, others: list[Any]) -> None:
        self.real, self.others = real, others
        self.arguments: list[Any] = []
        self.kernel, self.accesses = "", 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        import numpy

        self._check("loads", pointers, mask, numpy.dtype(dtype).itemsize)
        return self.real.load(pointers, mask, other, dtype)

    def store(self, pointers: Any, value: Any, mask: Any) -> Any:
        self._check("stores", pointers, mask, value.dtype.itemsize)
        return self.real.store(pointers, value, mask)

    def atomic_rmw(self, operation: Any, pointers: Any, value: Any, mask: Any, order: Any) -> Any:
        self._check("adds", pointers, mask, value.dtype.itemsize)
        return self.real.atomic_rmw(operation, pointers, value, mask, order)

    def _check(self, verb: str, pointers: Any, mask: Any, size: int) -> None:
        import numpy

        used = pointers[numpy.broadcast_to(mask, pointers.shape).astype(bool)].astype(numpy.uint64)
        inside = numpy.zeros(used.shape, dtype=bool)
        for tensor in (*self.arguments, *self.others):
            if tensor.numel():
                last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride()))
                begin, end = tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
                inside |= (used >= begin) & (used + numpy.uint64(size) <= end)
        self.accesses += 1
        if not inside.all():
            raise OutOfBoundsError(f"{self.kernel} {verb} {int((~inside).sum())} numbers outside its tensors")
