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
