"""The version and the list of changes say the same. CONTRIBUTING.md has the steps of a release."""

from __future__ import annotations

import re
from pathlib import Path

import holdfast

CHANGES = Path(__file__).parents[2] / "CHANGELOG.md"


def test_the_changes_begin_with_this_version_and_say_whether_it_is_released():
    heading = re.search(r"^## (\S+) \((unreleased|\d{4}-\d{2}-\d{2})\)$", CHANGES.read_text(), re.MULTILINE)
    assert heading is not None, "the first heading is '## VERSION (unreleased)' or '## VERSION (YYYY-MM-DD)'"
    released, _, dev = holdfast.__version__.partition(".dev")
    assert heading[1] == released
    assert (heading[2] == "unreleased") == bool(dev)
