"""benchmarks/memory_span.py: every cell has a valid config, and the table says what was reached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast import envs

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def bench(monkeypatch: Any) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    import memory_span

    return memory_span


def test_every_task_can_be_made_and_is_long_enough_for_its_span(bench):
    for task, spans in bench.SPANS.items():
        for span in spans:
            config = bench.config_of(task, "window", span, seed=1, max_steps=1000)
            env = envs.make(config.env, 2, env_kwargs=config.env_kwargs)
            assert env.num_envs == 2 and config.num_steps > span
            assert config.memory_span >= span


def test_a_window_is_as_long_as_the_span(bench):
    config = bench.config_of("recall", "window", 16, seed=1, max_steps=1000)
    env = envs.make(config.env, 2, env_kwargs=config.env_kwargs)
    policy = hf.ActorCritic(
        env.single_observation_space, env.single_action_space, config.core, 8, memory_span=config.memory_span
    )
    assert policy.core.core.window == 16


def test_the_table_says_what_was_reached_and_what_was_not(bench):
    def cell(core, span, seed, steps, mean_return):
        return {"task": "recall", "core": core, "span": span, "seed": seed, "steps_to_threshold": steps,
                "steps": 500_000, "mean_return": mean_return}  # fmt: skip

    cells = [
        cell("window", 4, 1, 100_000, 0.99),
        cell("window", 4, 2, 140_000, 0.98),
        cell("window", 8, 1, 300_000, 0.97),
        cell("window", 8, 2, None, 0.80),
        cell("gru", 8, 1, None, -0.4),
    ]
    assert bench.table(cells).splitlines() == [
        "| recall | 4 | 8 |",
        "|---|---|---|",
        "| gru |  | -0.40 at 0.50M |",
        "| window | **0.12M** | **0.30M** (1 of 2) |",
    ]
