"""A page of HTML in one file, that needs neither scripts nor the network."""

from __future__ import annotations

from html import escape
from pathlib import Path

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def document(title: str, style: Path, body: str) -> str:
    """style: a CSS file, which becomes a part of the page. body: HTML."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title>'
        f"<style>{style.read_text(encoding='utf-8')}</style></head><body><main>{body}</main></body></html>\n"
    )
