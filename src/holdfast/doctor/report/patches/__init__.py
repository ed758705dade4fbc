"""The lines to change for a cause, before and after, in the words of the framework at hand.

One text file per framework, named as `Subject.framework`. Blocks are separated by empty lines: a line of causes, then
the lines of their patch. Lines that go begin with `-`, lines that come with `+`, others stay. The names in them are
examples. In `torch.txt`, a script of one's own, `h` is `[B, H]` and `done = terminated | truncated` came with `obs`; it
serves for every cause that a framework's own file lacks.
"""

from __future__ import annotations

from pathlib import Path


def patch_for(cause: str, framework: str) -> str:
    """The patch for this cause; empty if there is none."""
    return PATCHES.get(framework, {}).get(cause) or PATCHES["torch"].get(cause, "")


def _read(file: Path) -> dict[str, str]:
    table: dict[str, str] = {}
    for block in file.read_text(encoding="utf-8").strip().split("\n\n"):
        causes, _, patch = block.partition("\n")
        table.update(dict.fromkeys(causes.split(), patch))
    return table


#: framework: cause: patch
PATCHES: dict[str, dict[str, str]] = {file.stem: _read(file) for file in sorted(Path(__file__).parent.glob("*.txt"))}
