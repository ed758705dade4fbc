"""The report: what was found, as text for a terminal, as JSON, and (in `html`) as one page."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from holdfast.doctor.report.credit import CreditMap
from holdfast.doctor.report.findings import Finding, Outcome

if TYPE_CHECKING:
    from rich.console import Console

_COLORS = {"error": "red", "warning": "yellow", "note": "cyan"}
_PATCH_COLORS = {"-": "red", "+": "green"}
_MARKS = {
    "passed": "[green]✓[/]",
    "failed": "[red]✗[/]",
    "warning": "[yellow]![/]",
    "not applicable": "[dim]-[/]",
    "not examined": "[yellow]?[/]",
}


@dataclass(frozen=True)
class Report:
    """`ok`: no finding is an error. `findings`: most serious first; what follows from one is in its `consequences`.

    `norms` `[N, B]`: the size of each environment's state along the rollout, `resets` `[N, B]`: its episode starts.
    `examined_as`: the subject that the doctor chose for a policy that came without one.
    """

    subject: str
    findings: tuple[Finding, ...]
    outcomes: tuple[Outcome, ...]
    seed: int
    seconds: float = 0.0
    credit: CreditMap | None = None
    norms: Tensor | None = None
    resets: Tensor | None = None
    examined_as: str = ""

    @property
    def ok(self) -> bool:
        return not any(f.severity == "error" for f in self.findings)

    @property
    def exit_code(self) -> int:
        """0 healthy, 1 errors found. (2, could not examine, has no report.)"""
        return 0 if self.ok else 1

    @property
    def verdict(self) -> str:
        errors = sum(f.severity == "error" for f in self.findings)
        warnings = sum(f.severity == "warning" for f in self.findings)
        checked = sum(o.status in ("passed", "failed") for o in self.outcomes)
        if errors:
            return f"{self.subject} mishandles its memory: {_count(errors, 'bug')} found"
        if warnings:
            return f"{self.subject} is healthy in {_count(checked, 'check')}, with {_count(warnings, 'warning')}"
        return f"{self.subject} is healthy: {_count(checked, 'check')} passed"

    def judged(self, *, strict: bool = False, ignore: Collection[str] = ()) -> Report:
        """The report with other severities: warnings are errors if `strict`; findings of the causes in `ignore` are notes."""

        def judge(found: Finding) -> Finding:
            if found.cause in ignore:
                return replace(found, severity="note")
            return replace(found, severity="error") if strict and found.severity == "warning" else found

        outcomes = tuple(replace(o, findings=[judge(f) for f in o.findings]) for o in self.outcomes)
        return replace(self, findings=tuple(map(judge, self.findings)), outcomes=outcomes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "subject": self.subject,
            "examined_as": self.examined_as,
            "ok": self.ok,
            "verdict": self.verdict,
            "seed": self.seed,
            "seconds": round(self.seconds, 3),
            "findings": [f.to_dict() for f in self.findings],
            "checks": [
                {"check": o.check, "protects": o.protects, "status": o.status, "said": o.said.strip()}
                for o in self.outcomes
            ],
        }

    def to_json(self, path: str | Path | None = None) -> str:
        """The report as JSON text; written to `path` when given."""
        text = json.dumps(self.to_dict(), indent=2)
        if path is not None:
            Path(path).write_text(text + "\n", encoding="utf-8")
        return text

    def to_html(self, path: str | Path) -> Path:
        """One self-contained page: no script, no network."""
        from holdfast.doctor.report.html import page

        Path(path).write_text(page(self), encoding="utf-8")
        return Path(path)

    def to_text(self) -> str:
        """The report as plain text."""
        from io import StringIO

        from holdfast.display.terminal import Terminal

        console = Terminal(file=StringIO(), width=110, no_color=True)
        self.print(console)
        text: str = console.file.getvalue()  # type: ignore[attr-defined]
        return text

    def print(self, console: Console | None = None) -> None:
        """Print to a terminal, in color if it has colors."""
        from rich.markup import escape

        from holdfast.display.terminal import Terminal

        console = console or Terminal()
        console.print(
            f"[bold {'green' if self.ok else 'red'}]{escape(self.verdict)}[/] [dim](seed {self.seed}, "
            f"{self.seconds:.1f} s)[/]"
        )
        if self.examined_as:
            console.print(f"[dim]examined as {escape(self.examined_as)}[/]", highlight=False)
        for found in self.findings:
            color = _COLORS[found.severity]
            console.print(f"\n[bold {color}]{found.severity}: {found.cause}[/] [dim]({found.check})[/]")
            console.print(f"  {escape(found.meaning)}")
            console.print(f"  [bold]seen:[/] {escape(found.evidence)}")
            console.print(f"  [bold]fix:[/]  {escape(found.fix)}")
            for line in found.patch.splitlines():
                console.print(
                    f"    [{_PATCH_COLORS.get(line[0], 'dim')}]{escape(line)}[/]", highlight=False, soft_wrap=True
                )
            console.print(f"  [dim]see the documentation, {found.url}[/]")
            for inner in found.consequences:
                console.print(f"  [dim]and so: {inner.check}: {inner.cause}: {escape(inner.evidence)}[/]")
        self._print_checks(console)
        if self.credit is not None:
            self._print_credit(console, self.credit)

    def _print_checks(self, console: Console) -> None:
        from rich.table import Table

        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column()
        for outcome in self.outcomes:
            said = outcome.said.strip()
            if outcome.status == "failed":
                said = ", ".join(f.cause for f in outcome.findings)
            elif outcome.status == "not applicable":
                said = f"not applicable: {said}"
            table.add_row(_MARKS[outcome.verdict], outcome.check, f"[dim]{said.replace('[', '(').replace(']', ')')}[/]")
        console.print()
        console.print(table)

    def _print_credit(self, console: Console, credit: CreditMap) -> None:
        row = credit.busiest_row
        console.print(
            f"\nCredit map of env {row}: line t shows how much the output of step t depends on each earlier "
            "observation.\n[dim]`|` marks the start of an episode. A healthy policy has one filled triangle per episode "
            "and nothing outside it; `!` is a leak.[/]"
        )
        console.print(credit.to_blocks(row), highlight=False, markup=False)


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
