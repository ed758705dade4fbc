"""The results on docs/popgym.md, from what `holdfast bench popgym` wrote, on one machine or on several.

    python docs/tools/popgym_results.py runs/bench/popgym/results.jsonl

adds the runs of the files to benchmarks/results/popgym.jsonl, writes the part of the page between its two comments, and takes
a picture of the HTML page, docs/popgym.png, if Chromium is installed. Without files it does so from what is committed.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from holdfast.bench import results, suite
from holdfast.bench.comparison import Comparison, compare
from holdfast.bench.page import page
from holdfast.bench.settings import heading_of
from holdfast.bench.table import markdown
from holdfast.runs.writing import write_whole

ROOT = Path(__file__).parents[2]
PAGE, PICTURE = ROOT / "docs" / "popgym.md", ROOT / "docs" / "popgym.png"
COMMITTED = ROOT / "benchmarks" / "results" / "popgym.jsonl"
BEGIN, END = "<!-- results: docs/tools/popgym_results.py writes what follows -->\n", "<!-- end of the results -->\n"
NOTHING = "Nothing has been measured with these defaults yet. The command above does it.\n"
NEARLY = 0.02
"""A return that is lower than a published one by at most this counts as reached."""
WINDOW = "1280,1600"


def joined(files: Iterable[Path]) -> list[results.Row]:
    """The latest result of each task, core, seed, setting and number of steps; a later file goes before an earlier one."""
    return results.latest(row for file in files for row in results.read(file)[0])


def section(rows: Sequence[results.Row], steps: int | None = None, picture: bool = False) -> str:
    """What stands between the comments of the page. steps: of the runs to show, by default the suite's."""
    popgym = suite.load("popgym")
    comparisons = compare(popgym, rows, steps)
    if not comparisons:
        return NOTHING
    body = markdown(popgym, comparisons).partition("\n")[2].strip()  # the page has a heading of its own
    parts = [sentence for comparison in comparisons for sentence in verdicts(comparison)]
    parts += ["![The page that the command writes](popgym.png)"] if picture else []
    return "\n\n".join([*parts, re.sub("^#", "##", body, flags=re.MULTILINE)]) + "\n"


def verdicts(comparison: Comparison) -> list[str]:
    """A sentence for each published column: how many of its tasks ours reaches or beats."""
    sentences, with_setting = [], heading_of(comparison.setting)
    for key, column in comparison.suite.published.items():
        tasks = [task for task in comparison.tasks if key in task.published]
        if not tasks:
            continue
        if column.cores:  # figures of one memory: ours against it
            for core in (core for core in comparison.cores if core in column.cores):
                cells = [(task, comparison.cells.get((task.name, core))) for task in tasks]
                found = [(task, cell.value - task.published[key]) for task, cell in cells if cell is not None]
                below = [task.name for task, difference in found if difference < -NEARLY]
                text = f"{core} reaches the {column.name} (minus {NEARLY}) in {len(found) - len(below)} of {len(found)} tasks"
                sentences.append(text + (f"; not in {', '.join(below)}." if below else "."))
        else:
            best = {t.name: max(c.value for (name, _), c in comparison.cells.items() if name == t.name) for t in tasks}
            above = [task.name for task in tasks if best[task.name] > task.published[key] + NEARLY]
            below = [task.name for task in tasks if best[task.name] < task.published[key] - NEARLY]
            text = f"The best of ours is above the {column.name} by more than {NEARLY} in {len(above)} of {len(tasks)} tasks"
            text += f", within {NEARLY} of it in {len(tasks) - len(above) - len(below)}"
            sentences.append(text + (f", below in {', '.join(below)}." if below else "."))
    return [f"{with_setting}: {sentence}" if with_setting else sentence for sentence in sentences]


def with_section(text: str, new: str) -> str:
    """A page with another section of results."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{PAGE} has lost the comment {(END if begin else BEGIN).strip()!r}; put it back")
    return f"{before}{begin}\n{new}\n{end}{after}"


def take_picture(html: str, path: Path) -> bool:
    """The top of the page as Chromium shows it; False if there is no Chromium."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    browser = next((found for name in names if (found := shutil.which(name))), None)
    if browser is None:
        return False
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "index.html"
        source.write_text(html)
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        flags += [f"--user-data-dir={folder}/profile", f"--window-size={WINDOW}", f"--screenshot={path}"]
        subprocess.run([browser, *flags, source.as_uri()], check=True, capture_output=True, timeout=120)
    return True


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("files", nargs="*", type=Path, help="results.jsonl of one or more folders of results")
    parser.add_argument("--steps", type=int, help="steps of the runs to show; by default the suite's")
    args = parser.parse_args(argv)
    missing = [str(file) for file in args.files if not file.is_file()]
    if missing:
        parser.error(f"no such file: {', '.join(missing)}")
    rows = joined([COMMITTED, *args.files])
    if args.files:
        write_whole(COMMITTED, [(json.dumps(row) + "\n").encode() for row in rows])
    popgym = suite.load("popgym")
    comparisons = compare(popgym, rows, args.steps)
    if comparisons and not take_picture(page(popgym, comparisons), PICTURE):
        print("no picture: Chromium is not installed; `make test-browser` installs it")
    text = section(rows, args.steps, PICTURE.exists())
    write_whole(PAGE, [with_section(PAGE.read_text(), text).encode()])
    shown = sum(len(comparison.runs) for comparison in comparisons)
    print(f"{len(rows)} runs in {COMMITTED}; {shown} of them on {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
