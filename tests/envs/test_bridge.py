"""`holdfast.envs.make`: ids of all three kinds, seeds, autoreset, errors; and what importing the package does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode

import holdfast.envs
from holdfast.envs import UnknownEnvError, make


def popgym_names():
    popgym_envs = pytest.importorskip("popgym.envs")
    return [entry["id"].removeprefix("popgym-").removesuffix("-v0") for entry in popgym_envs.ALL_EASY.values()]


def play(env, steps):
    """Random actions; what came back, and whether an episode ended."""
    out, ended = [], False
    for _ in range(steps):
        *results, _ = env.step(env.action_space.sample())
        out += results
        ended |= bool((results[2] | results[3]).any())
    return out, ended


def test_ours_are_made_on_the_device_asked_for():
    env = make("holdfast/RepeatPreviousEasy-v0", 4, device="cpu")
    assert isinstance(env, holdfast.envs.RepeatPrevious)
    assert env.reset()[0].device == torch.device("cpu")
    assert make("holdfast/TMaze-v0", 2, env_kwargs={"length": 7}).settings == {"length": 7}


@pytest.mark.parametrize("vectorization", ["sync", "async", "workers"])
@pytest.mark.parametrize("env_id", ["CartPole-v1", "popgym:RepeatPreviousEasy"])
def test_gymnasium_and_popgym_environments_reset_in_the_same_step(env_id, vectorization):
    if env_id.startswith("popgym"):
        pytest.importorskip("popgym")
    env = make(env_id, 2, seed=1, vectorization=vectorization)
    try:
        assert env.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
        env.reset()
        for _ in range(60):
            _, _, terminated, truncated, info = env.step(env.action_space.sample())
            done = terminated | truncated
            assert np.array_equal(info.get("_final_obs", np.zeros(2, dtype=bool)), done)
            if done.any():
                break
        assert done.any()
    finally:
        env.close()


def test_every_popgym_environment_plays_and_repeats_with_its_seed():
    for name in popgym_names():
        runs = []
        for _ in range(2):
            env = make(f"popgym:{name}", 2, seed=3)
            obs, _ = env.reset()
            assert isinstance(obs, np.ndarray), name
            out, ended = play(env, 1100 if "Labyrinth" in name else 210)
            assert ended, name
            assert out[-4] in env.observation_space, name
            runs.append([obs, *out])
        assert all(np.array_equal(a, b) for a, b in zip(*runs)), name


def test_a_tuple_of_small_integers_comes_as_one_array():
    env = make("Blackjack-v1", 3, seed=0)
    assert env.single_observation_space == gym.spaces.MultiDiscrete([32, 11, 2])
    obs, _ = env.reset()
    assert obs.shape == (3, 3) and obs in env.observation_space


def test_popgym_names_are_taken_in_gymnasiums_form_too():
    pytest.importorskip("popgym")
    for env_id in ("popgym:repeatfirsteasy", "popgym:popgym-RepeatFirstEasy-v0", "popgym-RepeatFirstEasy-v0"):
        assert make(env_id, 1).spec.id == "popgym-RepeatFirstEasy-v0"


@pytest.mark.parametrize(
    ("wrong", "suggested"),
    [
        ("RepeatPreviousEasy", "did you mean holdfast/RepeatPreviousEasy-v0"),
        ("holdfast/TMaz-v0", "did you mean holdfast/TMaze-v0"),
        ("CartPole-v7", "did you mean CartPole-v1"),
        ("Cartpole", "did you mean CartPole-v1"),
        ("qqqqqqqq", "`holdfast envs` lists ours, holdfast/RepeatPreviousEasy-v0"),
        ("MyOwnThing", "a class of your own is named my_module:MyEnv, after its file"),
        ("no_such_module:Foo-v0", "there is no module no_such_module, neither in"),
    ],
)
def test_an_unknown_id_is_refused_with_the_nearest(wrong, suggested):
    with pytest.raises(UnknownEnvError) as error:
        make(wrong, 2)
    assert wrong in str(error.value) and suggested in str(error.value)


def test_an_unknown_popgym_name_is_refused_with_the_nearest():
    pytest.importorskip("popgym")
    with pytest.raises(UnknownEnvError, match="did you mean popgym:HigherLowerEasy"):
        make("popgym:HigherLowerEsy", 2)


def test_an_unknown_vectorization_is_refused():
    with pytest.raises(ValueError, match='\'threads\'; expected "sync", "async" or "workers"'):
        make("CartPole-v1", 2, vectorization="threads")


def test_a_seed_makes_reset_and_sampled_actions_repeatable():
    for env_id in ("holdfast/RepeatFirstEasy-v0", "CartPole-v1"):
        runs = []
        for seed in (1, 1, 2):
            env = make(env_id, 3, seed=seed)
            runs.append(np.concatenate([np.ravel(env.reset()[0]), np.ravel(env.action_space.sample())]))
        assert np.array_equal(runs[0], runs[1]) and not np.array_equal(runs[0], runs[2]), env_id


def test_importing_the_package_registers_without_loading_torch_environments():
    code = (
        "import sys, holdfast.envs, gymnasium\n"
        "assert 'holdfast/TMaze-v0' in gymnasium.registry\n"
        "assert 'holdfast.envs.base' not in sys.modules\n"
        "assert 'popgym' not in sys.modules\n"
        "print(gymnasium.make_vec('holdfast/TMaze-v0', num_envs=3, length=5).num_envs)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "3"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("MiniGrid-MemoryS7-v0", "minigrid"),
        ("BabyAI-GoToObj-v0", "minigrid"),
        ("ALE/Pong-v5", "ale-py"),
    ],
)
def test_an_environment_of_a_known_package_says_what_to_install(
    name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, said.replace("-", "_"), None)  # as if it were not installed
    with pytest.raises(UnknownEnvError, match=f"is in another package: pip install {said} "):
        make(name, 2)


def test_an_environment_of_an_installed_package_needs_no_prefix_and_nothing_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    registers = (
        "import gymnasium\ngymnasium.register('MiniGrid-Mine-v0', 'gymnasium.envs.classic_control:CartPoleEnv')\n"
    )
    installed, here = tmp_path / "installed", tmp_path / "here"
    for folder, text in ((installed, registers), (here, "raise SystemExit('a file of any name was run')")):
        folder.mkdir()
        (folder / "minigrid.py").write_text(text)
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", ["", str(installed), *sys.path])
    monkeypatch.delitem(sys.modules, "minigrid", raising=False)
    monkeypatch.setattr(gym.envs.registration, "registry", dict(gym.registry))
    monkeypatch.setattr(gym, "registry", gym.envs.registration.registry)
    assert make("MiniGrid-Mine-v0", 2).num_envs == 2
    with pytest.raises(
        UnknownEnvError, match="minigrid has no environment 'MiniGrid-Min-v0'; did you mean MiniGrid-Mine-v0"
    ):
        make("MiniGrid-Min-v0", 2)
    monkeypatch.delitem(sys.modules, "minigrid", raising=False)
