"""The program that is written next to an exported file: how to run it without Holdfast."""

from __future__ import annotations

from holdfast.deploy.exported_signature import Port, Signature

_ONNX_PROGRAM = '''\
"""How to run {file}: numpy and onnxruntime, nothing else. Written by `holdfast export`."""
from pathlib import Path
import numpy as np
import onnxruntime

B = 1  # environments; any number
session = onnxruntime.InferenceSession(Path(__file__).with_name("{file}"))
names = [output.name for output in session.get_outputs()]  # {outputs}
state = {state}
resets = np.ones(B, bool)  # True where the observation is the first of an episode
for _ in range(3):
    obs = {obs}  # from your environment
    out = dict(zip(names, session.run(names, {{**obs, **state, "resets": resets{masks}}})))
    state = {{name: out[f"{{name}}_next"] for name in state}}  # never forget this
    print({printed})
    resets = np.zeros(B, bool)  # from your environment: terminated | truncated
'''

_PT2_PROGRAM = '''\
"""How to run {file}: torch, nothing else. Written by `holdfast export`."""
from pathlib import Path
import torch

B = 1  # environments; any number
policy = torch.export.load(Path(__file__).with_name("{file}")).module()  # gives {outputs}
state = {state}
resets = torch.ones(B, dtype=torch.bool)  # True where the observation is the first of an episode
for _ in range(3):
    obs = {obs}  # from your environment
    out = policy(**obs, **state, resets=resets{masks})
    state = {{name: out[f"{{name}}_next"] for name in state}}  # never forget this
    print({printed})
    resets = torch.zeros(B, dtype=torch.bool)  # from your environment: terminated | truncated
'''


def usage_program(file: str, format: str, signature: Signature) -> str:
    """A short program that runs the file for three steps."""
    library = "np" if format == "onnx" else "torch"
    printed = ", ".join(f'out["{name}"]' for name in ("action", "value") if name in signature.outputs)
    observations, states = (_dict(ports, library) for ports in (signature.observations, signature.states))
    masks = f", **{_dict(signature.masks, library, 'ones')}" if signature.masks else ""
    template = _ONNX_PROGRAM if format == "onnx" else _PT2_PROGRAM
    outputs = ", ".join(signature.outputs)
    return template.format(file=file, outputs=outputs, state=states, obs=observations, masks=masks, printed=printed)


def _dict(ports: list[Port], library: str, make: str = "zeros") -> str:
    """The text of a dict of arrays by input name."""
    parts = []
    for port in ports:
        shape = f"({', '.join(map(str, ('B', *port.shape)))})" if port.shape else "(B,)"
        dtype = "bool_" if (library, port.dtype) == ("np", "bool") else port.dtype  # numpy 1.24 to 1.26 have no np.bool
        fill = f"full({shape}, {port.example}" if isinstance(port.example, int) else f"{make}({shape}"
        parts.append(f'"{port.name}": {library}.{fill}, dtype={library}.{dtype})')
    return "{" + ", ".join(parts) + "}"
