"""Results as one HTML page without script and without network: aggregates, the table, learning curves, speed.

Differences are marked by color and by a sign, so that the page can be read in black and white.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from holdfast.bench import charts
from holdfast.bench.aggregate import STATISTICS
from holdfast.bench.comparison import Cell, Comparison, number, signed
from holdfast.bench.settings import heading_of, stated
from holdfast.bench.suite import STATISTICS as MEANINGS
from holdfast.bench.suite import Suite
from holdfast.bench.table import core_name, estimate_text, facts
from holdfast.display.dashboard import compact
from holdfast.display.html import document


def page(suite: Suite, comparisons: Sequence[Comparison]) -> str:
    """The whole page as text."""
    title = suite.title or suite.name
    items = (f"<li><b>{escape(value)}</b>{escape(name)}</li>" for name, value in facts(comparisons).items())
    sections = "".join(_section(comparison) for comparison in comparisons)
    body = (
        f'<p class="dim">holdfast bench {escape(suite.name)}</p><h1>{escape(title)}</h1><p>{escape(suite.note)}</p>'
        f'<ul class="facts">{"".join(items)}</ul>{sections}{_sources(suite)}'
    )
    return document(f"{title}: holdfast bench", Path(__file__).with_name("page.css"), body)


def _section(comparison: Comparison) -> str:
    name, settings = heading_of(comparison.setting), stated(comparison.runs)
    heading = f"<h2>{escape(name)}</h2>" if name else ""
    heading += f"<p>Settings of the runs: {escape(settings)}.</p>" if settings else ""
    return heading + _aggregates(comparison) + _table(comparison) + _curves(comparison) + _speed(comparison)


# --- aggregates -------------------------------------------------------------------------------------------------------


def _aggregates(comparison: Comparison) -> str:
    if not comparison.profiles:
        return ""
    one_seed = all(len(cell.runs) == 1 for cell in comparison.cells.values())
    seeds = " With one seed per task there is nothing to resample, so no intervals are shown." if one_seed else ""
    figures, tables = [], []
    for title, rows in comparison.aggregates:
        most = max(row.tasks for row in rows)
        named = [(_with_tasks(row.name, row.tasks, most), row.estimates["interquartile mean"]) for row in rows]
        figures.append(f"<h3>{escape(title)} ({most})</h3>{charts.intervals(named, title)}")
        head = "".join(f"<th>{name}</th>" for name in ("tasks", "runs", *STATISTICS))
        lines = "".join(
            f"<tr><td>{escape(row.name)}</td><td>{row.tasks}</td><td>{row.runs}</td>"
            + "".join(f"<td>{estimate_text(row.estimates[name])}</td>" for name in STATISTICS)
            + "</tr>"
            for row in rows
        )
        tables.append(
            f'<div class="wide"><table><thead><tr><th>{escape(title)}</th>{head}</tr></thead>{lines}</table></div>'
        )
    profiles = comparison.profiles
    trained = {row.name: row.tasks for row in comparison.aggregates[0][1]}  # of all tasks
    names = [_with_tasks(core_name(comparison.suite, core), trained[core], max(trained.values())) for core in profiles]
    drawn = charts.key(names) + charts.profiles(list(profiles.values()))
    return (
        "<h2>In one number</h2><p>A return becomes a score: 0 for random actions, 1 for the best return, or for the target. "
        "Intervals are 95%, by resampling the seeds of each task 2000 times."
        f'{seeds}</p><div class="pair"><div><p class="small">Interquartile mean of the scores</p>{"".join(figures)}</div>'
        "<div><h3>Performance profile</h3>"
        f'<p class="small">The share of runs (up) that score more than a number (across). Higher is better.</p>{drawn}</div></div>'
        "<details><summary>Mean, median, optimality gap</summary><p>The optimality gap is the mean distance below 1: less is "
        f"better.</p>{''.join(tables)}</details>"
    )


def _with_tasks(name: str, tasks: int, most: int) -> str:
    """A memory that was not trained on all tasks says so: its score is of other tasks.

    >>> _with_tasks("gru", 42, 42), _with_tasks("window", 6, 42), _with_tasks("window", 1, 42)
    ('gru', 'window (6 tasks)', 'window (1 task)')
    """
    return name if tasks == most else f"{name} ({tasks} task{'s' if tasks > 1 else ''})"


# --- the table --------------------------------------------------------------------------------------------------------


def _table(comparison: Comparison) -> str:
    suite, tasks = comparison.suite, comparison.tasks
    has_target = any(task.target is not None for task in tasks)
    published = [name for name in suite.published if any(name in task.published for task in tasks)]
    # Ours first: on a phone little more than two columns can be seen at once.
    names = [core_name(suite, core) for core in comparison.cores] + (["target"] if has_target else [])
    names += [*(suite.published[name].name for name in published), "random", "steps"]
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    lines = []
    for task in tasks:
        name = re.sub(r"(?<=[a-z])(?=[A-Z])", "<wbr>", escape(task.name))  # may be broken between its words
        note = f"<small>{escape(task.note)}</small>" if task.note else ""
        row = [f'<td title="{escape(task.env)}">{name}{note}</td>']
        row += [_cell(comparison.cells.get((task.name, core))) for core in comparison.cores]
        theirs = [*([task.target] if has_target else []), *(task.published.get(name) for name in published), task.low]
        row += [f'<td class="theirs">{number(value)}</td>' for value in theirs]
        row += [f'<td class="theirs">{compact(comparison.steps_of(task))}</td>']
        lines.append(f"<tr>{''.join(row)}</tr>")
    return (
        f"<h2>Every task</h2>{_explanation(suite)}"
        f'<div class="wide"><table><thead><tr><th>task</th>{head}</tr></thead>{"".join(lines)}</table></div>'
    )


def _explanation(suite: Suite) -> str:
    other = "the final return over fresh episodes" if suite.statistic == "best" else "the best mean of an update"
    marks = {
        "up3": "▲ far above",
        "up1": "▲ above",
        "": "= the same",
        "down1": "▼ below",
        "down3": "▼ far below",
    }
    samples = " ".join(f'<span class="sample {css}">{text}</span>' for css, text in marks.items())
    return (
        f"<p>Ours is the {MEANINGS[suite.statistic]}, with the difference to what it is compared with; below it, {other}, and the "
        "standard deviation between seeds. It is compared with the target return (✓ reached, ✗ not), or else with the published "
        "figure of the same memory, or with the best published one where that memory has none.</p>"
        f'<p class="small">{samples}</p>'
    )


def _cell(cell: Cell | None) -> str:
    if cell is None:
        return "<td></td>"
    final = cell.statistic == "best"
    other = cell.mean_of("final" if final else "best")
    below = [f"{'final' if final else 'best'} {number(other)}"] if other is not None else []
    greedy = cell.mean_of("final_deterministic")
    below += [f"deterministic {number(greedy)}"] if greedy is not None else []
    below += [f"± {number(cell.deviation)}, {len(cell.runs)} seeds"] if cell.deviation is not None else []
    each = ", ".join(f"seed {row['seed']}: {number(value)}" for row, value in zip(cell.runs, cell.values))
    css, mark = "", ""
    if cell.difference is not None:
        direction = {1: "up", -1: "down", 0: ""}[cell.difference.sign]
        css = f' class="{direction}{max(1, cell.difference.level)}"' if direction else ""
        mark = f" {cell.difference.mark} {signed(cell.difference.value)}"
    small = "".join(f"<small>{text}</small>" for text in below)
    return f'<td{css} title="{escape(each)}"><b>{number(cell.value)}</b>{mark}{small}</td>'


# --- curves, speed, sources -------------------------------------------------------------------------------------------


def _curves(comparison: Comparison) -> str:
    suite, figures = comparison.suite, []
    for task in comparison.tasks:
        found = {i: comparison.cells.get((task.name, core)) for i, core in enumerate(comparison.cores)}
        cells = {i: cell for i, cell in found.items() if cell is not None}
        lines = {suite.published[name].name: value for name, value in task.published.items()}
        lines |= {} if task.target is None else {"target": task.target}
        picture = charts.learning_curves(task, cells, lines)
        figures.append(f"<figure><figcaption>{escape(task.name)}</figcaption>{picture}</figure>")
    names = [core_name(suite, core) for core in comparison.cores]
    return (
        "<h2>Learning curves</h2><p>Mean return of the episodes that ended in an update, over steps; the shaded part is between the "
        "lowest and the highest seed. Dotted lines are published figures and target returns.</p>"
        f'{charts.key(names)}<div class="curves">{"".join(figures)}</div>'
    )


def _speed(comparison: Comparison) -> str:
    lines = []
    for (task, core), cell in comparison.cells.items():
        row = cell.runs[0]
        engines = row.get("engine", {})
        engine = (
            engines.get("update", "")
            if len(set(engines.values())) == 1
            else "; ".join(f"{k}: {v}" for k, v in engines.items())
        )
        sizes = row.get("config", {})
        chosen = (
            f"{sizes.get('num_envs')} x {sizes.get('num_steps')}, {sizes.get('epochs')} x {sizes.get('minibatches')}"
        )
        values = [
            compact(cell.mean_of("steps_per_second") or 0.0),
            f"{cell.mean_of('seconds') or 0.0:,.1f}",
            f"{cell.mean_of('wall_seconds') or 0.0:,.1f}",
        ]
        lines.append(
            f"<tr><td>{escape(task)}</td><td>{escape(core)}</td>{''.join(f'<td>{value}</td>' for value in values)}"
            f'<td class="text">{escape(chosen)}</td><td class="text">{escape(engine)}</td></tr>'
        )
    head = "".join(f"<th>{name}</th>" for name in ("core", "steps/s", "training, s", "in all, s"))
    return (
        "<details><summary>Speed and sizes of every run</summary><p>Mean over seeds. Runs at the same time share the device. Sizes: "
        "environments x steps per rollout, epochs x minibatches.</p>"
        f'<div class="wide"><table><thead><tr><th>task</th>{head}<th class="text">sizes</th><th class="text">engine</th></tr></thead>'
        f"{''.join(lines)}</table></div></details>"
    )


def _sources(suite: Suite) -> str:
    if not suite.published:
        return ""
    items = "".join(
        f"<li><b>{escape(column.name)}</b>: {escape(column.source)}{' (second-hand)' if column.second_hand else ''}.</li>"
        for column in suite.published.values()
    )
    return f"<h2>Published figures</h2><ul>{items}</ul>"
