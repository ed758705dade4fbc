"""Settings: what is refused and with which words, and that they survive being written down."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast import envs
from holdfast.config import PRESETS


@pytest.mark.parametrize(
    "settings, words",
    [
        (dict(num_envs=0), "num_envs must be at least 1, got 0"),
        (dict(epochs=0), "epochs must be at least 1"),
        (dict(final_eval_episodes=0), "final_eval_episodes must be at least 1"),
        (dict(bptt=24, num_steps=64), "bptt=24 must divide num_steps=64"),
        (dict(bptt=0), "bptt=0 must divide"),
        (
            dict(num_envs=2, minibatches=4),
            r"4 minibatches of whole sequences.*there are 2 \(num_envs=2 x 1 per segment",
        ),
        (dict(inputs=("prev_action",)), "'obs', and optionally 'prev_action' and 'prev_reward'"),
        (dict(inputs=("obs", "reward")), "'obs', and optionally"),
        (dict(core="rnn"), "core='rnn': one of 'lstm', 'gru', 'none'"),
        (dict(lr_schedule="step"), "lr_schedule='step': one of 'constant', 'linear', 'cosine'"),
        (dict(precision="fp16"), "precision='fp16': one of 'fp32', 'bf16'"),
        (dict(gamma=1.5), "gamma must lie between 0 and 1, got 1.5"),
        (dict(eval_every=-1), "eval_every must not be negative"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(settings: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        hf.TrainConfig(**settings)


def test_chunks_count_as_sequences_for_minibatches():
    assert hf.TrainConfig(num_envs=2, num_steps=8, bptt=4, minibatches=4).minibatches == 4


def test_settings_survive_being_written_as_json(tmp_path: Path):
    config = hf.TrainConfig(
        head_sizes=(8, 4), encoder_sizes=(), inputs=("obs", "prev_reward"), env_kwargs={"length": 5}
    )
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.to_dict()))
    back = hf.TrainConfig.load(path)
    assert back == config and isinstance(back.head_sizes, tuple)


def test_unknown_settings_are_named():
    with pytest.raises(ValueError, match=r"unknown settings \['learning_rat'\]"):
        hf.TrainConfig.from_dict({"learning_rat": 1.0})


def test_the_last_rollout_may_go_over_the_total():
    config = hf.TrainConfig(num_envs=4, num_steps=10, minibatches=1, total_steps=81)
    assert config.num_updates == 3


def test_a_runs_folder_says_environment_core_and_seed():
    assert hf.TrainConfig(seed=3).folder == Path("runs/RepeatPreviousEasy-v0/lstm-seed3")
    assert hf.TrainConfig(env="popgym:HigherLowerEasy", core="gru").folder == Path(
        "runs/popgym-HigherLowerEasy/gru-seed1"
    )
    assert hf.TrainConfig(name="mine").folder == Path("runs/RepeatPreviousEasy-v0/mine")
    assert hf.TrainConfig(run_dir="there", name="mine").folder == Path("there")


def test_every_setting_has_a_line_of_help():
    source = Path(hf.__file__).with_name("config.py").read_text()
    for field in dataclasses.fields(hf.TrainConfig):
        after = source.split(f"\n    {field.name}: ", 1)[1].split("\n", 2)[1].strip()
        assert after.startswith('"""') and after.endswith('"""') and len(after) < 120, field.name


@pytest.mark.parametrize("name", PRESETS)
def test_presets_name_environments_that_exist_and_take_overrides(name: str):
    config = hf.TrainConfig.preset(name, seed=7, core="gru")
    assert config.seed == 7 and config.core == "gru"
    if not config.env.startswith("popgym:"):
        env = envs.make(config.env, 1, env_kwargs=config.env_kwargs)
        assert env.num_envs == 1


def test_an_unknown_preset_names_the_known_ones():
    with pytest.raises(ValueError, match="unknown preset 'maze'; one of repeat-previous-easy, "):
        hf.TrainConfig.preset("maze")
