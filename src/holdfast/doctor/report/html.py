"""The report as one HTML page, for a reader who is new to recurrent training. No script, no network."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.display.html import document
from holdfast.doctor.report.credit import CreditMap, color

if TYPE_CHECKING:
    from holdfast.doctor.report.findings import Finding, Outcome
    from holdfast.doctor.report.report import Report


def page(report: Report) -> str:
    """The whole page as text."""
    tone = "" if report.ok else " bad"
    examined_as = f", examined as {escape(report.examined_as)}" if report.examined_as else ""
    parts = [
        f'<header class="verdict{tone}"><p class="dim small">Holdfast doctor</p><h1>{escape(report.verdict)}</h1>',
        f'<p class="dim small">seed {report.seed}, {report.seconds:.1f} s{examined_as}</p></header>',
        _INTRODUCTION,
        "".join(_finding(found) for found in report.findings)
        or "<p>Nothing was found. The checks are listed below.</p>",
        _credit(report.credit) if report.credit is not None else "",
        _checks(report.outcomes),
    ]
    return document(f"{report.subject}: doctor's report", Path(__file__).with_name("report.css"), "".join(parts))


_INTRODUCTION = (
    "<p>This policy has a memory: it carries numbers from step to step, separately for each environment. Memory must be "
    "cleared when an episode ends, must never pass from one environment to another, and must be the same in training as "
    "it was in the rollout. Mistakes here raise no error; they make learning worse. The doctor played the policy in "
    "scripted environments and compared the results.</p><h2>Findings</h2>"
)


def prose(text: str) -> str:
    """Escaped text; `code` between backticks is set as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _finding(found: Finding) -> str:
    inner = ""
    if found.consequences:
        items = "".join(
            f"<li><b>{escape(f.check)}</b>: {escape(f.cause)}. <span class=dim>{prose(f.evidence)}</span></li>"
            for f in found.consequences
        )
        summary = f'<summary class="small">{len(found.consequences)} more that follow from this one</summary>'
        inner = f'<details>{summary}<ul class="small">{items}</ul></details>'
    return (
        f'<section class="finding {found.severity}"><h3><span class="tag">{found.severity}</span>'
        f"<code>{escape(found.cause)}</code></h3><p>{prose(found.meaning)}</p><dl>"
        f"<dt>Seen</dt><dd>{prose(found.evidence)}.</dd><dt>Fix</dt><dd>{prose(found.fix)}{_patch(found)}</dd>"
        f"<dt>More</dt><dd>In the documentation, <code>{escape(found.url)}</code></dd></dl>{inner}</section>"
    )


def _patch(found: Finding) -> str:
    """The lines to change, before and after."""
    if not found.patch:
        return ""
    tags = {"-": "del", "+": "ins"}
    lines = [(tags.get(line[0], "span"), escape(line)) for line in found.patch.splitlines()]
    return '<pre class="patch">' + "\n".join(f"<{tag}>{line}</{tag}>" for tag, line in lines) + "</pre>"


def _credit(credit: CreditMap) -> str:
    rows = [credit.busiest_row]
    quiet = int(credit.resets[1:].sum(0).argmin())
    if quiet != rows[0]:
        rows.append(quiet)
    figures = "".join(_credit_picture(credit, row) for row in rows)
    return (
        "<h2>Credit map</h2><p>In training, the outcome of each step teaches the steps before it. Each line of the "
        "picture is a step, each column an observation; the darker a cell, the more that step's output depends on that "
        "observation. Lines mark where a new episode begins. A <b>healthy</b> policy has one filled triangle per episode "
        "and nothing outside. <b>Red</b> cells are leaks from another episode. A triangle in which only the diagonal is "
        f'filled means that the policy cannot learn what to remember.</p><div class="pictures">{figures}</div>'
    )


def _credit_picture(credit: CreditMap, row: int) -> str:
    cell, margin = 24, 34
    shades, allowed, steps = credit.shades(row), credit.allowed(row), len(credit.values)
    side = steps * cell
    shapes = []
    for t in range(steps):
        for s in range(steps):
            shade = float(shades[t, s])
            if s > t and shade == 0:
                continue
            red, green, blue = color(shade, bool(allowed[t, s]))
            size = float(credit.values[t, s, row])
            tip = f"step {credit.first + t} depends on observation {credit.first + s}: {size:.2g}"
            shapes.append(
                f'<rect x="{margin + s * cell}" y="{t * cell}" width="{cell - 1}" height="{cell - 1}" '
                f'fill="rgb({red},{green},{blue})"><title>{tip}</title></rect>'
            )
    for t in range(1, steps):
        if credit.resets[t, row]:
            at = t * cell - 0.5
            shapes.append(
                f'<path d="M{margin} {at}H{margin + side}M{margin + at} 0V{side}" stroke="#8a93a3" stroke-width="1.5"/>'
            )
    for t in range(0, steps, 2):
        shapes.append(f'<text x="{margin - 6}" y="{t * cell + 16}" text-anchor="end">{credit.first + t}</text>')
        shapes.append(
            f'<text x="{margin + t * cell + cell / 2}" y="{side + 15}" text-anchor="middle">{credit.first + t}</text>'
        )
    episodes = int(credit.resets[1:, row].sum())
    return (
        f'<figure><svg width="{side + margin + 4}" height="{side + 34}" viewBox="0 0 {side + margin + 4} {side + 34}" '
        f'role="img" aria-label="credit map of environment {row}">{"".join(shapes)}'
        f'<text x="{margin + side / 2}" y="{side + 31}" text-anchor="middle">observation</text></svg>'
        f"<figcaption>Environment {row}: {episodes} new episode{'' if episodes == 1 else 's'} in this "
        "segment.</figcaption></figure>"
    )


def _checks(outcomes: tuple[Outcome, ...]) -> str:
    styles = {"passed": "passed", "failed": "failed", "warning": "warned"}
    lines = []
    for outcome in outcomes:
        style, word = styles.get(outcome.verdict, "skipped"), outcome.verdict
        said = ", ".join(f.cause for f in outcome.findings) if outcome.status == "failed" else outcome.said.strip()
        lines.append(
            f"<tr><td><code>{escape(outcome.check)}</code></td><td>{escape(outcome.protects)}</td>"
            f'<td class="{style}">{word}</td><td class="dim">{escape(said)}</td></tr>'
        )
    return (
        '<h2>Checks</h2><div class="wide"><table>'
        "<tr><th>check</th><th>what it protects</th><th></th><th>measured</th></tr>"
        f"{''.join(lines)}</table></div>"
    )
