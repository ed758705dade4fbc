"""Prints the measured tables of `cpu_recurrence.py` as Markdown, for docs/benchmarks.md.

python benchmarks/recurrence_markdown.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from recurrence_contenders import CONTENDERS

RESULTS = Path(__file__).parent / "results" / "cpu_recurrence.json"


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


if __name__ == "__main__":
    figures = json.loads(RESULTS.read_text())
    machine = figures["machine"]
    print(f"{machine['processor']}, torch {machine['torch']}, Python {machine['python']}, one thread.\n")
    for cell in ("lstm", "gru"):
        print(sequences(figures["sequences"], cell), end="\n\n")
    print(steps(figures["steps"]))
