"""Hostile files for the commands: results and suites of a bench, presets and search spaces.

    python tests/file_mutants.py --count 2000 --seed 1

Whatever a file holds, the command that reads it succeeds or ends with one line; no module that a file names is imported, and
nothing that a file says becomes markup of the page that `holdfast bench` writes. Mutant n of a seed is always the same.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import holdfast as hf
from holdfast.cli import main as holdfast_command
from holdfast.sweep.space import default_space, read_space
from pretrained_mutants import STRANGE, mutated_tree

EVIL = "holdfast_file_mutant"
MARKUP = "<script>alert(1)</script>\"'&<img src=x onerror=alert(1)>"
STRINGS: list[Any] = [
    MARKUP, "\ud800", "\x1b]0;title\x07", "a\nb|c", "a\0b", f"{EVIL}:Evil", 10**400, -(10**400), 1e308, float("nan"), float("inf"),
    [[1, MARKUP]], {MARKUP: MARKUP}, {"began": 5, "elapsed": MARKUP}, "x" * 5000, 10**12,
]  # fmt: skip
ROW: dict[str, Any] = dict(
    id="x", task="A", core="gru", seed=1, steps=16, setting="default", final=0.5, best=0.4, best_at=16, final_std_error=0.1,
    engine={"update": "eager", "rollout": "native"}, config={"num_envs": 2}, command={"began": "t", "elapsed": 1.0},
    curve=[[8, 0.1], [16, 0.2]], device="cpu", commit="abc", seconds=1.0, wall_seconds=2.0, steps_per_second=3.0,
    trained_steps=16, final_deterministic=0.3,
)  # fmt: skip
TASK = dict(env="holdfast/TMaze-v0", low=0.0, high=1.0, published={"p": 0.3}, settings={"gamma": 0.9})
SUITE: dict[str, Any] = dict(
    name="s", steps=16, cores=["gru"], control=["none"], note=MARKUP, title=MARKUP, seeds=2, statistic="best",
    tasks=[{**TASK, "name": "A", "note": MARKUP}, {**TASK, "name": MARKUP, "target": 0.5, "family": "F"}],
    published={"p": {"name": MARKUP, "source": MARKUP}}, tuned={"F": {"gamma": 0.5}},
)  # fmt: skip


class Page(HTMLParser):
    """Fails if a page has markup that ours never has."""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "img", "iframe"), tag
        assert not any(name.startswith("on") for name, _ in attributes), attributes


def mutated(tree: Any, draw: random.Random) -> bytes:
    """A file of JSON with changes, now and then torn or nested deeply."""
    tree = json.loads(json.dumps(tree))
    for _ in range(draw.choice((0, 1, 1, 2))):
        if draw.random() < 0.5:
            mutated_tree(tree, draw)
        elif tree:
            tree[draw.choice(list(tree))] = draw.choice([*STRINGS, *STRANGE])
    if draw.random() < 0.03:
        tree = draw.choice([*STRINGS, *STRANGE])
    text = json.dumps(tree)
    if draw.random() < 0.05:
        text = text[: draw.randrange(len(text))] + draw.choice(("", "[" * 100_000, "\0"))
    return text.encode()


def results(draw: random.Random) -> str:
    rows = []
    for _ in range(draw.randrange(1, 4)):
        kind = dict(
            seed=draw.randrange(4), task=draw.choice(["A", "A", MARKUP]), core=draw.choice(["gru", "none", MARKUP])
        )
        rows.append(mutated({**ROW, **kind, "setting": draw.choice(["default", "tuned", MARKUP])}, draw))
    Path("out").mkdir(exist_ok=True)
    Path("out/results.jsonl").write_bytes(b"\n".join(rows))
    Path("out/index.html").unlink(missing_ok=True)
    return _report(json.dumps(SUITE).encode())


def suite(draw: random.Random) -> str:
    Path("out").mkdir(exist_ok=True)
    Path("out/results.jsonl").write_text(json.dumps(ROW) + "\n")
    return _report(mutated(SUITE, draw))


def _report(data: bytes) -> str:
    Path("suite.json").write_bytes(data)
    outcome = _command("bench", "suite.json", "--report", "--out", "out")
    if outcome == "accepted":
        Page().feed(Path("out/index.html").read_text())
    return outcome


def imports(draw: random.Random) -> str:
    """A suite, a preset or a space that names a module is refused before anything is trained."""
    name = f"{EVIL}:Evil"
    field = draw.choice(("core", "policy", "env"))
    task = {"name": "A", "env": name} if field == "env" else {"name": "A", "env": "holdfast/TMaze-v0"}
    settings = {"policy": name} if field == "policy" else {}
    cores = [name] if field == "core" else ["gru"]
    Path("suite.json").write_text(json.dumps(dict(name="s", cores=cores, settings=settings, tasks=[task])))
    Path("preset.json").write_text(json.dumps({"env": "holdfast/TMaze-v0", field: name}))
    Path("space.json").write_text(json.dumps({field: {"choices": [name]}}))
    command = draw.choice(
        [
            ("bench", "suite.json", "--device", "cpu"),
            ("train", "--preset", "preset.json", "--device", "cpu"),
            ("sweep", "--preset", "preset.json", "--device", "cpu"),
            ("sweep", "--env", "holdfast/TMaze-v0", "--space", "space.json", "--device", "cpu"),
        ]
    )
    outcome = _command(*command)
    return outcome if outcome == "refused" else f"{command}: {outcome}"


def preset(draw: random.Random) -> str:
    Path("preset.json").write_bytes(mutated(hf.TrainConfig(env_kwargs={"length": 3}, head_sizes=(4,)).to_dict(), draw))
    return _read(hf.TrainConfig.load, Path("preset.json"))


def space(draw: random.Random) -> str:
    known = {parameter.name: parameter.to_data() for parameter in default_space(hf.TrainConfig(num_steps=8, epochs=2))}
    Path("space.json").write_bytes(mutated(known, draw))
    return _read(lambda path: read_space(path, hf.PPOConfig), Path("space.json"))


def _read(reader: Any, file: Path) -> str:
    try:
        reader(file)
    except ValueError as error:
        return "refused" if len(str(error).splitlines()) == 1 else f"no line: {str(error)[:200]!r}"
    return "accepted"


def _command(*argv: str) -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        code = holdfast_command(argv)
    lines = said.getvalue().splitlines()
    if code == 2 and len(lines) == 1 and lines[0].isprintable():
        return "refused"
    return "accepted" if code == 0 else f"exit code {code}: {said.getvalue()[:300]!r}"


KINDS = (results, results, suite, suite, preset, space, imports)


def hunt(seed: int, numbers: Iterable[int], until: float = float("inf")) -> Iterator[str]:
    """ "" for each mutant that was accepted or refused in one line, otherwise what happened."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        sys.path.insert(0, folder)
        Path(f"{EVIL}.py").write_text("open('imported', 'w').close()\nclass Evil: pass\n")
        try:
            for number in numbers:
                draw = random.Random(f"{seed}/{number}")
                kind = KINDS[number % len(KINDS)]
                try:
                    outcome = kind(draw)
                except Exception:
                    outcome = traceback.format_exc()
                if Path("imported").exists():
                    outcome = "a module that a file names was imported"
                    Path("imported").unlink()
                usual = outcome in ("accepted", "refused")
                yield "" if usual else f"mutant {number} of seed {seed} ({kind.__name__}): {outcome}"
                if time.monotonic() > until:
                    return
        finally:
            sys.path.remove(folder)
            os.chdir(before)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="mutants to try")
    parser.add_argument("--seed", type=int, default=1, help="which mutants")
    options = parser.parse_args()
    failures = [
        problem for problem in hunt(options.seed, itertools.islice(itertools.count(), options.count)) if problem
    ]
    print("".join(f"{failure}\n" for failure in failures[:10]), end="")
    print(f"{options.count} files of seed {options.seed}, {len(failures)} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
