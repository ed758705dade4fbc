"""Suite files: what they may say, and one line for every mistake."""

from __future__ import annotations

import dataclasses
import json
import re
import runpy
from pathlib import Path

import pytest

from bench.finished_runs import SMALL, small_suite
from holdfast.bench import suite as suites
from holdfast.bench.suite import SuiteError, load, parse
from holdfast.envs.catalog import list_envs
from holdfast.envs.observation_masks import LAYOUTS

ROOT = Path(__file__).parents[2]


def test_popgym_has_every_task_of_the_catalog_with_its_chance_and_best_return():
    suite = load("popgym")
    labyrinths = load("popgym-labyrinth")
    known = {env.id: (env.chance_return, env.solved_return) for env in list_envs() if env.id != "holdfast/TMaze-v0"}
    assert (len(suite.tasks), len(labyrinths.tasks)) == (42, 6)
    tasks = suite.tasks + labyrinths.tasks
    assert {task.env: (task.low, task.high) for task in tasks} == known
    assert all(task.env == f"holdfast/{task.name}-v0" and task.name.startswith(task.family) for task in tasks)
    for one in (suite, labyrinths):
        assert (one.steps, one.statistic, dict(one.settings)) == (15_000_000, "best", {})


def test_popgym_quotes_the_published_figures_and_says_that_they_are_second_hand():
    suite = load("popgym")
    quoted = {task.name: dict(task.published) for task in suite.tasks if task.published}
    assert len([name for name, figures in quoted.items() if "gru" in figures]) == 19
    assert quoted["RepeatPreviousHard"] == {"gru": -0.428, "best": 0.191}
    assert quoted["HigherLowerMedium"] == {"gru": 0.511}
    assert all(column.second_hand for column in suite.published.values())
    tasks = {task.name: task for task in suite.tasks}
    assert suite.reference(tasks["RepeatPreviousHard"], "gru") == ("published GRU", -0.428)
    assert suite.reference(tasks["RepeatPreviousHard"], "window") == ("best of 13 published", 0.191)
    assert suite.reference(tasks["HigherLowerMedium"], "window") is None


def test_out_of_the_box_asks_for_what_the_benchmark_asks_for():
    benchmark = runpy.run_path(str(ROOT / "benchmarks" / "out_of_the_box.py"))["TASKS"]
    suite = load("out-of-the-box")
    assert [task.name for task in suite.tasks] == list(benchmark)
    for task in suite.tasks:
        there = benchmark[task.name]
        assert (task.env, task.steps, task.target, task.low) == (there.env, there.steps, there.target, there.random)
        assert task.settings == ({"mask_velocity": True} if there.mask_velocity else {})
        assert (task.cores or suite.cores) == (there.cores if task.cores else (*there.cores, "none"))


def test_control_hides_what_its_names_say_and_quotes_published_figures():
    suite = load("control")
    masks = {"P": {"mask_velocity": True}, "V": {"mask_position": True}}
    for task in suite.tasks:
        seen = task.name.partition("-")[2]
        assert task.settings == masks.get(seen, {}), task.name
        assert task.cores == (() if seen else ("none",)), task.name  # what is observed needs no memory
        assert not seen or task.env.rpartition(":")[2].rpartition("-")[0] in LAYOUTS, task.name
        assert task.low is not None and task.high is not None and task.low < task.high
        assert task.target is None or suite.reference(task, (*task.cores, "gru")[0]) == ("target", task.target)
    bullet = {task.name: dict(task.published) for task in suite.pick(["PyBullet"])}
    assert len(bullet) == 8 and all(figures.keys() == {"ppo_gru", "mf_rnn", "resel"} for figures in bullet.values())
    assert bullet["WalkerBLT-V"] == {"ppo_gru": 423, "mf_rnn": 160, "resel": 1901}


def test_a_suite_is_a_toml_or_a_json_file(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(SMALL))
    assert load(str(file)) == small_suite()
    toml = tmp_path / "mine.toml"
    toml.write_text('name = "mine"\nsteps = 1e6\ntasks = [{ name = "T", env = "CartPole-v1", target = 475 }]\n')
    suite = load(str(toml))
    assert (suite.name, suite.steps, suite.tasks[0].target) == ("mine", 1_000_000, 475.0)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        (
            "no-such",
            None,
            "no suite 'no-such'; one of control, out-of-the-box, popgym, popgym-labyrinth, or a .toml or .json file",
        ),
        ("popgim", None, "no suite 'popgim'; did you mean popgym?"),
        ("there_is_none.toml", None, "there_is_none.toml: cannot be read (No such file or directory)"),
        ("torn.toml", "name = ", "torn.toml: not a TOML file"),
        ("torn.json", "{", "torn.json: not a JSON file"),
        ("list.json", "[1]", "list.json: a suite is a table of keys, this is a list"),
    ],
)
def test_a_file_that_is_no_suite_is_refused_in_one_line(tmp_path, monkeypatch, name, text, says):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path(name).write_text(text)
    with pytest.raises(SuiteError) as refusal:
        load(name)
    assert says in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tasks": []}, "small.toml: tasks is empty"),
        ({"taks": []}, "unknown key 'taks'; did you mean tasks?"),
        ({"name": 3}, "name must be a text, got 3"),
        ({"name": "../x"}, "name is also that of a folder: use letters, digits, - and _, got '../x'"),
        ({"steps": "many"}, "steps must be an integer, got 'many'"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"seeds": float("inf")}, "seeds must be an integer, got inf"),
        ({"cores": "gru"}, "cores must be a list of names, got 'gru'"),
        ({"cores": []}, "small.toml: cores is empty"),
        ({"statistic": "median"}, "statistic must be one of best, final, got 'median'"),
        ({"settings": {"gama": 0.9}}, "unknown settings ['gama']"),
        ({"settings": {"gamma": 2.0}}, "gamma=2.0 must be between 0 and 1"),
        ({"settings": {"total_steps": 5}}, "total_steps is not among the settings of a suite"),
        ({"tuned": {"G": {}}}, "tuned.G is the family of no task"),
        ({"tuned": {"F": 3}}, "tuned.F: expected a table of settings, got 3"),
        ({"tuned": {"F": {"device": "cpu"}}}, "tuned.F: device is not among the settings of a suite"),
        ({"published": {"gru": {"name": "x"}}}, "published.gru: the key 'source' is missing"),
    ],
)
def test_a_mistake_in_a_suite_is_named(change, says):
    with pytest.raises(SuiteError) as refusal:
        parse({**SMALL, **change}, "small.toml")
    assert says in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("task", "says"),
    [
        ({"name": "X"}, "small.toml, task 1 (X): the key 'env' is missing"),
        ("X", "small.toml, task 1: expected a table of keys, got 'X'"),
        ({"name": "X", "env": "E", "low": 1}, "task X: low and high are two different numbers, or both are left out"),
        ({"name": "X", "env": "E", "low": 1, "high": 1}, "low and high are two different numbers"),
        ({"name": "X", "env": "E", "low": "a", "high": 1}, "task 1 (X): low must be a number, got 'a'"),
        ({"name": "X", "env": "E", "target": float("nan")}, "target must be a finite number, got nan"),
        ({"name": "X", "env": "E", "published": {"theirs": 1}}, "published.theirs has no section [published.theirs]"),
        ({"name": "X", "env": "E", "published": {"gru": "1"}}, "published.gru must be a number, got '1'"),
        ({"name": "X", "env": "E", "settings": {"seed": 1}}, "task X: seed is not among the settings of a suite"),
    ],
)
def test_a_mistake_in_a_task_is_named(task, says):
    with pytest.raises(SuiteError) as refusal:
        parse({"name": "s", "tasks": [task], "published": SMALL["published"]}, "small.toml")
    assert says in str(refusal.value) and "\n" not in str(refusal.value)


def test_two_tasks_of_one_name_are_refused():
    with pytest.raises(SuiteError, match="two tasks are named 'A'"):
        small_suite(tasks=[*SMALL["tasks"], SMALL["tasks"][0]])


def test_tasks_are_picked_by_name_or_family():
    suite = small_suite()
    assert [task.name for task in suite.pick(())] == ["A", "B", "C"]
    assert [task.name for task in suite.pick(("F",))] == ["A", "C"]
    assert [task.name for task in suite.pick(("C", "B"))] == ["B", "C"]
    with pytest.raises(SuiteError, match="has no task 'RepeatFirstEsy'; did you mean RepeatFirstEasy"):
        load("popgym").pick(("RepeatFirstEsy",))


def test_the_control_has_no_target_except_where_a_task_names_it():
    suite = small_suite()
    target = suite.tasks[1]
    assert suite.reference(target, "gru") == ("target", 400.0)
    assert suite.reference(target, "none") is None
    named = small_suite(tasks=[{"name": "B", "env": "CartPole-v1", "target": 400, "cores": ["none"]}], tuned={})
    assert named.reference(named.tasks[0], "none") == ("target", 400.0)


def test_every_suite_of_the_package_loads():
    assert suites.names() == ["control", "out-of-the-box", "popgym", "popgym-labyrinth"]
    assert [load(name).name for name in suites.names()] == suites.names()


def test_the_suites_of_the_docs_load(tmp_path):
    text = (ROOT / "docs" / "bench.md").read_text()
    blocks = re.findall(r"```toml\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        (tmp_path / "my_suite.toml").write_text(block)
        suite = load(str(tmp_path / "my_suite.toml"))
        assert suite.name == "my-suite"
    written = {line.split(" =")[0] for line in blocks[1].splitlines() if " = " in line and not line.startswith(" ")}
    sections = {"settings", "published", "tuned"}
    keys = {field.name for field in dataclasses.fields(suites.Suite)} | {
        field.name for field in dataclasses.fields(suites.Published)
    }
    assert keys <= written | sections
    tasks = {
        name for task in re.findall(r"^    \{(.*)\}", blocks[1], re.MULTILINE) for name in re.findall(r"(\w+) =", task)
    }
    assert {field.name for field in dataclasses.fields(suites.SuiteTask)} - {"settings"} <= tasks


@pytest.mark.parametrize("change", [{"steps": 10**400}, {"seeds": 10**12}, {"note": 5}, {"first_seed": 1e300}])
def test_a_huge_number_in_a_suite_is_a_line_and_not_an_overflow(change, tmp_path):
    file = tmp_path / "huge.json"
    file.write_text(json.dumps({"name": "s", "tasks": [{"name": "A", "env": "CartPole-v1"}], **change}))
    with pytest.raises(SuiteError, match=rf"huge.json: {next(iter(change))} must be"):
        load(str(file))


def test_a_suite_that_is_nested_too_deeply_is_not_a_suite(tmp_path):
    for name, text in {"deep.json": "[" * 100_000, "deep.toml": "x = " + "[" * 5000}.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(SuiteError, match=rf"{name}: not a (JSON|TOML) file"):
            load(str(tmp_path / name))
