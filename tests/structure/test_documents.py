"""README, CONTRIBUTING and docs/architecture.md name files, folders and make targets that exist."""

from __future__ import annotations

import re

import pytest

from structure.source_tree import PACKAGE, ROOT

PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/architecture.md"]


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for file, anchor in re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]*))?\)", (ROOT / page).read_text()):
        target = (ROOT / page).parent / file if file else ROOT / page
        assert target.exists(), file
        assert not anchor or anchor in anchors(target.read_text()), f"{file}#{anchor}"


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_files_that_are_named_exist(page):
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    named = set(re.findall(r"`([\w./]*/(?:[\w.]+\.\w+)?)`", text))
    missing = [path for path in sorted(named) if not ((ROOT / path).exists() or (PACKAGE / path).exists())]
    assert not missing


def test_the_table_of_the_layout_lists_every_folder_in_the_order_of_imports():
    table = (ROOT / "docs" / "architecture.md").read_text().partition("## The layout")[2].partition("\n## ")[0]
    rows = [re.findall(r"`([\w/.]+)`", line.split("|")[1]) for line in table.splitlines() if line.startswith("| `")]
    listed = [name.strip("/").removesuffix(".py") for row in rows for name in row]
    contract = (ROOT / "pyproject.toml").read_text().partition("layers = [")[2].partition("]")[0]
    layers = [name.strip() for layer in re.findall(r'"([^"]+)"', contract) for name in layer.split(":")]
    words = 6  # the vocabulary, in any order
    assert listed[words:] == layers[::-1][words:]
    assert set(listed[:words]) == set(layers[-words:])


def test_the_files_to_start_reading_at_exist():
    table = (ROOT / "docs" / "architecture.md").read_text().partition("## The layout")[2].partition("\n## ")[0]
    for line in (line for line in table.splitlines() if line.startswith("| `")):
        folder = PACKAGE / line.split("|")[1].strip(" `") if "/`" in line.split("|")[1] else PACKAGE
        for file in re.findall(r"`([\w/]+\.py)`", line.split("|")[3]):
            assert (folder / file).exists(), f"{folder.name}: {file}"


def test_the_make_targets_that_are_named_exist():
    makefile = (ROOT / "Makefile").read_text()
    named = {
        name for page in PAGES for name in re.findall(r"(?:`|^)make ([\w-]+)", (ROOT / page).read_text(), re.MULTILINE)
    }
    assert {name for name in named if f"\n{name}:" not in makefile} == set()


def test_the_questions_are_answered():
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("## Where is it?")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 12
    assert all(question.strip().endswith("?") and "`src/holdfast/" in file for question, file, _ in rows)
