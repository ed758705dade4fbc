"""What the base class of environments in torch does. What each task must do is checked in `test_contract.py`."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode

import holdfast.envs
from holdfast.state import leaves, tree_map
from random_actions import random_actions

ALL_IDS = [row.id for row in holdfast.envs.list_envs()]
ONE_OF_EACH = [
    "holdfast/RepeatPreviousEasy-v0",
    "holdfast/RepeatFirstEasy-v0",
    "holdfast/PositionOnlyCartPoleEasy-v0",
    "holdfast/TMaze-v0",
    "holdfast/NoisyPositionOnlyCartPoleEasy-v0",
    "holdfast/VelocityOnlyCartPoleEasy-v0",
    "holdfast/MultiarmedBanditEasy-v0",
    "holdfast/HigherLowerEasy-v0",
    "holdfast/PositionOnlyPendulumHard-v0",
    "holdfast/NoisyPositionOnlyPendulumEasy-v0",
    "holdfast/AutoencodeEasy-v0",
    "holdfast/CountRecallEasy-v0",
    "holdfast/ConcentrationEasy-v0",
    "holdfast/BattleshipEasy-v0",
    "holdfast/MineSweeperEasy-v0",
    "holdfast/LabyrinthEscapeEasy-v0",
    "holdfast/LabyrinthExploreEasy-v0",
]


def make(env_id, num_envs=6, **kwargs):
    if env_id == "holdfast/TMaze-v0":
        kwargs.setdefault("env_kwargs", {"length": 3})  # short, so that random actions reach ends of both kinds
    if "Labyrinth" in env_id:
        kwargs.setdefault("env_kwargs", {"maze_size": 6, "episode_length": 100, "num_mazes": 50})
    return holdfast.envs.make(env_id, num_envs, **kwargs)


def play(env, actions):
    """Everything that the given actions [T, B] return, as one list of tensors."""
    out = []
    for row in actions:
        *results, info = env.step(row)
        out += leaves([*results, info["final_obs"], info["_final_obs"]])
    return out


def first_row(obs):
    return tree_map(lambda o: o[0].item() if o.dim() == 1 else o[0].numpy(), obs)


def assert_equal(left, right):
    assert len(left) == len(right)
    for a, b in zip(left, right):
        assert torch.equal(a, b)


@pytest.mark.parametrize("env_id", ALL_IDS)
def test_gymnasium_makes_it_and_its_spaces_hold_what_it_returns(env_id):
    env = gym.make_vec(f"holdfast.envs:{env_id}", num_envs=5)
    assert env.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    assert env.spec.id == env_id
    obs, info = env.reset(seed=0)
    assert info == {}
    env.action_space.seed(0)
    obs, *_, info = env.step(env.action_space.sample())
    assert first_row(obs) in env.single_observation_space
    assert first_row(info["final_obs"]) in env.single_observation_space


def test_a_reset_without_a_seed_goes_on_with_the_same_generator():
    env = make("holdfast/RepeatFirstEasy-v0")
    actions = random_actions(env, 60)
    runs = []
    for _ in range(2):
        env.reset(seed=1)
        runs.append(play(env, actions))
        runs.append([*leaves(env.reset()[0]), *play(env, actions)])
    assert_equal(runs[0], runs[2])
    assert_equal(runs[1], runs[3])
    assert any(not torch.equal(a, b) for a, b in zip(runs[0], runs[1][1:]))


@pytest.mark.parametrize("env_id", ONE_OF_EACH)
def test_a_saved_state_is_a_copy(env_id):
    env = make(env_id, seed=3)
    saved, overwritten = env.state_dict(), env.state_dict()
    for leaf in overwritten["state"].values():
        leaf.zero_()
    actions = random_actions(env, 20)
    first = play(env, actions)
    env.load_state_dict(saved)
    for leaf in saved["state"].values():
        leaf.zero_()
    assert_equal(play(env, actions), first)
    untouched = make(env_id, seed=3)
    assert_equal(play(untouched, actions), first)


def test_a_state_of_another_environment_is_refused_with_the_difference():
    env = make("holdfast/RepeatPreviousEasy-v0", seed=0)
    with pytest.raises(ValueError, match="num_envs = 4, this one 6"):
        env.load_state_dict(make("holdfast/RepeatPreviousEasy-v0", 4, seed=0).state_dict())
    with pytest.raises(ValueError, match=r"settings = \{'num_decks': 2, 'k': 32\}"):
        env.load_state_dict(make("holdfast/RepeatPreviousMedium-v0", seed=0).state_dict())
    with pytest.raises(ValueError, match="env = 'TMaze'"):
        env.load_state_dict(make("holdfast/TMaze-v0", seed=0).state_dict())
    with pytest.raises(ValueError, match=r"\['generator', 'state'\] missing"):
        env.load_state_dict({k: v for k, v in env.state_dict().items() if k not in ("generator", "state")})
    damaged = env.state_dict()
    damaged["state"]["deck"] = damaged["state"]["deck"][:3]
    with pytest.raises(ValueError, match=r"saved 'deck' is torch.int64 \(3, 4\), expected torch.int64 \(6, 4\)"):
        env.load_state_dict(damaged)


@pytest.mark.parametrize("env_id", ONE_OF_EACH)
def test_numpy_actions_have_the_same_effect_as_tensors(env_id):
    one, two = make(env_id, seed=0), make(env_id, seed=0)
    actions = random_actions(one, 10)
    other = np.float64 if actions.is_floating_point() else np.int32
    assert_equal(play(one, actions), play(two, actions.numpy().astype(other)))


def test_wrong_actions_are_refused_with_what_was_expected():
    env = make("holdfast/TMaze-v0", seed=0)
    with pytest.raises(ValueError, match=r"shape \(6, 1\), expected \(6,\)"):
        env.step(torch.zeros(6, 1, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"torch.float32, expected integers from 0 to 2"):
        env.step(torch.zeros(6))
    with pytest.raises(ValueError, match="actions range from 0 to 3, expected 0 to 2"):
        env.step(np.array([0, 1, 2, 3, 0, 0]))


def test_wrong_actions_of_several_numbers_or_floats_are_refused_too():
    env = make("holdfast/BattleshipEasy-v0", seed=0)
    with pytest.raises(ValueError, match=r"shape \(6,\), expected \(6, 2\)"):
        env.step(torch.zeros(6, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"actions range from 0 to 8, expected 0 to \[7 7\]"):
        env.step(np.array([[0, 8]] * 6))
    env = make("holdfast/PositionOnlyPendulumEasy-v0", seed=0)
    with pytest.raises(ValueError, match=r"shape \(6,\), expected \(6, 1\)"):
        env.step(torch.zeros(6))
    with pytest.raises(TypeError, match=r"torch.int64, expected floats"):
        env.step(torch.zeros(6, 1, dtype=torch.int64))


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("NoisyPositionOnlyCartPole", {"noise_sigma": -0.1}, "noise_sigma is -0.1; expected at least 0"),
        ("NoisyPositionOnlyPendulum", {"noise_sigma": -0.1}, "noise_sigma is -0.1; expected at least 0"),
        ("PositionOnlyPendulum", {"max_episode_length": 0}, "max_episode_length is 0"),
        ("MultiarmedBandit", {"num_bandits": 0}, "num_bandits is 0 and episode_length is 200"),
        ("HigherLower", {"num_decks": 0}, "num_decks is 0; expected at least 1"),
        ("Autoencode", {"num_decks": 0}, "num_decks is 0; expected at least 1"),
        (
            "CountRecall",
            {"deck_type": "jokers"},
            "deck_type is 'jokers'; expected at least one deck and one of colors, suits",
        ),
        (
            "Concentration",
            {"deck_type": "suits"},
            "deck_type is 'suits'; expected at least one deck and colors or ranks",
        ),
        ("Battleship", {"board_size": 3}, r"ships of \[2, 3, 3, 4\] cells may not fit on a board of 3 x 3"),
        ("Battleship", {"board_size": 13}, "board_size is 13 .* 1 to 12 cells a side"),
        ("LabyrinthEscape", {"maze_size": 9}, "maze_size is 9, .* expected an even size of at least 6"),
        ("MineSweeper", {"board_size": 9}, "board_size is 9 and num_mines is 2; expected boards of 2 to 8"),
    ],
)
def test_settings_that_make_no_game_are_refused(name, kwargs, message):
    with pytest.raises(ValueError, match=message):
        getattr(holdfast.envs, name)(2, **kwargs)


def test_misuse_is_refused_with_what_to_do():
    with pytest.raises(gym.error.ResetNeeded, match=r"call reset\(\) before step"):
        holdfast.envs.RepeatFirst(2).step(torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="num_envs is 0"):
        holdfast.envs.RepeatFirst(0)
    with pytest.raises(TypeError, match="expected one integer"):
        holdfast.envs.RepeatFirst(2).reset(seed=[1, 2])
    with pytest.raises(ValueError, match=r"no reset options, got \['low'\]"):
        holdfast.envs.RepeatFirst(2).reset(options={"low": 0})
    with pytest.raises(ValueError, match="num_decks is 1 and k is 52"):
        holdfast.envs.RepeatPrevious(2, k=52)


# --- no waiting for the device -------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("env_id", ONE_OF_EACH)
def test_a_gpu_step_never_waits_and_can_be_captured(env_id):
    env = make(env_id, 4096, device="cuda", seed=0)
    actions = random_actions(env, 60).cuda()
    play(env, actions[:3])
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = play(env, actions)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(tensor.is_cuda for tensor in out)

    # Capture one transition and replay it: the same as calling it.
    state = {name: leaf.clone() for name, leaf in env.state.items()}
    static_actions, static_draws = actions[0].clone(), env.draw()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = env.transition(state, static_actions, static_draws)
    for row in actions[:20]:
        draws = env.draw()
        expected = env.transition({k: v.clone() for k, v in state.items()}, row, draws)
        static_actions.copy_(row)
        static_draws.copy_(draws)
        graph.replay()
        assert_equal(leaves(list(captured[1:])), leaves(list(expected[1:])))
        for name, leaf in state.items():
            leaf.copy_(captured.state[name])
