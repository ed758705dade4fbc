"""Small charts as text: a curve of braille dots, a sparkline, a bar. Colors and the terminal are not its concern."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

# Each braille cell is 2 dots wide and 4 high; the bit of the dot in column x, row y of a cell.
_DOT_BITS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_BLOCKS = "▁▂▃▄▅▆▇█"
_EIGHTHS = " ▏▎▍▌▋▊▉"


def curve(
    points: Sequence[tuple[float, float]],
    width: int,
    height: int,
    x_range: tuple[float, float],
    y_range: tuple[float, float],
) -> list[str]:
    """Points (x, y) joined by lines, as `height` strings of `width` characters. Points that are not finite are skipped.

    >>> curve([(0, 0), (1, 1)], width=2, height=1, x_range=(0, 1), y_range=(0, 1))
    ['⡠⠊']
    """
    columns, rows = 2 * width, 4 * height
    cells = [[0] * width for _ in range(height)]

    def dot(value: float, low_high: tuple[float, float], count: int) -> int:
        low, high = low_high
        share = (value - low) / (high - low) if high > low else 0.5
        return min(count - 1, max(0, round(share * (count - 1))))

    previous: tuple[int, int] | None = None
    for x, y in points:
        if not (math.isfinite(x) and math.isfinite(y)):
            continue
        here = dot(x, x_range, columns), rows - 1 - dot(y, y_range, rows)
        for column, row in _line(previous or here, here):
            cells[row // 4][column // 2] |= _DOT_BITS[column % 2][row % 4]
        previous = here
    return ["".join(chr(0x2800 + bits) for bits in row) for row in cells]


def sparkline(values: Sequence[float], width: int) -> str:
    """Values as bars in `width` characters, each the mean of an equal share of the values.

    >>> sparkline([0, 1, 2, 3], 4)
    '▁▃▆█'
    """
    finite = [value for value in values if math.isfinite(value)]
    count = min(width, len(finite))
    if count == 0:
        return " " * width
    edges = [len(finite) * i // count for i in range(count + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((mean - low) * scale)] for mean in means).rjust(width)


def bar(share: float, width: int) -> str:
    """A bar that fills `share` (0 to 1) of `width` characters, in steps of an eighth of a character.

    >>> bar(0.5, 4)
    '██  '
    """
    eighths = round(min(1.0, max(0.0, share)) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[rest] if rest else "")).ljust(width)


def _line(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """Dots of a straight line, including both ends."""
    dx, dy = end[0] - start[0], end[1] - start[1]
    steps = max(abs(dx), abs(dy), 1)
    return [(start[0] + round(dx * i / steps), start[1] + round(dy * i / steps)) for i in range(steps + 1)]
