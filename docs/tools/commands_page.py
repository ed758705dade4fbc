"""The page of `holdfast` commands, from what their parsers print with --help. `python docs/tools/commands_page.py` prints it."""

from __future__ import annotations

import contextlib
import io
import os
import re
from unittest import mock

INTRODUCTION = """# Commands

Written from `holdfast COMMAND --help` when this site was built. `python -m holdfast` is the same program.
`--flag` and `--no-flag` switch a setting on and off. Numbers may be written as `1e6` or `500_000`.

| command | | example |
|---|---|---|
"""


def page() -> str:
    """The whole page, as Markdown."""
    from holdfast.cli.commands import COMMANDS

    rows = (f"| [`{name}`](#holdfast-{name}) | {what} | `{example}` |" for name, (what, example) in COMMANDS.items())
    return INTRODUCTION + "\n".join([*rows, "", *map(_command, COMMANDS)])


def _command(name: str) -> str:
    usage, description, options = read_help(help_of(name))
    parts = [f"## holdfast {name}", description, f"```\n{usage}\n```"]
    if not options:
        return "\n\n".join(parts) + "\n"
    table = [f"| {_code(flag)} | {_text(text)} | {_code(default)} |" for flag, text, default in options]
    parts.append("\n".join(["| flag | | default |", "|---|---|---|", *table]))
    return "\n\n".join(parts) + "\n"


def help_of(name: str) -> str:
    """What `holdfast NAME --help` prints, without colors."""
    from holdfast.cli import main

    printed = io.StringIO()
    with (
        mock.patch.dict(os.environ, {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}),
        contextlib.redirect_stdout(printed),
        contextlib.suppress(SystemExit),
    ):
        main([name, "--help"])
    return re.sub(r"\x1b\[[0-9;]*m", "", printed.getvalue())


def read_help(text: str) -> tuple[str, str, list[tuple[str, str, str]]]:
    """Usage, description, and (flag, explanation, default) of each option.

    >>> read_help("usage: x RUN\\n\\nDoes it.\\n\\n options \\n --- \\n  --seed INT  Of\\n      all. (default: 0)")
    ('x RUN', 'Does it.', [('--seed INT', 'Of all.', '0')])
    """
    head, *sections = re.split(r"^ (?:positional arguments|[\w ]*options) *$", text, flags=re.MULTILINE)
    usage, _, description = head.partition("\n\n")
    entries: list[list[str]] = []
    for line in "\n".join(sections).splitlines():
        if entry := re.match(r"  (--?[a-z].*?|[A-Z]+(?: \.\.\.)?)(?:  +(.*))?$", line.rstrip()):
            entries.append([entry[1], entry[2] or ""])
        elif line.startswith("    ") and entries:
            entries[-1].append(line.strip())
    options = []
    for flag, *words in entries:
        text, _, default = " ".join(filter(None, words)).partition("(default:")
        if not flag.startswith("-h"):
            options.append((_plain(flag), text.removesuffix("(required)").strip(), default.strip(" )")))
    return " ".join(usage.removeprefix("usage: ").split()), " ".join(description.split()), options


def _plain(flag: str) -> str:
    """`--seeds [INT [INT ...]]` as `--seeds INT ...`, `--config {None}|PATH` as `--config PATH`."""
    flag = flag.replace("{None}|", "").strip()
    return re.sub(r"\{?\[(\S+) \[\1 \.\.\.\]\]\}?", r"\1 ...", flag)


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|") if text and text != "None" else ""


def _text(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


if __name__ == "__main__":
    print(page())
