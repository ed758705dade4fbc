"""`Terminal`: rich's console for text that may hold something from a file. What is not a style of ours is shown, not obeyed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.segment import Segment

from holdfast.shown_text import output_errors, printable


class Terminal(Console):
    """Names such as `module:boom:` stay as they are: they are no emoji."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"emoji": False, **options})

    def print(self, *objects: Any, **options: Any) -> None:
        with output_errors():
            super().print(*objects, **options)

    def render(self, *arguments: Any, **options: Any) -> Iterable[Segment]:
        for segment in super().render(*arguments, **options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment("\n".join(map(printable, segment.text.split("\n"))), segment.style)
