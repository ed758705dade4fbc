"""The files of `holdfast doctor`: whether they can be written is known before the examination, which may take long."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.cli.errors import UserError, user_errors
from holdfast.doctor.report import ci

if TYPE_CHECKING:
    from holdfast.doctor import Report


@dataclass(frozen=True)
class ReportFiles:
    """Where each form of a report goes; None where it is not asked for."""

    html: Path | None = None
    png: Path | None = None
    json: Path | None = None
    sarif: Path | None = None
    junit: Path | None = None

    def require_writable(self) -> None:
        """Raise UserError if a file cannot be written. Makes nothing: the target may still turn out to be misspelled."""
        for flag, file in vars(self).items():
            if file is not None:
                _require_writable(f"--{flag}", file)
        if self.png is not None and importlib.util.find_spec("matplotlib") is None:
            raise UserError("--png needs matplotlib: pip install 'holdfast[plot]'")

    def write(self, report: Report, location: ci.Location | None) -> tuple[list[Path], list[str]]:
        """Write all files, and the folders they are in. Returns those written, and why others could not be.

        There is no picture of a policy that has no gradients to measure."""
        written, problems = [], []

        def write(file: Path | None, how: Callable[[Path], Any]) -> None:
            if file is None:
                return
            try:
                with user_errors(file):
                    file.parent.mkdir(parents=True, exist_ok=True)
                    how(file)
                written.append(file)
            except UserError as error:  # the other files are still written
                problems.append(str(error))

        write(self.html, report.to_html)
        if report.credit is not None:
            write(self.png, report.credit.to_png)
        write(self.json, report.to_json)
        sarif = ci.sarif(report, location)
        write(self.sarif, lambda file: file.write_text(json.dumps(sarif, indent=2) + "\n", encoding="utf-8"))
        write(self.junit, lambda file: file.write_text(ci.junit(report), encoding="utf-8"))
        return written, problems


def _require_writable(flag: str, file: Path) -> None:
    if file.is_dir():
        raise UserError(f"{flag} {file}: this is a folder; name a file in it")
    there = next(path for path in (file, *file.absolute().parents) if path.exists())  # the root always exists
    if there != file and not there.is_dir():
        raise UserError(f"{flag} {file}: {there.name} is a file, not a folder; choose another place")
    if not os.access(there, os.W_OK):
        raise UserError(f"{flag} {file}: {there} cannot be written; choose another place")
