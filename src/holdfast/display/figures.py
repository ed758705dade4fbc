"""Figures as files, drawn by matplotlib, which is imported when a figure is made."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from holdfast.runs.writing import write_whole


def new_figure(size: tuple[float, float]) -> Any:
    """A figure of this width and height in inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise ModuleNotFoundError("plots need matplotlib: pip install 'holdfast[plot]'") from missing
    return Figure(figsize=size, layout="constrained")


def save_figure(figure: Any, out: Path, **options: Any) -> Path:
    """Write a figure, in the format that the name of the file says, PNG by default. An existing link is replaced."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)  # a name from a file is no formula
    data = io.BytesIO()
    figure.savefig(data, dpi=150, format=out.suffix[1:] or "png", **options)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, [data.getbuffer()])
    return out
