"""The credit map: how strongly the output of each step depends, in training, on each observation before it.

Row t, column s: the size of d output[t] / d observation[s]. Healthy is a staircase of triangles, one for each episode.
Colour beyond an episode's triangle is a leak; a triangle with nothing but its diagonal is a policy that cannot learn
what to remember.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

BLOCKS = " ░▒▓█"
_LOW = (247, 247, 252)
_HIGH = (38, 70, 150)
_LEAK = (200, 40, 40)


@dataclass(frozen=True)
class CreditMap:
    """`values` `[T, T, B]` (output step, observation step, environment), `resets` `[T, B]`, `first`: its first step."""

    values: Tensor
    resets: Tensor
    first: int = 0

    @property
    def busiest_row(self) -> int:
        """The environment with the most episode starts: the one to look at for leaks."""
        return int(self.resets[1:].sum(0).argmax())

    def allowed(self, row: int) -> Tensor:
        """`[T, T]` bool: where credit may be, that is inside one episode and not in the future."""
        episode = self.resets[:, row].long().cumsum(0)
        steps = torch.arange(len(episode))
        return (episode[:, None] == episode[None, :]) & (steps[:, None] >= steps[None, :])

    def shades(self, row: int) -> Tensor:
        """`[T, T]` in 0..1, logarithmic over five decades; exactly 0 only where the credit is 0."""
        values = self.values[:, :, row]
        top = float(values.max())
        if not top > 0:
            return torch.zeros_like(values)
        shade = 1.0 + (values / top).clamp(min=1e-12).log10() / 5.0
        return torch.where(values > 0, shade.clamp(0.12, 1.0), torch.zeros_like(shade))

    def to_blocks(self, row: int | None = None) -> str:
        """For a terminal: a line per step, `|` before the first step of an episode, `!` for credit that leaks."""
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
        """A picture without any plotting library; leaks are red."""
        row = self.busiest_row if row is None else row
        shades, allowed = self.shades(row), self.allowed(row)
        side = len(shades) * cell
        pixels = bytearray()
        for y in range(side):
            pixels.append(0)  # PNG filter of the line: none
            for x in range(side):
                t, s = y // cell, x // cell
                edge = (x % cell == 0 and s > 0 and self.resets[s, row]) or (
                    y % cell == 0 and t > 0 and self.resets[t, row]
                )
                pixels.extend((90, 90, 90) if edge else colour(float(shades[t, s]), bool(allowed[t, s])))
        Path(path).write_bytes(_png(side, bytes(pixels)))


def colour(shade: float, allowed: bool) -> tuple[int, int, int]:
    """Pale to blue where credit belongs, to red where it does not."""
    high = _HIGH if allowed else _LEAK
    return tuple(round(low + (top - low) * shade) for low, top in zip(_LOW, high))  # type: ignore[return-value]


def _png(side: int, raw: bytes) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(raw)) + chunk(b"IEND", b"")
