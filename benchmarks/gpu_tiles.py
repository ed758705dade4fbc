"""Derives the table in `holdfast/kernels/cuda/tiles.py`: times candidate tiles of each size class on the GPU at hand.

    python benchmarks/gpu_tiles.py [--kind gru] [--hidden 256] [--batch 1024]

Prints, per shape and direction, the candidates from fastest to slowest, each checked against the table's tile. Only the
recurrence kernel is timed. Nothing is written: a faster tile is entered in `choose_tile` by hand, with its limits.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from gpu_recurrence import SHAPES

from holdfast.kernels.cuda import gated_layer, kernels, plans, tiles
from holdfast.kernels.cuda.plans import Saved
from holdfast.kernels.cuda.tiles import Tile
from holdfast.kernels.operands import Resets, Weights

ROWS = ((1, 1, 1), (1, 1, 2), (2, 1, 1), (2, 1, 2), (2, 1, 4), (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 2))
SHARES = (1, 2, 4)  # of a backward
PIPELINES = ((64, 3), (64, 4), (128, 2), (256, 2))


def candidates(gates: int, hidden: int, backward: bool) -> Iterator[Tile]:
    """Tiles worth trying that fit: weights of one block, rows of one team, teams, pipeline."""
    _, shared, _ = kernels.limits(0)
    alone = hidden <= 128
    for units in (-(-hidden // 32) * 32,) if alone else (16, 32, 64):
        for warp_units in (8, 16, 32):
            found = [
                Tile(units, warp_units, warp_rows, 1, halves, teams, columns, stages)
                for halves, warp_rows, teams in ROWS
                for columns, stages in (((0, 1),) if alone else PIPELINES)
            ]
            held = Tile(units, warp_units, halves=1, registers=True)
            if held.depth(hidden, gates, backward) // 16 * (1 if backward else gates) * warp_units // 4 <= 128:
                found.append(held)
            if backward and not alone:
                found = list(
                    dict.fromkeys(t if t.registers else t.sharing(n, hidden, gates) for t in found for n in SHARES)
                )
            if not alone and hidden <= 8 * units:
                clusters = (t._replace(columns=0, stages=1, share=1, cluster=True) for t in found)
                found += dict.fromkeys(clusters)
            for tile in found:
                fits = tile.shared_bytes(hidden, gates, backward) <= shared
                if fits and units % warp_units == 0 and 64 <= tile.threads <= 512:
                    yield tile


class KernelTimes:
    """Replaces the launch of recurrences with one that is timed."""

    def __init__(self) -> None:
        self.events: list[list[torch.cuda.Event]] = []
        self._recurrence = plans.recurrence.__wrapped__
        plans.recurrence = self._timed  # type: ignore[assignment]

    def _timed(self, *arguments: Any) -> plans.Recurrence:
        found = self._recurrence(*arguments)

        def launch(*values: int) -> None:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            found.launch(*values)
            end.record()
            self.events.append([start, end])

        return found._replace(launch=launch)

    def median(self, function: Callable[[], Any], repeats: int = 6) -> float:
        """Median ms of the recurrence that `function` runs."""
        function()
        self.events.clear()
        for _ in range(repeats):
            function()
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(end) for start, end in self.events)


def forget_plans() -> None:
    plans.forward_plan.cache_clear()
    plans.backward_plan.cache_clear()


def sweep(kind: str, shape: tuple[int, int, int], times: KernelTimes) -> None:
    B, T, H = shape
    gates, table = (4 if kind == "lstm" else 3), tiles.choose_tile
    x, dy = (torch.randn(T, B, H, device="cuda") for _ in range(2))
    h, bias = torch.zeros(B, H, device="cuda"), torch.zeros(gates * H, device="cuda")
    w_ih, w_hh = ((torch.rand(gates * H, H, device="cuda") * 2 - 1) * H**-0.5 for _ in range(2))
    resets, weights = Resets(torch.rand(T, B, device="cuda") < 0.01), Weights(w_ih, w_hh, bias, bias)

    def forward() -> Any:
        return gated_layer.forward(x, h, h if kind == "lstm" else None, resets, weights, True)

    kept = forward()[3]
    saved = Saved(kept, resets.mask, w_ih, w_hh, B, state_dtype=torch.float32, x_dtype=torch.float32)

    def backward() -> Any:
        return gated_layer.backward(dy, None, None, saved, need_x=True, need_state=True, need_reset=False)

    for direction, run in (("forward", forward), ("backward", backward)):
        expected, found = run()[0], []
        default = table(gates, H, B, direction == "backward")
        for tile in {default, *candidates(gates, H, direction == "backward")}:
            tiles.choose_tile = lambda *_, tile=tile: tile  # type: ignore[assignment,misc]
            forget_plans()
            error = float((run()[0] - expected).abs().max() / expected.abs().max())
            found.append((times.median(run), error, tile))
        tiles.choose_tile = table
        forget_plans()
        for ms, error, tile in sorted(found, key=lambda f: f[0])[:6]:
            mark = " <- table" if tile == default else ""
            print(f"{kind} {shape} {direction} {ms:.3f} ms, difference {error:.0e}, {tuple(tile)}{mark}", flush=True)
        print(f"{kind} {shape} {direction}: table's tile {next(ms for ms, _, t in found if t == default):.3f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=("lstm", "gru"), default="lstm")
    parser.add_argument("--hidden", type=int, help="only the shapes of this hidden size")
    parser.add_argument("--batch", type=int, help="only the shapes of this batch")
    options = parser.parse_args()
    times = KernelTimes()
    for shape in SHAPES:
        if options.hidden in (None, shape[2]) and options.batch in (None, shape[0]):
            sweep(options.kind, shape, times)


if __name__ == "__main__":
    main()
