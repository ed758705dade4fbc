"""A notebook as a page of the site: its text, its code, and what the cells printed and drew when they were run."""

from __future__ import annotations

import base64
import json
from pathlib import Path


def page(path: Path) -> str:
    """The notebook as Markdown. Pictures are in the page."""
    cells = json.loads(path.read_text())["cells"]
    note = f"\n*This page is [`notebooks/{path.name}`](../../notebooks/{path.name}), as it was run.*\n"
    first, *rest = map(_cell, cells)
    return "\n".join([first, note, *rest])


def _cell(cell: dict) -> str:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return source + "\n"
    return "\n".join([f"```python\n{source}\n```\n", *map(_output, cell["outputs"])])


def _output(output: dict) -> str:
    if output["output_type"] == "stream":
        return _text("".join(output["text"]))
    data = output.get("data", {})
    if "image/svg+xml" in data:
        picture = base64.b64encode("".join(data["image/svg+xml"]).encode()).decode()
        return f'<img alt="what the cell drew" src="data:image/svg+xml;base64,{picture}">\n'
    return _text("".join(data.get("text/plain", [])))


def _text(text: str) -> str:
    return f'```text title="printed"\n{text.rstrip()}\n```\n' if text.strip() else ""
