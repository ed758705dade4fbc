"""Random hostile contents of a run's files and of a study's database: `python tests/hostile_files.py --count 150 --seed 31`.

A try changes one or two entries of meta.json, config.json, a checkpoint's config, a buffer's manifest, a suite or a queued trial, or
puts hostile text into progress.csv, result.json or run.lock, and reads the result with a command. It fails if the command ends in
a traceback, if a control character or an invented line reaches the terminal, if markup of the file is in a page, if a file outside
of the folder changes, or if a trial gets settings that the search space does not have.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import io
import json
import os
import random
import shutil
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any

import holdfast as hf
from holdfast.cli import main
from holdfast.runs import checkpoint
from holdfast.sweep.space import Parameter
from holdfast.sweep.study import Study
from holdfast.sweep.trial_run import trial_config

VALUES: list[Any] = [
    None, True, -1, 3, 2**70, 1.5, float("nan"), "", "\x1b]0;owned\x07", "\u202ex\nfake row", "../../x", "/etc/passwd", "os:abort",
    "subprocess:getoutput", "pettingzoo:os.abort", "$\\frac{", "a" * 3000, [], {}, [1, "\x1b[2J"], {"\x1b[2J": "\x1b[2J"}, [[]],
    {"env": "subprocess:getoutput"}, {"core": "os:abort"}, {"core": "gru"}, {"run_dir": "/tmp/x"}, {"num_layers": 9},
]  # fmt: skip
SPACE = (
    Parameter("learning_rate", low=1e-4, high=1e-2, scale="log"),
    Parameter("core", choices=("lstm", "gru")),
    Parameter("num_layers", low=1, high=3, whole=True),
)
Problems = list[str]


def mutated(data: Any, draw: random.Random) -> Any:
    if draw.random() < 0.02:
        return draw.choice(VALUES)
    data = copy.deepcopy(data)
    for _ in range(draw.choice([1, 1, 2])):
        node = data
        while node:
            key = draw.choice(list(node) if isinstance(node, dict) else range(len(node)))
            if isinstance(node[key], (dict, list)) and node[key] and draw.random() < 0.6:
                node = node[key]
                continue
            if draw.random() < 0.25:
                del node[key]
            elif draw.random() < 0.1 and isinstance(node, dict):
                node["\x1b[2Jkey"] = node.pop(key)
            else:
                node[key] = draw.choice(VALUES)
            break
    return data


def call(*argv: str) -> str:
    """Run a command; what is wrong with how it ended or with what it wrote, or ""."""
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            main(list(argv))
    except SystemExit:
        pass
    except BaseException:
        return traceback.format_exc()[-300:]
    said = out.getvalue()
    raw = any(not sign.isprintable() and sign != "\n" for sign in said) or "\nfake row" in said
    return f"raw text: {said!r:.200}" if raw else ""


def files(count: int, draw: random.Random, tries: collections.Counter[str]) -> Problems:
    sizes = dict(
        hidden_size=4, num_envs=4, num_steps=16, total_steps=640, epochs=1, minibatches=1, final_eval_episodes=1
    )
    hf.Trainer(hf.TrainConfig("CartPole-v1", run_dir="run", quiet=True, threads=1, device="cpu", **sizes)).run()
    meta, config = (json.loads(Path("run", name).read_text()) for name in ("meta.json", "config.json"))
    saved = checkpoint.load(checkpoint.find("run"))
    found = []
    for _ in range(count):
        Path("run/meta.json").write_text(json.dumps(mutated(meta, draw)))
        Path("run/config.json").write_text(json.dumps(config))
        commands = [["info", "run"]]
        Path("run/config.json").write_text(json.dumps(mutated(config, draw)))
        commands += [["plot", "run", "-o", "curves.png"]] if draw.random() < 0.2 else [["info", "run"]]
        with contextlib.suppress(Exception):  # what is no plain data cannot be saved
            checkpoint.save("copied.pt", {**saved, "config": mutated(saved["config"], draw)})
            commands += [
                ["info", "copied.pt"],
                *([["eval", "copied.pt", "--episodes", "1"]] if draw.random() < 0.2 else []),
            ]
        for command in commands:
            tries[command[0]] += 1
            found += [problem] if (problem := call(*command)) else []
    return found


TEXTS = [
    "", "\x00\x01", "x", "[]", "{}", '{"mean_return": "\\u001b[2J"}', '{"mean_return": 1e999}', "a" * 100_000,
    "\x1b]0;owned\x07\nfake row", "update,steps\n\x1b[2J,1\n", "update,rollout/ep_rew_mean\n1,\x1b[2J\n2,3\n",
    "steps,rollout/ep_rew_mean\n1e999,nan\n", '"open\n1,2\n',
]  # fmt: skip
PAYLOADS = [
    "\x1b]0;owned\x07\u202e\nfake row<script>x</script>", "../../outside/x", "..", "/tmp/x", "<img src=x onerror=x>", "os:abort",
]  # fmt: skip


def records(count: int, draw: random.Random, tries: collections.Counter[str]) -> Problems:
    """Texts in the place of a run's records."""
    found = []
    for _ in range(count):
        shutil.rmtree("copy", ignore_errors=True)
        shutil.copytree("run", "copy")
        Path("copy", draw.choice(["progress.csv", "result.json", "run.lock", "wandb_id"])).write_text(
            draw.choice(TEXTS)
        )
        for command in (["info", "copy"], ["plot", "copy", "-o", "curves.png"]):
            tries[f"{command[0]} (records)"] += 1
            found += [problem] if (problem := call(*command)) else []
    return found


def suites(count: int, draw: random.Random, tries: collections.Counter[str]) -> Problems:
    """Suites with hostile names, trained for two updates, and their pages."""
    found, small = [], ["num_envs=4", "num_steps=8", "hidden_size=4", "epochs=1", "minibatches=1"]
    for _ in range(count):
        data: dict[str, Any] = {
            "name": "s", "title": "t", "note": "n", "steps": 64, "cores": ["gru"],
            "tasks": [{"name": "T", "env": "CartPole-v1", "family": "F", "low": 0, "high": 1}],
        }  # fmt: skip
        part = draw.choice([data, data["tasks"][0], data["tasks"][0]])
        part[draw.choice([key for key in part if isinstance(part[key], str)])] = draw.choice(PAYLOADS)
        Path("suite.json").write_text(json.dumps(data))
        shutil.rmtree("runs", ignore_errors=True)
        tries["bench"] += 1
        problem = call("bench", "suite.json", "--seeds", "1", "--jobs", "1", "--device", "cpu", "--set", *small)
        pages = [path.read_text() for path in Path("runs").rglob("*") if path.suffix in (".html", ".md")]
        marked = any("<script>x" in page or "<img src=x" in page for page in pages)
        found += [f"{problem or 'markup in a page'} {part}"] if problem or marked else []
    return found


def buffers(count: int, draw: random.Random, tries: collections.Counter[str]) -> Problems:
    """Manifests of a buffer, and links in the place of its folder and its file."""
    sizes = dict(hidden_size=4, num_envs=2, total_steps=128, warmup_steps=64, final_eval_episodes=1)
    hf.Trainer(hf.SACConfig("Pendulum-v1", run_dir="sac", quiet=True, threads=1, device="cpu", **sizes)).run()
    file = checkpoint.find("sac")
    saved, found = checkpoint.load(file), []
    for _ in range(count):
        shutil.rmtree("copy", ignore_errors=True)
        shutil.copytree("sac", "copy")
        folder = Path("copy/checkpoints/buffer-rank0")
        kind = draw.choice(["manifest"] * 8 + ["folder", "file"])
        if kind == "manifest":
            with contextlib.suppress(Exception):  # what is no plain data cannot be saved
                checkpoint.save(
                    Path("copy/checkpoints", Path(file).name), {**saved, "files": mutated(saved["files"], draw)}
                )
        else:
            path = folder if kind == "folder" else next(folder.iterdir())
            shutil.rmtree("outside/linked", ignore_errors=True)
            path.rename("outside/linked")
            path.symlink_to(Path("outside/linked").absolute())
        before = {str(path): path.read_bytes() for path in Path("outside").rglob("*") if path.is_file()}
        tries["resume (buffer)"] += 1
        steps = str(saved["config"]["total_steps"] + 128)
        problem = call("train", "--resume", "copy", "--total-steps", steps, "--quiet")
        after = {str(path): path.read_bytes() for path in Path("outside").rglob("*") if path.is_file()}
        found += [f"{kind}: {problem or 'wrote elsewhere'}"] if problem or before != after else []
        Path("outside/linked").unlink(missing_ok=True) if Path("outside/linked").is_file() else None
    return found


def studies(count: int, draw: random.Random, tries: collections.Counter[str]) -> Problems:
    import optuna

    base, found = hf.TrainConfig(num_envs=4, num_steps=8), []
    Study("sqlite:///empty.db", "another", SPACE, {}, 1, startup=4)
    for _ in range(count):
        shutil.copy("empty.db", "study.db")
        study = Study("sqlite:///study.db", "it", SPACE, {}, 1, startup=4)
        names = draw.sample(["index", "seed", "settings", "attempts", "owner", "error", "surplus"], draw.randint(1, 4))
        attributes = {"index": 0, **{name: draw.choice(VALUES) for name in names}}
        params = draw.choice([{}, {"core": '"os:abort"'}, {"core": 7}, {"num_layers": 99}, {"learning_rate": 5.0}])
        if draw.random() < 0.6:
            study._study.enqueue_trial(params, user_attrs=attributes)
        else:
            study._study.add_trial(optuna.create_trial(value=1.0, params={}, distributions={}, user_attrs=attributes))
        tries["study"] += 1
        try:
            trial = study.take(3)
            made = None if trial is None else trial_config(study, trial, base, Path("sweep"), "area")
            outcomes = study.outcomes()
        except (ValueError, TypeError, AttributeError, KeyError):  # `holdfast sweep` says these in one line
            continue
        settings = [outcome.settings for outcome in outcomes if outcome.score is not None]
        settings += [] if made is None else [{parameter.name: getattr(made, parameter.name) for parameter in SPACE}]
        inside = made is None or (made.env == base.env and Path(str(made.run_dir)).parent == Path("sweep/trials"))
        for one in settings:
            try:
                study._in_space(one)
            except ValueError:
                inside = False
        found += [] if inside else [f"{attributes} {params}"]
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--seed", type=int, default=31)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    number_of_tries: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        problems = files(given.count, random.Random(given.seed), number_of_tries)
        problems += studies(given.count, random.Random(given.seed), number_of_tries)
        Path("outside").mkdir()
        problems += records(given.count, random.Random(given.seed), number_of_tries)
        problems += suites(given.count // 10, random.Random(given.seed), number_of_tries)
        problems += buffers(given.count // 2, random.Random(given.seed), number_of_tries)
        os.chdir("/")
    print("\n".join(problems[:20]))
    print(f"{dict(number_of_tries)}: {len(problems)} failed")
    raise SystemExit(bool(problems))
