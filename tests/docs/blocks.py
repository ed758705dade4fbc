"""The pages of the documentation, their blocks of code, and the commands in them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
PROGRAMS = ("holdfast", "make", "python", "pip", "torchrun", "pytest")


def blocks(page: str, *languages: str) -> list[str]:
    return [code for language, code in FENCE.findall((ROOT / page).read_text()) if language in languages]


def commands(page: str) -> list[list[str]]:
    """Every command line of a page, in a block or between backticks, as words."""
    text = (ROOT / page).read_text()
    lines = [line for block in blocks(page, "", "bash") for line in block.splitlines()]
    lines += re.findall(r"`([^`\n]+)`", FENCE.sub("", text))
    found = []
    for line in lines:
        line = line.replace("\\|", "|")
        if line.split(" ")[0] in PROGRAMS and " " in line:
            found.append([word.rstrip(",;") for word in shlex.split(line, comments=True, posix=True)])
    return found
