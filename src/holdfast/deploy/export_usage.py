"""The program that is written next to an exported file: how to run it without Holdfast. `usage_*.py.txt` are its templates."""

from __future__ import annotations

from pathlib import Path

from holdfast.deploy.exported_signature import Port, Signature


def usage_program(file: str, format: str, signature: Signature) -> str:
    """A short program that runs the file for three steps."""
    library = "np" if format == "onnx" else "torch"
    printed = ", ".join(f'out["{name}"]' for name in ("action", "value") if name in signature.outputs)
    observations, states = (_dict(ports, library) for ports in (signature.observations, signature.states))
    masks = f", **{_dict(signature.masks, library, 'ones')}" if signature.masks else ""
    template = Path(__file__).with_name(f"usage_{format}.py.txt").read_text(encoding="utf-8")
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
