"""Prints the measured tables of `cpu_recurrence.py` as Markdown.

python benchmarks/recurrence_markdown.py           # for docs/performance/cpu.md
python benchmarks/recurrence_markdown.py --grid    # the native kernel at many sizes
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from recurrence_contenders import CONTENDERS

RESULTS = Path(__file__).parent / "results" / "cpu_recurrence.json"
GRID_RESULTS = RESULTS.with_name("cpu_native.json")


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def sequences(rows: list[dict[str, Any]], cell: str) -> str:
    """Ratios to torch.nn without resets, whose own milliseconds stand in its column."""
    mine = [row for row in rows if row["cell"] == cell]
    columns = [c for c in CONTENDERS if any(c.key in row["ms"] for row in mine)]
    body = []
    for row in mine:
        base = row["ms"]["nn"]
        cells = [f"{row['ms'][c.key] / base:.2f}" if c.key in row["ms"] else "-" for c in columns[1:]]
        body.append([row["shape"], f"{base:.1f} ms", *cells])
    name = "nn.LSTM" if cell == "lstm" else "nn.GRU"
    return table(["B, T, P(reset)", f"{name}, no resets", *[c.title for c in columns[1:]]], body)


def steps(rows: list[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys((row["kernel"], row["p"]) for row in rows))[1:]
    titles = [f"{kernel}, " + ("no flags" if p == "none" else f"P(reset) {p}") for kernel, p in columns]
    body = []
    for cell in dict.fromkeys(row["cell"] for row in rows):
        mine = {(row["kernel"], row["p"]): row for row in rows if row["cell"] == cell}
        name = "nn.LSTMCell" if cell == "lstm" else "nn.GRUCell"
        base = f"{name} {mine['torch.nn', 'none']['us']:.0f} us"
        body.append([base, *[f"{mine[column]['ratio']:.2f}" for column in columns]])
    return table(["", *titles], body)


def grid(rows: list[dict[str, Any]]) -> str:
    """The native kernel with resets over torch.nn without, one thread; two threads over one in parentheses."""
    found: dict[str, dict[tuple[str, str], dict[str, float]]] = {}
    for row in rows:
        shape, _, hidden = row["shape"].partition(", H=")
        found.setdefault(shape, {})[row["cell"], hidden or "128"] = row["ms"]
    columns = [(cell, hidden) for cell in ("lstm", "gru") for hidden in ("64", "128", "256")]
    body = []
    for shape, cells in found.items():
        texts = [
            f"{m['native'] / m['nn']:.2f} ({m['native-2'] / m['native']:.2f})" for m in map(cells.get, columns) if m
        ]
        body.append([shape, *texts])
    means = []
    for cell in ("lstm", "gru"):
        ratios = [m["native"] / m["nn"] for cells in found.values() for (c, _), m in cells.items() if c == cell]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        means.append(f"{cell.upper()}: geometric mean {mean:.2f}, largest {max(ratios):.2f}.")
    head = ["B, T, P(reset)", *[f"{cell.upper()} {hidden}" for cell, hidden in columns]]
    gru_to_lstm = max(
        cells["gru", h]["native"] / cells["lstm", h]["native"] for cells in found.values() for _, h in columns
    )
    return f"{table(head, body)}\n\n{' '.join(means)} GRU over LSTM at one shape: at most {gru_to_lstm:.2f}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--grid", action="store_true", help="the native kernel at many sizes, after cpu_recurrence.py --grid"
    )
    if parser.parse_args().grid:
        print(grid(json.loads(GRID_RESULTS.read_text())["sequences"]))
        return
    figures = json.loads(RESULTS.read_text())
    machine = figures["machine"]
    print(f"{machine['processor']}, torch {machine['torch']}, Python {machine['python']}, one thread.\n")
    for cell in ("lstm", "gru"):
        print(sequences(figures["sequences"], cell), end="\n\n")
    print(steps(figures["steps"]))


if __name__ == "__main__":
    main()
