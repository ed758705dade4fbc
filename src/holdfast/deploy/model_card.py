"""The card of a shared policy: README.md as the hub shows it, with result, learning curve and a program that uses it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from holdfast.config.run import BEFORE_ALGORITHMS, RunConfig
from holdfast.shown_text import markdown

_POINTS_IN_TABLE = 8

_TEMPLATE = Path(__file__).with_name("model_card.md.txt")


def card(
    *,
    source: str,
    title: str,
    policy: dict[str, Any],
    num_parameters: int,
    spaces: tuple[str, str],
    evaluation: dict[str, Any] | None = None,
    config: RunConfig | None = None,
    steps: int | None = None,
    points: list[tuple[int, float]] | None = None,
    picture: bool = False,
) -> str:
    """source: what `hf.load` is given. policy: as in config.json. points: the learning curve. picture: there is a curve.png."""
    env = config.env if config is not None else None
    arguments = policy.get("arguments", {})
    units = arguments.get("hidden_size")
    kind = f"{arguments['core']} of {units} unit{'s' * (units != 1)}" if arguments else policy["class"]
    about = f", trained on `{markdown(env)}`" if env else ""
    if config is not None and config.hidden:
        about += f" with {config.hidden[0]}: wrap the environment in `holdfast.envs.{config.hidden[1]}`"
    rows = [
        ("class", policy["class"]),
        ("parameters", f"{num_parameters:,}"),
        ("observations", spaces[0]),
        ("actions", spaces[1]),
    ]
    rows += [(name, json.dumps(value)) for name, value in arguments.items()]
    return _TEMPLATE.read_text(encoding="utf-8").format(
        tags=f"- {json.dumps(env)}\n" if env else "",
        index=_model_index(title, env, evaluation),
        title=markdown(title),
        summary=f"A policy with memory ({markdown(kind)}){about}, made with Holdfast.",
        source=json.dumps(source),
        policy=_table(("", ""), rows),
        result=_result(evaluation),
        curve=_curve(points or [], picture),
        training=_training(config, steps),
    )


def _model_index(title: str, env: str | None, evaluation: dict[str, Any] | None) -> str:
    """The result as the hub's leaderboards read it."""
    if evaluation is None or env is None:
        return ""
    value = f"{evaluation['mean_return']:.4g} +/- {evaluation['std_error'] or 0:.2g}"
    entry = {
        "name": title,
        "results": [
            {
                "task": {"type": "reinforcement-learning", "name": "reinforcement-learning"},
                "dataset": {"name": env, "type": env},
                "metrics": [{"type": "mean_reward", "value": value, "name": "mean_reward", "verified": False}],
            }
        ],
    }
    return f"model-index: {json.dumps([entry])}\n"  # JSON is YAML


def _result(evaluation: dict[str, Any] | None) -> str:
    if evaluation is None:
        return ""
    plus_minus = "" if evaluation["std_error"] is None else f" ± {evaluation['std_error']:.2g}"
    how = "most likely actions" if evaluation["deterministic"] else "sampled actions"
    returned = f"Mean return {evaluation['mean_return']:.4g}{plus_minus}"
    return f"\n## Result\n\n{returned} over {evaluation['episodes']} fresh episode{'s' * (evaluation['episodes'] != 1)}, {how}.\n"


def _curve(points: list[tuple[int, float]], picture: bool) -> str:
    if not points:
        return ""
    chosen = sorted({round(i * (len(points) - 1) / (_POINTS_IN_TABLE - 1)) for i in range(_POINTS_IN_TABLE)})
    rows = [(f"{points[i][0]:,}", f"{points[i][1]:.4g}") for i in chosen]
    image = "![learning curve](curve.png)\n\n" if picture else ""
    return f"\n## Learning curve\n\n{image}{_table(('steps', 'mean return'), rows)}\nAll points are in `curve.csv`.\n"


def _training(config: RunConfig | None, steps: int | None) -> str:
    if config is None:
        return ""
    trained = f"Trained for {steps:,} steps" if steps is not None else "Trained"
    defaults = {**type(config)().to_dict(), "algorithm": BEFORE_ALGORITHMS}
    changed = {name: value for name, value in config.to_dict().items() if value != defaults[name]}
    rows = [(name, json.dumps(value)) for name, value in changed.items()]
    intro = f"{trained} with these settings, and the defaults of `holdfast train` for all others."
    return f"\n## Training\n\n{intro}\n\n{_table(('setting', 'value'), rows)}"


def _table(head: tuple[str, str], rows: list[tuple[str, str]]) -> str:
    lines = [head, ("---", "---"), *((markdown(name), markdown(value)) for name, value in rows)]
    return "".join(f"| {name} | {value} |\n" for name, value in lines)
