"""Settings: which values are refused and with which message, and that they survive JSON."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast import config, envs
from holdfast.config import PRESETS, settings_of

REFUSED = [
    (dict(num_envs=-1), "num_envs=-1 must be at least 0; 0 chooses for the task"),
    (dict(epochs=-1), "epochs=-1 must be at least 0; 0 chooses for the task"),
    (dict(final_eval_episodes=0), "final_eval_episodes=0 must be at least 1"),
    (dict(bptt=24, num_steps=64), "bptt=24 must divide num_steps=64"),
    (dict(bptt=0), "bptt=0 must be at least 1"),
    (dict(num_envs=2, minibatches=4), r"minibatches=4 needs .* a rollout has 2 \(num_envs=2 x 1 per segment\)"),
    (
        dict(inputs=("prev_action",)),
        r"inputs=\('prev_action',\) must be obs and optionally prev_action and prev_reward",
    ),
    (dict(inputs=("obs", "reward")), r"inputs=\('obs', 'reward'\) must be obs and optionally"),
    (dict(core="rnn"), r"core='rnn' must be one of .*lstm.*, none, or my_module:MyCore"),
    (dict(lr_schedule="step"), "lr_schedule='step' must be one of constant, linear, cosine"),
    (dict(precision="fp16"), "precision='fp16' must be one of fp32, bf16"),
    (dict(gamma=1.5), "gamma=1.5 must be between 0 and 1"),
    (dict(gae_lambda=float("nan")), "gae_lambda=nan must be between 0 and 1"),
    (dict(eval_every=-1), "eval_every=-1 must be at least 0; 0 turns it off"),
    (dict(max_env_failures=-1), "max_env_failures=-1 must be at least 0"),
    (dict(max_bad_updates=0), "max_bad_updates=0 must be at least 1"),
    (dict(env_timeout=0, vectorization="async"), "env_timeout=0 must be greater than 0 seconds"),
    (dict(env_timeout=5), "env_timeout=5 needs vectorization async"),
    (dict(algorithm="sarsa"), "algorithm='sarsa' must be one of ppo, pqn.*, or my_module:MyAlgorithm"),
    (dict(algorithm="pqn"), r"algorithm='pqn' has settings of its own; use hf\.PQNConfig"),
]


@pytest.mark.parametrize("settings, words", REFUSED)
def test_a_setting_that_cannot_work_is_refused_by_its_name(settings: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        hf.TrainConfig(**settings)


def test_messages_name_flags_on_the_command_line():
    with config.named_as_flags(), pytest.raises(ValueError, match=r"^--bptt 24 must divide --num-steps 64$"):
        hf.TrainConfig(bptt=24, num_steps=64)
    with pytest.raises(ValueError, match=r"^bptt=24 must divide num_steps=64$"):
        hf.TrainConfig(bptt=24, num_steps=64)


class Mine:
    pass


@pytest.mark.parametrize(
    "settings, words",
    [
        (dict(env=Mine), r'env is the class Mine, .* env="my_module:MyEnv"; .*hf\.Trainer\(config, env=\.\.\.\)'),
        (dict(env=Mine()), r'env is a Mine, expected a name: env="my_module:MyEnv"'),
        (dict(policy=Mine), r'policy is the class Mine, .* policy="my_module:MyPolicy"'),
        (dict(seed=None), "seed is None, but it needs a value"),
        (dict(core=Mine), r'core is the class .*Mine, which is no hf\.Core; .* core="lstm", or .* hf\.LSTM'),
        (dict(encoder_sizes=64), r"encoder_sizes=64 must be a tuple, such as \(64,\)"),
        (dict(inputs="obs"), r"inputs='obs' must be a tuple, such as \(\"obs\",\)"),
    ],
)
def test_a_value_of_another_kind_is_refused_when_the_config_is_made(settings: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        hf.TrainConfig(**settings)


KINDS = list(config.ALGORITHMS.values())
NUMBERS = [(kind, name) for kind in KINDS for name, declared in settings_of(kind).items() if declared.low is not None]


@pytest.mark.parametrize("kind", KINDS)
def test_every_number_has_a_range_or_a_reason_to_have_none(kind: type[hf.RunConfig]):
    types = {field.name: str(field.type) for field in dataclasses.fields(kind)}
    numbers = {name for name, text in types.items() if "int" in text or "float" in text}
    declared = settings_of(kind)
    assert numbers == {name for name, one in declared.items() if one.is_number}
    assert all((one.low is None) == bool(one.unbounded) for one in declared.values() if one.is_number)


@pytest.mark.parametrize("kind, name", NUMBERS)
def test_both_ends_of_a_range_are_accepted_and_what_lies_outside_is_not(kind: type[hf.RunConfig], name: str):
    declared = settings_of(kind)[name]
    low, high = declared.low, declared.high
    assert low is not None

    def make(value: Any) -> hf.RunConfig:
        value = (value,) if name.endswith("_sizes") else value
        several = {"minibatches": 1} if "minibatches" in settings_of(kind) else {}
        return kind(**{**several, "vectorization": "async", name: value})  # type: ignore[arg-type]

    make(1e-9 if declared.above else low)
    for outside in (low if declared.above else low - 1, *([high + 1] if high else [])):
        with pytest.raises(ValueError, match=rf"{name}={outside} must be "):
            make(outside)
    for no_number in (float("nan"), float("inf"), "1", True):
        with pytest.raises(ValueError, match=f"{name}=.* must be "):
            make(no_number)


def test_a_whole_number_may_be_written_as_a_float():
    total = hf.TrainConfig(total_steps=1e6).total_steps  # type: ignore[arg-type]
    assert total == 1_000_000 and isinstance(total, int)
    with pytest.raises(ValueError, match=r"num_envs=2\.5 must be an integer"):
        hf.TrainConfig(num_envs=2.5)  # type: ignore[arg-type]


def test_the_return_to_stop_at_may_be_negative_but_is_a_number():
    assert hf.TrainConfig(stop_at=-200).stop_at == -200
    with pytest.raises(ValueError, match="stop_at=nan must be a finite number"):
        hf.TrainConfig(stop_at=float("nan"))


def test_sequences_of_bptt_steps_count_for_minibatches():
    assert hf.TrainConfig(num_envs=2, num_steps=8, bptt=4, minibatches=4).minibatches == 4


def test_settings_survive_json(tmp_path: Path):
    settings = hf.TrainConfig(
        head_sizes=(8, 4), encoder_sizes=(), inputs=("obs", "prev_reward"), env_kwargs={"length": 5}
    )
    path = tmp_path / "config.json"
    path.write_text(json.dumps(settings.to_dict()))
    back = hf.TrainConfig.load(path)
    assert back == settings and isinstance(back.head_sizes, tuple)


def test_unknown_settings_are_named():
    with pytest.raises(ValueError, match=r"unknown settings \['learning_rat'\]; did you mean learning_rate\?"):
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


def test_the_name_of_a_run_says_what_differs_from_the_defaults():
    for changes, name in (
        (dict(core="gru", learning_rate=1e-3, seed=3), "gru-lr0.001-seed3"),
        (dict(hidden_size=64, normalize_obs=False), "lstm-h64-no-norm-obs-seed1"),
        (dict(entropy_schedule="linear", adam_eps=1e-8), "lstm-eps1e-08-ent-linear-seed1"),
        (dict(env="holdfast/TMaze-v0", env_kwargs={"length": 5, "name": "a b/c"}), "lstm-length5-namea_b_c-seed1"),
        (dict(head_sizes=(64, 32), encoder_sizes=(), clip_value=0.2), "lstm-encoder0-heads64x32-clip-value0.2-seed1"),
        (dict(actor_obs=("eye",), critic_obs=("eye", "map")), "lstm-actor-sees-eye-critic-sees-eye-map-seed1"),
        (dict(total_steps=5, stop_at=1.0, num_envs=7, checkpoint_every=3, device="cpu", quiet=True), "lstm-seed1"),
    ):
        assert hf.TrainConfig(**changes).automatic_name == name
    many = hf.TrainConfig(gamma=0.5, gae_lambda=0.5, learning_rate=1e-2, entropy_coef=0, value_coef=1, hidden_size=2)
    assert many.automatic_name == "lstm-h2-lr0.01-gamma0.5-lambda0.5-etc-seed1"


@pytest.mark.parametrize("preset", PRESETS)
def test_the_name_of_a_run_with_a_preset_is_plain_and_says_what_differs_from_the_preset(preset: str):
    config = hf.TrainConfig.preset(preset, seed=4)
    if config.mask_velocity:
        assert config.automatic_name == f"{config.core}-mask-velocity-seed4"
        return
    if config.env_kwargs:  # not the task that its environment's other preset is for
        assert config.automatic_name == f"{config.core}-length200-seed4"
        return
    assert config.automatic_name == config.plain_name == f"{config.core}-seed4"
    sizes = "-envs16" if "num_envs" in PRESETS[preset] else ""  # otherwise chosen for the task, in every run
    assert hf.TrainConfig.preset(preset, num_envs=16).automatic_name == f"{config.core}{sizes}-seed1"
    assert hf.TrainConfig.preset(preset, learning_rate=0.5, core="gru").automatic_name == "gru-lr0.5-seed1"


def test_every_setting_has_a_line_of_help():
    source = "".join(file.read_text() for file in Path(config.__file__).parent.glob("*.py"))
    tree = ast.parse(source)
    helped = {
        field.target.id: help.value.value
        for kind in ast.walk(tree)
        if isinstance(kind, ast.ClassDef)
        for field, help in itertools.pairwise(kind.body)
        if isinstance(field, ast.AnnAssign) and isinstance(help, ast.Expr) and isinstance(help.value, ast.Constant)
    }
    names = {name for kind in KINDS for name in settings_of(kind)}
    assert names <= helped.keys(), names - helped.keys()
    assert all(len(helped[name]) < 120 and helped[name].endswith(".") for name in names)


def test_a_config_is_read_as_the_class_of_its_algorithm_and_refused_by_another():
    saved = hf.PQNConfig(seed=3).to_dict()
    assert type(hf.RunConfig.from_dict(saved)) is hf.PQNConfig and hf.RunConfig.from_dict(saved).seed == 3
    with pytest.raises(ValueError, match=r"settings of pqn; read them with hf\.PQNConfig"):
        hf.PPOConfig.from_dict(saved)
    old = {name: value for name, value in hf.PPOConfig().to_dict().items() if name != "algorithm"}
    assert type(hf.RunConfig.from_dict(old)) is hf.PPOConfig is hf.TrainConfig


def test_an_algorithm_that_a_file_names_is_imported_only_if_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "evil_algorithm.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"algorithm": "evil_algorithm:Evil"}))
    with pytest.raises(config.imports.ImportNotAllowedError, match=r"config\.json: .*add --allow-imports"):
        hf.RunConfig.load(tmp_path / "config.json")


@pytest.mark.parametrize("name", PRESETS)
def test_presets_name_environments_that_exist_and_take_overrides(name: str):
    config = hf.TrainConfig.preset(name, seed=7, core="gru")
    assert config.seed == 7 and config.core == "gru"
    if "Lander" in config.env:
        pytest.importorskip("Box2D")
    assert envs.make(config.env, 1, env_kwargs=config.env_kwargs, mask_velocity=config.mask_velocity).num_envs == 1


def test_an_unknown_preset_names_the_nearest_one_or_all():
    with pytest.raises(ValueError, match=r"unknown preset 'maze'; did you mean t-maze\?$"):
        hf.TrainConfig.preset("maze")
    with pytest.raises(ValueError, match="unknown preset 'best'; one of repeat-previous-easy, "):
        hf.TrainConfig.preset("best")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "this is a list"),
        ("null", "this is a NoneType"),
        ("[" * 100_000, "not a JSON file"),
        ("{", "not a JSON file"),
        ('{"total_steps": 1%s}' % ("0" * 400), "total_steps=10.* must be less than 2\\*\\*63"),
        ('{"learning_rate": 1%s}' % ("0" * 400), "learning_rate=10.* must be less than 2\\*\\*63"),
        ('{"name": "a\\u0000b"}', "name 'a.x00b' is the name of a folder"),
        ('{"name": "\\ud800"}', "name '.ud800' is the name of a folder"),
    ],
)
def test_a_file_that_holds_no_settings_is_refused_in_one_line_that_names_it(text: str, said: str, tmp_path: Path):
    path = tmp_path / "preset.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"preset.json: .*{said}") as refused:
        hf.TrainConfig.load(path)
    assert "\n" not in str(refused.value)


def test_a_setting_that_comes_twice_in_a_file_is_refused(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"gamma": 0.9, "seed": 2, "gamma": 0.5}')
    with pytest.raises(ValueError, match=r"config\.json: gamma comes twice"):
        hf.TrainConfig.load(tmp_path / "config.json")


def test_a_file_of_very_many_settings_is_refused_at_once_and_in_one_line(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({f"setting_{i}": {str(i): 0} for i in range(200_000)}))
    began = time.process_time()
    with pytest.raises(ValueError, match="and 199995 more") as refused:
        hf.TrainConfig.load(tmp_path / "config.json")
    assert time.process_time() - began < 10  # comparing all pairs takes minutes
    assert len(str(refused.value)) < 500
