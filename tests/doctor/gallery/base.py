"""What an exhibit is: a broken policy with the public thread that describes its mistake."""

from __future__ import annotations

from dataclasses import dataclass

from broken.base import Broken, first_line


@dataclass(frozen=True)
class Exhibit(Broken):
    """`thread`: where the mistake was discussed in public. The code is ours; only the mistake is the same."""

    thread: str = ""


def exhibit(name: str, case: int, cause: str, thread: str, kind: type, twin: type) -> Exhibit:
    """An exhibit of a subject that is built without arguments."""
    return Exhibit(f"gallery-{name}", case, first_line(kind), cause, kind, twin, thread=thread)
