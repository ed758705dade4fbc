"""Results as one HTML page without script and without network: aggregates, the table, learning curves, speed.

Differences are marked by color and by a sign, so that the page can be read in black and white.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from holdfast.bench import charts
from holdfast.bench.aggregate import STATISTICS
from holdfast.bench.comparison import Cell, Comparison, number, signed
from holdfast.bench.facts import facts
from holdfast.bench.settings import heading_of, stated
from holdfast.bench.suite import STATISTICS as MEANINGS
from holdfast.bench.suite import Suite, SuiteTask
from holdfast.bench.table import core_name, estimate_text
from holdfast.display.dashboard import compact

_STYLE = """
:root { color-scheme: light dark; --ink:#1d2330; --dim:#59616f; --line:#dfe3ea; --paper:#fff; --wash:#f5f7fa;
  --up1:#e4eefb; --up2:#c3daf7; --up3:#97bff0; --down1:#fdeee0; --down2:#fbd6b4; --down3:#f5b682;
  --c0:#0063a3; --c1:#c04f00; --c2:#007a58; --c3:#a8447c; --c4:#2b8fc9; --c5:#9a6a00; --c6:#444; --c7:#7a5bb5; }
@media (prefers-color-scheme: dark) { :root { --ink:#e7eaf0; --dim:#a3acbb; --line:#363e4c; --paper:#171b22; --wash:#1f252f;
  --up1:#1c2b41; --up2:#20406a; --up3:#2a5a97; --down1:#38281b; --down2:#59381a; --down3:#80501f;
  --c0:#5fb0f0; --c1:#f08a4b; --c2:#3fc99b; --c3:#e48fbb; --c4:#9ad5f7; --c5:#e0b040; --c6:#c9ced8; --c7:#b9a2ea; } }
* { box-sizing:border-box; }
body { margin:0; background:var(--paper); color:var(--ink); font:16px/1.5 system-ui, "DejaVu Sans", sans-serif; }
main { max-width:78rem; margin:0 auto; padding:1.5rem 1.1rem 4rem; }
h1 { font-size:1.7rem; line-height:1.25; margin:.2rem 0 .3rem; } h2 { font-size:1.25rem; margin:2.4rem 0 .5rem; }
h3 { font-size:1rem; margin:1.4rem 0 .4rem; } p { margin:.4rem 0; max-width:52rem; }
.dim, figcaption, .small { color:var(--dim); font-size:.88rem; }
.facts { display:flex; flex-wrap:wrap; gap:.4rem 1.6rem; margin:.8rem 0; padding:0; list-style:none; }
.facts b { display:block; font-size:1.15rem; } .facts li { font-size:.85rem; color:var(--dim); } .facts b { color:var(--ink); }
.wide { overflow-x:auto; } table { border-collapse:collapse; font-size:.9rem; font-variant-numeric:tabular-nums; }
th, td { padding:.32rem .7rem; border-bottom:1px solid var(--line); text-align:right; vertical-align:top; white-space:nowrap; }
th { vertical-align:bottom; font-weight:600; } th:first-child, td:first-child { text-align:left; position:sticky; left:0;
  background:var(--paper); } th.text, td.text { text-align:left; } td small { display:block; color:var(--ink); opacity:.78;
  font-size:.8rem; }
thead th { white-space:normal; max-width:9rem; } td.theirs { color:var(--dim); }
.up1 { background:var(--up1); } .up2 { background:var(--up2); } .up3 { background:var(--up3); }
.down1 { background:var(--down1); } .down2 { background:var(--down2); } .down3 { background:var(--down3); }
.sample { color:var(--ink); padding:.1rem .5rem; border-radius:.2rem; white-space:nowrap; }
svg { max-width:100%; height:auto; display:block; } svg text { fill:var(--dim); font-size:11px; } svg text.name { fill:var(--ink);
  font-size:13px; } .axis { fill:none; stroke:var(--dim); } .grid { stroke:var(--line); } .line { fill:none; stroke-width:1.8; }
.band { opacity:.16; } .published { stroke:var(--dim); stroke-dasharray:1 3; stroke-width:1.5; fill:none; }
.interval { stroke:var(--ink); stroke-width:1.6; fill:none; } .dot { fill:var(--c0); }
.curves { display:grid; grid-template-columns:repeat(auto-fill, minmax(min(100%, 17rem), 1fr)); gap:1rem 1.2rem; }
figure { margin:0; } .curves figcaption { color:var(--ink); font-size:.9rem; font-weight:600; }
.keys { display:flex; flex-wrap:wrap; gap:.2rem 1.3rem; font-size:.9rem; } .key svg { display:inline-block; vertical-align:middle; }
.pair { display:flex; flex-wrap:wrap; gap:1.5rem 2.5rem; align-items:flex-start; } .pair > * { flex:1 1 22rem; min-width:0; }
details { margin:1.2rem 0; } summary { cursor:pointer; font-weight:600; }
@media (max-width: 34rem) { td:first-child { white-space:normal; overflow-wrap:break-word; min-width:7.5rem; max-width:8.5rem; }
  th, td { padding:.3rem .45rem; } }
@media print { :root { --paper:#fff; --ink:#000; } details { break-inside:avoid; } }
"""

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page(suite: Suite, comparisons: Sequence[Comparison]) -> str:
    """The whole page as text."""
    title = escape(suite.title or suite.name)
    sections = "".join(_section(comparison) for comparison in comparisons)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{title}: holdfast bench</title><style>{_STYLE}</style></head><body><main>'
        f'<p class="dim">holdfast bench {escape(suite.name)}</p><h1>{title}</h1><p>{escape(suite.note)}</p>'
        f"{_facts(comparisons)}{sections}{_sources(suite)}</main></body></html>\n"
    )


def _facts(comparisons: Sequence[Comparison]) -> str:
    items = (f"<li><b>{escape(value)}</b>{escape(name)}</li>" for name, value in facts(comparisons).items())
    return f'<ul class="facts">{"".join(items)}</ul>'


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
        row = [f'<td title="{escape(task.env)}">{_breakable(task.name)}{_note(task)}</td>']
        row += [_cell(comparison.cells.get((task.name, core))) for core in comparison.cores]
        theirs = [*([task.target] if has_target else []), *(task.published.get(name) for name in published), task.low]
        row += [f'<td class="theirs">{number(value)}</td>' for value in theirs]
        row += [f'<td class="theirs">{compact(_steps(comparison, task))}</td>']
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


def _breakable(name: str) -> str:
    """A name that may be broken between its words."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "<wbr>", escape(name))


def _note(task: SuiteTask) -> str:
    return f"<small>{escape(task.note)}</small>" if task.note else ""


def _steps(comparison: Comparison, task: SuiteTask) -> int:
    return int(next(row["steps"] for row in comparison.runs if row["task"] == task.name))


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
