"""Draws docs/figures/display.svg, the live display of a training run: `python docs/tools/display_figure.py`.

A real run of a preset, shown as it was two thirds of the way. Its numbers differ from run to run and machine to machine.
"""

from __future__ import annotations

import dataclasses
import io
import os
import re
import tempfile
from pathlib import Path

from rich.console import Console

import holdfast as hf
from holdfast.display import dashboard
from holdfast.display.live import Display
from holdfast.runs.log import read_progress

FIGURE = Path(__file__).parents[1] / "figures" / "display.svg"
WIDTH, HEIGHT = 104, 34


def rows_of_a_run(config: hf.TrainConfig) -> list[dict[str, float]]:
    hf.Trainer(config).run()
    return [{key: float(text) for key, text in row.items() if text} for row in read_progress(config.folder)]


def draw(config: hf.TrainConfig, rows: list[dict[str, float]], share: float = 0.66) -> str:
    """The display after this share of the updates, as SVG that fetches nothing."""
    console = Console(record=True, width=WIDTH, height=HEIGHT, file=io.StringIO(), force_terminal=False)
    display = Display(dataclasses.replace(config, quiet=False), num_updates=len(rows), console=console)
    for row in rows[: max(2, int(share * len(rows)))]:
        display.update(row, [])
    console.export_text()  # drops the plain lines
    view = display.progress
    view.remaining = view.elapsed * (len(rows) / view.row["update"] - 1)
    console.print(dashboard.render(view, WIDTH, HEIGHT))
    svg = console.export_svg(title="holdfast train", unique_id="display")
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # they name fonts on another server


def main() -> None:
    os.chdir(tempfile.mkdtemp())
    config = hf.TrainConfig.preset("repeat-previous-easy", quiet=True, threads=1)
    FIGURE.write_text(draw(config, rows_of_a_run(config)))


if __name__ == "__main__":
    main()
