"""Random hostile contents of a run's files and of a study's database: `python tests/hostile_files.py --count 150 --seed 31`.

A try changes one or two entries of meta.json, config.json, a checkpoint's config or a queued trial, and reads the result with a
command. It fails if the command ends in a traceback, if a control character or an invented line reaches the terminal, or if a
trial gets settings that the search space does not have.
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
        os.chdir("/")
    print("\n".join(problems[:20]))
    print(f"{dict(number_of_tries)}: {len(problems)} failed")
    raise SystemExit(bool(problems))
