"""The settings that a sweep varies, as a file."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

import holdfast as hf
from holdfast.algorithms.auto_sizes import choose_sizes
from holdfast.algorithms.base import Task
from holdfast.config import PRESETS
from holdfast.sweep.space import Parameter, Scale, default_space, read_space, write_space

BASE = hf.TrainConfig(num_envs=16, num_steps=64, epochs=4, minibatches=8)


@pytest.mark.parametrize("preset", [None, *PRESETS])
def test_the_default_space_has_valid_settings_around_those_it_starts_from(preset: str | None, tmp_path: Path):
    base = BASE if preset is None else choose_sizes(hf.TrainConfig.preset(preset), Task(on_gpu=False, fast_env=True))[0]
    space = default_space(base)
    assert len(space) >= 8
    for parameter in space:
        value = getattr(base, parameter.name)
        assert parameter.including(value) == parameter
        ends = parameter.choices or (parameter.low, parameter.high)
        for end in ends:
            dataclasses.replace(base, **{parameter.name: end})
        assert len(ends) > 1
    write_space(space, tmp_path / "space.json")
    assert read_space(tmp_path / "space.json", hf.PPOConfig) == space


@pytest.mark.parametrize("gamma", [0.6, 0.8, 0.9, 0.95, 0.97, 0.99, 0.995, 0.999, 0.9999, 0.99999])
def test_numbers_of_the_default_space_have_few_digits(gamma: float, tmp_path: Path):
    base = dataclasses.replace(BASE, gamma=gamma, gae_lambda=0.9, learning_rate=3e-4)
    space = default_space(base)
    write_space(space, tmp_path / "space.json")
    ends = [end for parameter in space if not parameter.choices for end in (parameter.low, parameter.high)]
    assert max(len(f"{end!r}".partition(".")[2]) for end in ends) <= 8, ends
    (found,) = (parameter for parameter in space if parameter.name == "gamma")
    assert found.low < gamma < found.high < 1


@pytest.mark.parametrize(
    "num_envs, minibatches, bptt", [(8, 8, None), (1, 1, None), (2, 8, 32), (3, 2, 64), (16, 4, 1)]
)
def test_sizes_of_the_default_space_go_together_in_every_combination(num_envs: int, minibatches: int, bptt: int | None):
    base = hf.TrainConfig(num_envs=num_envs, num_steps=128, epochs=4, minibatches=minibatches, bptt=bptt)
    choices = {parameter.name: parameter.choices for parameter in default_space(base)}
    for length in choices.get("num_steps", (base.num_steps,)):
        for count in choices.get("minibatches", (minibatches,)):
            dataclasses.replace(base, num_steps=length, minibatches=count)


def test_what_is_sampled_becomes_the_setting_and_back():
    gamma = Parameter("gamma", low=0.9, high=0.999, scale="log(1-x)")
    assert gamma.bounds() == pytest.approx((0.001, 0.1)) and gamma.label == "1 - gamma"
    assert gamma.setting(gamma.number(0.97)) == 0.97
    near = Parameter("gamma", low=0.9, high=0.99999, scale="log(1-x)")
    assert near.setting(0.000025) == 0.999975, "four digits of the distance to 1, not of the number"
    core = Parameter("core", choices=("lstm", "gru"))
    assert core.setting(core.number("gru")) == "gru"
    sizes = Parameter("head_sizes", choices=([], [64, 64]))
    assert sizes.setting(sizes.number([64, 64])) == [64, 64]
    layers = Parameter("num_layers", low=1, high=3, whole=True)
    assert layers.whole and layers.setting(2) == 2


@pytest.mark.parametrize("scale", ["log(1-x)", "linear", "log"])
def test_a_number_close_to_1_is_never_rounded_to_1(scale: Scale):
    gamma = Parameter("gamma", low=0.9, high=0.99999, scale=scale)
    assert gamma.setting(gamma.number(0.99995)) == 0.99995
    assert gamma.setting(gamma.number(0.99999)) == pytest.approx(0.99999, abs=1e-12)
    assert gamma.setting(gamma.number(0.9) * (1 + 1e-9)) == pytest.approx(0.9, abs=1e-6)
    for low, high in ((0.900004, 0.900005), (0.999996, 0.999997)):
        narrow = Parameter("gamma", low=low, high=high, scale=scale)
        assert low - 1e-12 <= narrow.setting(narrow.number((low + high) / 2)) <= high + 1e-12
        assert narrow.setting(narrow.number(low)) != narrow.setting(narrow.number(high))


def test_settings_have_digits_that_people_read():
    rate = Parameter("learning_rate", low=1e-4, high=1e-2, scale="log")
    assert rate.setting(0.00123456789) == 0.001235
    gamma = Parameter("gamma", low=0.9, high=0.999, scale="log(1-x)")
    assert gamma.setting(0.0123456789) == 0.98765


def test_a_value_outside_widens_the_space():
    assert Parameter("learning_rate", low=1e-3, high=1e-2, scale="log").including(5e-4).low == 5e-4
    assert Parameter("epochs", choices=(2, 4)).including(10).choices == (2, 4, 10)


@pytest.mark.parametrize(
    ("parameter", "start", "says"),
    [
        (
            Parameter("entropy_coef", low=1e-3, high=1e-2, scale="log"),
            0.0,
            "entropy_coef has a range with the scale log in",
        ),
        (
            Parameter("gamma", low=0.9, high=0.99, scale="log(1-x)"),
            1.0,
            "starts from 1, .* a number in the range \\(gamma\\)",
        ),
        (Parameter("memory_span", low=1, high=9), None, "memory_span has a range in .* starts from none, .* choices"),
        (Parameter("target_kl", low=0.01, high=0.1, scale="log"), None, "target_kl has a range in .*target_kl"),
    ],
)
def test_a_range_that_cannot_include_the_start_is_refused_by_name(parameter: Parameter, start: float | None, says: str):
    with pytest.raises(ValueError, match=says) as error:
        parameter.including(start)
    assert "\n" not in str(error.value)


def test_choices_include_none():
    assert Parameter("memory_span", choices=(8,)).including(None).choices == (8, None)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "names no settings"),
        ({"lr": {"choices": [1]}}, "lr is not a setting that can be varied"),
        ({"seed": {"choices": [1, 2]}}, "seed is not a setting that can be varied"),
        ({"gamma": {"low": 0.9}}, 'needs either "choices", or "low" and "high"'),
        ({"gamma": {"low": 0.9, "high": 0.8}}, "gamma: low must be below high, got low 0.9 and high 0.8"),
        ({"gamma": {"low": 0.9, "high": 0.9}}, "low must be below high, got low 0.9 and high 0.9"),
        ({"core": {"low": 1, "high": 2}}, 'core is not a number, so it has no "low" and "high"; give it "choices"'),
        ({"gamma": {"low": 0.9, "high": 1.0, "scale": "log(1-x)"}}, "needs high below 1"),
        ({"gamma": {"low": 0.9, "high": 1.5}}, "gamma=1.5 must be between 0 and 1"),
        ({"learning_rate": {"low": 0.0, "high": 1.0, "scale": "log"}}, "needs low above 0"),
        ({"learning_rate": {"low": "a", "high": 1.0}}, "expected a number"),
        ({"core": {"choices": ["lstmm"]}}, "core='lstmm' must be one of"),
        ({"epochs": {"choices": []}}, "has no choices"),
        ({"gamma": {"low": 0.9, "high": 0.99, "scale": "exp"}}, "expected one of linear, log, log"),
        ([], "is not a search space"),
    ],
)
def test_a_space_with_a_mistake_is_refused_in_one_line(data: object, message: str, tmp_path: Path):
    (tmp_path / "space.json").write_text(json.dumps(data))
    with pytest.raises(ValueError) as error:
        read_space(tmp_path / "space.json", hf.PPOConfig)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_file_that_is_nested_too_deeply_is_not_a_search_space(tmp_path):
    (tmp_path / "space.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"space\.json is not a search space"):
        read_space(tmp_path / "space.json", hf.PPOConfig)
