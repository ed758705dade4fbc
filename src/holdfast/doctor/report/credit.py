"""The credit map: how strongly the output of each step depends, in training, on each observation before it.

Row t, column s: the size of d output[t] / d observation[s]. A healthy map has one triangle per episode. Anything outside
an episode's triangle is a leak; a triangle with only its diagonal is a policy that cannot learn what to remember.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

BLOCKS = " ░▒▓█"
_LOW = (247, 247, 252)
_HIGH = (38, 70, 150)
_LEAK = (200, 40, 40)
_DPI = 100
_MARGIN = 90  # pixels for labels


@dataclass(frozen=True)
class CreditMap:
    """`values` `[T, T, B]` (output step, observation step, environment), `resets` `[T, B]`, `first`: its first step."""

    values: Tensor
    resets: Tensor
    first: int = 0

    @property
    def busiest_row(self) -> int:
        """The environment with the most episode starts, where leaks show best."""
        return int(self.resets[1:].sum(0).argmax())

    @property
    def same_episode(self) -> Tensor:
        """`[T, T, B]` bool: step s is in the episode of step t, and not after t."""
        episode = self.resets.long().cumsum(0)
        steps = torch.arange(len(self.resets))
        return (episode[:, None] == episode[None, :]) & (steps[:, None] >= steps[None, :]).unsqueeze(-1)

    def allowed(self, row: int) -> Tensor:
        """`[T, T]` bool: where credit may be, inside one episode and not in the future."""
        return self.same_episode[:, :, row]

    def shades(self, row: int) -> Tensor:
        """`[T, T]` in 0..1, logarithmic over five decades; exactly 0 only where the credit is 0."""
        values = self.values[:, :, row]
        top = float(values.max())
        if not top > 0:
            return torch.zeros_like(values)
        shade = 1.0 + (values / top).clamp(min=1e-12).log10() / 5.0
        return torch.where(values > 0, shade.clamp(0.12, 1.0), torch.zeros_like(shade))

    def to_blocks(self, row: int | None = None) -> str:
        """For a terminal: a line per step, `|` before the first step of an episode, `!` for a leak."""
        row = self.busiest_row if row is None else row
        shades, allowed = self.shades(row), self.allowed(row)
        lines = []
        for t in range(len(shades)):
            cells = ""
            for s in range(t + 1):
                shade = float(shades[t, s])
                mark = BLOCKS[min(4, int(shade * 4 + 0.99))]
                cells += "|" if s > 0 and self.resets[s, row] else " "
                cells += "!!" if shade > 0 and not allowed[t, s] else mark * 2
            lines.append(f"t={self.first + t:>3} {cells}")
        return "\n".join(lines)

    def to_png(self, path: str | Path, row: int | None = None, cell: int = 24) -> None:
        """A picture with axes, `cell` pixels per step; leaks are red. Needs matplotlib."""
        try:
            from matplotlib.figure import Figure
        except ImportError as missing:
            raise ModuleNotFoundError("pictures need matplotlib: pip install 'holdfast[plot]'") from missing
        row = self.busiest_row if row is None else row
        shades, allowed = self.shades(row), self.allowed(row)
        steps, first = len(shades), self.first
        cells = [[color(float(shades[t, s]), bool(allowed[t, s])) for s in range(steps)] for t in range(steps)]
        side = (steps * cell + _MARGIN) / _DPI
        figure = Figure(figsize=(side, side), dpi=_DPI, layout="constrained")
        axes = figure.subplots()
        axes.imshow(cells, extent=(first - 0.5, first + steps - 0.5, first + steps - 0.5, first - 0.5))
        for start in self.resets[1:, row].nonzero().flatten().tolist():
            axes.axvline(first + start + 0.5, color="0.35", linewidth=1)
            axes.axhline(first + start + 0.5, color="0.35", linewidth=1)
        points = max(5.0, min(10.0, 2.7 * side))  # of the text, so that labels fit
        axes.tick_params(labelsize=points)
        axes.set_xlabel("step s of an observation", fontsize=points)
        axes.set_ylabel("step t of an output", fontsize=points)
        axes.set_title(f"Credit map, environment {row}", fontsize=points)
        figure.savefig(path)


def color(shade: float, allowed: bool) -> tuple[int, int, int]:
    """From pale to blue where credit belongs, to red where it does not."""
    high = _HIGH if allowed else _LEAK
    return tuple(round(low + (top - low) * shade) for low, top in zip(_LOW, high))  # type: ignore[return-value]
