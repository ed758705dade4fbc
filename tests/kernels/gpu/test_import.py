"""The first call on a GPU imports its kernels, which must not import what takes seconds."""

import subprocess
import sys

CODE = """
import sys, holdfast
before = set(sys.modules)
from holdfast.kernels import gpu
print(sorted(n for n in set(sys.modules) - before if n in ("torch._dynamo", "torch._inductor", "triton", "sympy")))
"""


def test_gpu_kernels_import_neither_compiler_nor_triton() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
