"""Docstrings as Markdown: examples that start with >>> become code blocks. An extension of griffe (mkdocs.yml)."""

from __future__ import annotations

import re

import griffe

DOCTEST = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)


class Doctests(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fence(obj.docstring.value)


def fence(text: str) -> str:
    """Put every doctest, up to the next blank line, into a fence."""
    return DOCTEST.sub(lambda found: f"```pycon\n{found[0]}\n```", text)
