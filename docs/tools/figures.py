"""Draws docs/figures/*.svg: `make figures`, or `python docs/tools/figures.py [NAME ...]`.

The same input gives the same bytes. Text and lines have the color of the text around them (`currentColor`), so that a figure
that the site puts into its page fits a light and a dark page. `live.svg` is drawn by a training run; see display_figure.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "figures"
RESULTS = ROOT / "benchmarks" / "results"
FONT = 'font-family="system-ui, DejaVu Sans, sans-serif"'
FIRST, SECOND, THIRD, BAD = "#009485", "#c77700", "#5c6bc0", "#d32f2f"


class Drawing:
    """A list of SVG elements. Coordinates are pixels of a drawing `width` wide."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" {FONT}>',
            f"<title>{title}</title>",
        ]

    def rect(self, x, y, width, height, fill, opacity=1.0, stroke="none", round=3) -> None:
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{round}" fill="{fill}" '
            f'fill-opacity="{opacity:g}" stroke="{stroke}"/>'
        )

    def text(self, x, y, text, size=12, anchor="start", color="currentColor", weight="normal") -> None:
        text = text.replace("&", "&amp;").replace("<", "&lt;")
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{color}" '
            f'font-weight="{weight}">{text}</text>'
        )

    def line(self, points, color="currentColor", width=1.4, dash="none", opacity=1.0) -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._parts.append(
            f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}" '
            f'stroke-dasharray="{dash}" stroke-opacity="{opacity:g}" stroke-linejoin="round"/>'
        )

    def arrow(self, x0, y0, x1, y1, color="currentColor", dash="none") -> None:
        """A line with a head at (x1, y1)."""
        self.line([(x0, y0), (x1, y1)], color, dash=dash)
        length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
        dx, dy = 6 * (x1 - x0) / length, 6 * (y1 - y0) / length
        head = [(x1, y1), (x1 - dx - dy / 2, y1 - dy + dx / 2), (x1 - dx + dy / 2, y1 - dy - dx / 2)]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in head)
        self._parts.append(f'<polygon points="{points}" fill="{color}"/>')

    def svg(self) -> str:
        return "\n".join([*self._parts, "</svg>\n"])


def segment() -> str:
    """Twelve steps of three environments: episodes, resets, and the state that each row starts from."""
    drawing = Drawing(760, 270, "A segment: 12 steps of 3 environments, with the state that each row starts from")
    x0, y0, w, h = 176, 44, 47, 42
    resets = {(0, 5), (1, 0), (1, 9)}
    drawing.text(24, 22, "start_state", 13, weight="bold")
    drawing.text(x0, 22, "time, steps 0 to 11 of the segment", 13, weight="bold")
    for env in range(3):
        y = y0 + env * (h + 16)
        drawing.text(0, y + 26, f"env {env}", 12)
        drawing.rect(48, y, 84, h, THIRD, 0.25, THIRD)
        drawing.text(90, y + 26, "h, c", 13, "middle")
        stopped = (env, 0) in resets
        drawing.arrow(
            134, y + h / 2, x0 - 4, y + h / 2, BAD if stopped else "currentColor", "3 3" if stopped else "none"
        )
        episode = env
        for t in range(12):
            x = x0 + t * w
            if (env, t) in resets:
                episode += 1
            color = FIRST if episode % 2 == 0 else SECOND
            drawing.rect(x, y, w - 4, h, color, 0.25, color)
            drawing.text(x + (w - 4) / 2, y + 26, f"x{t}", 12, "middle")
            if (env, t) in resets:
                drawing.rect(x - 4, y - 6, 5, h + 12, BAD)
    y = y0 + 3 * (h + 16) + 12
    for x, color, opacity, label in (
        (0, FIRST, 0.25, "one episode"),
        (120, SECOND, 0.25, "another"),
        (220, BAD, 1.0, "resets[t, b] is True: fresh state before this step"),
    ):
        drawing.rect(x, y - 11, 14, 14, color, opacity, color)
        drawing.text(x + 20, y, label)
    drawing.text(0, y + 26, "Environment 1 begins an episode at step 0, so the state that it brings is replaced.")
    return drawing.svg()


def bootstrap() -> str:
    """What follows the last step: 0, the value of the final observation, or the value of the next one."""
    drawing = Drawing(
        760, 240, "What is added to the last reward when an episode terminates, is truncated, or the segment ends"
    )
    rows = (
        ("terminated", "The episode is over.", "0", "nothing follows", BAD),
        ("truncated", "A time limit cut it off.", "V(final_obs)", "with the state before the reset", SECOND),
        ("segment ends", "The episode goes on.", "V(next_obs)", "peek_value: memory stays as it was", FIRST),
    )
    for i, (name, why, value, how, color) in enumerate(rows):
        y = 14 + i * 86
        drawing.text(0, y + 22, name, 14, weight="bold")
        drawing.text(0, y + 42, why)
        for t in range(3):
            x = 190 + t * 66
            drawing.rect(x, y, 50, 46, FIRST, 0.25, FIRST)
            drawing.text(x + 25, y + 28, ("x9", "x10", "x11")[t], 13, "middle")
            drawing.arrow(x + 51, y + 23, x + 64, y + 23)
        drawing.rect(390, y, 108, 46, color, 0.2, color)
        drawing.text(444, y + 28, value, 14, "middle", weight="bold")
        drawing.text(524, y + 28, how)
        if i < 2:
            drawing.rect(506, y - 5, 5, 56, BAD)
            drawing.text(508, y + 66, "reset: memory is fresh from here on", 11, "middle", BAD)
    return drawing.svg()


def chunks() -> str:
    """Training sequences shorter than the rollout: each from the state the rollout had there, or wrongly from zeros."""
    drawing = Drawing(760, 236, "Sequences of 4 steps start from the state that the rollout had there, not from zeros")
    x0, w, h = 150, 47, 40
    for row, (label, sub, word) in enumerate(
        (
            ("rollout", "12 steps, one at a time", ""),
            ("training, right", "bptt=4: stored states", "h"),
            ("training, wrong", "bptt=4: from zeros", "0"),
        )
    ):
        y = 8 + row * 80
        drawing.text(0, y + 18, label, 13, weight="bold")
        drawing.text(0, y + 35, sub, 11)
        for t in range(12):
            gap = 18 * (t // 4)
            x = x0 + t * w + gap
            known = row < 2 or t < 4
            drawing.rect(x, y, w - 5, h, FIRST if known else BAD, 0.25, FIRST if known else BAD)
            drawing.text(x + (w - 5) / 2, y + 25, f"x{t}", 12, "middle")
            if row == 0 and t in (4, 8):
                drawing.arrow(x - 11, y + 8, x - 11, y + 91, THIRD)
                drawing.text(x - 4, y + h + 22, "state, kept", 11, color=THIRD)
            if row and t in (4, 8):
                drawing.text(x - 11, y + 26, word, 15, "middle", THIRD if row == 1 else BAD, "bold")
    drawing.text(
        x0,
        228,
        "Red steps: the log-probabilities of training differ from those of the rollout. PPO's ratio is not 1.",
        11.5,
    )
    return drawing.svg()


def credit() -> str:
    """Which observations the output of each step may depend on: a triangle per episode."""
    drawing = Drawing(760, 250, "What an output may depend on: one triangle per episode; anything outside is a leak")
    cell, steps, starts = 17, 12, (0, 5, 9)
    for panel, (label, leak) in enumerate((("right", False), ("no reset in training", True))):
        x0, y0 = 60 + panel * 330, 34
        drawing.text(x0, 20, label, 14, weight="bold")
        drawing.rect(x0, y0, steps * cell - 2, steps * cell - 2, "currentColor", 0.06, round=1)
        for t in range(steps):
            begin = max(start for start in starts if start <= t)
            drawing.rect(x0 + begin * cell, y0 + t * cell, (t - begin + 1) * cell - 2, cell - 2, FIRST, 0.8, round=1)
            if leak and begin:
                drawing.rect(x0, y0 + t * cell, begin * cell - 2, cell - 2, BAD, 0.8, round=1)
        drawing.text(x0 - 8, y0 + 8, "0", 11, "end")
        drawing.text(x0 - 8, y0 + steps * cell - 6, "11", 11, "end")
        drawing.text(x0 - 30, y0 + 100, "step t", 11, "middle")
        drawing.text(x0 + steps * cell / 2, 248, "observation s", 11, "middle")
    return drawing.svg()


def learning() -> str:
    """Return over steps with an LSTM and without memory, every run of four presets in benchmarks/results/learning.jsonl."""
    presets = (
        ("repeat-previous-easy", "RepeatPrevious", -0.6),
        ("repeat-first-easy", "RepeatFirst", -0.6),
        ("position-only-cartpole-easy", "CartPole, positions only", -0.1),
        ("t-maze", "T-maze of 20 steps", -0.6),
    )
    runs = [json.loads(line) for line in (RESULTS / "learning.jsonl").read_text().splitlines()]
    drawing = Drawing(
        760, 236, "Return over environment steps with an LSTM, ten seeds, and without memory, three seeds"
    )
    for panel, (preset, label, low) in enumerate(presets):
        x0, y0, w, h = 30 + panel * 186, 30, 152, 150
        mine = [run for run in runs if run["preset"] == preset]
        most = max(run["steps"] for run in mine)
        drawing.text(x0, 18, label, 12, weight="bold")
        drawing.line([(x0, y0), (x0, y0 + h), (x0 + w, y0 + h)], opacity=0.5)

        def place(steps, value, x0=x0, y0=y0, w=w, h=h, most=most, low=low):
            return x0 + w * steps / most, y0 + h * (1 - (max(low, value) - low) / (1.05 - low))

        for value in (1, 0):
            x, y = place(0, value)
            drawing.text(x - 5, y + 4, str(value), 10, "end")
            drawing.line([(x, y), (x + w, y)], opacity=0.15)
        drawing.text(x0 + w, y0 + h + 14, f"{most // 1000}k steps", 10, "end")
        for core, color, dash in (("none", BAD, "2 3"), ("lstm", FIRST, "none")):
            for run in (run for run in mine if run["core"] == core):
                drawing.line([place(*point) for point in run["curve"]], color, 1.1, dash, 0.7)
    for i, (label, color, dash) in enumerate(
        (("LSTM, ten seeds", FIRST, "none"), ("no memory, three seeds", BAD, "2 3"))
    ):
        drawing.line([(30 + i * 150, 222), (58 + i * 150, 222)], color, 2, dash)
        drawing.text(64 + i * 150, 226, label)
    return drawing.svg()


def stream() -> str:
    """Rows of one environment in a buffer, and a sequence of them: stored state, burn-in, rows to learn from, successor."""
    drawing = Drawing(760, 250, "Rows of one environment in the buffer, and a sequence that is learned from")
    x0, y0, w, h = 4, 44, 44, 38
    rows = ("o0", "o1", "o2", "o3", "F", "p0", "p1", "p2", "q0", "q1", "q2", "q3", "q4", "q5", "q6", "q7", "q8")
    drawing.text(0, 22, "the stream of one environment, row after row", 13, weight="bold")
    for t, name in enumerate(rows):
        x, color = x0 + t * w, {"o": FIRST, "p": SECOND, "q": THIRD, "F": FIRST}[name[0]]
        drawing.rect(x, y0, w - 4, h, color, 0.08 if name == "F" else 0.25, color)
        drawing.text(x + (w - 4) / 2, y0 + 24, name, 12, "middle")
        if name in ("o0", "p0", "q0"):
            drawing.rect(x - 4, y0 - 6, 5, h + 12, BAD)
        if t in (3, 7):
            drawing.text(x + (w - 4) / 2, y0 - 8, "truncated" if t == 3 else "terminated", 10, "middle")
        if t % 6 == 0:
            drawing.rect(x + 10, y0 + h + 8, 20, 12, "currentColor", 0.5)
    y = 130
    for first, last, text, color in (
        (6, 10, "burn-in", "currentColor"), (10, 16, "train_length", FIRST), (16, 17, "+1", SECOND),
    ):  # fmt: skip
        drawing.rect(x0 + first * w, y, (last - first) * w - 4, 24, color, 0.2, color)
        drawing.text(x0 + (first + last) * w / 2 - 2, y + 16, text, 12, "middle")
    drawing.arrow(x0 + 6 * w + 20, y0 + h + 22, x0 + 6 * w + 20, y - 3)
    y = 182
    for number, (mark, opacity, text) in enumerate((
        ("currentColor", 0.5, "a stored state of the memory: a sequence begins there; burn-in brings it up to date"),
        (BAD, 1.0, "resets is True: the first observation of an episode, before which the memory is fresh"),
        (FIRST, 0.08, "F: the final observation of a truncated episode, a row that only gives the value after o3"),
    )):  # fmt: skip
        drawing.rect(0, y - 11 + 24 * number, 14, 14, mark, opacity, mark)
        drawing.text(22, y + 24 * number, text)
    return drawing.svg()


FIGURES: dict[str, Callable[[], str]] = {
    "segment": segment,
    "bootstrap": bootstrap,
    "chunks": chunks,
    "credit": credit,
    "stream": stream,
    "learning": learning,
}


def main(names: list[str]) -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in names or FIGURES:
        (FOLDER / f"{name}.svg").write_text(FIGURES[name]())


if __name__ == "__main__":
    main(sys.argv[1:])
