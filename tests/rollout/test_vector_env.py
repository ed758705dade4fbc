"""One reading of every vector environment: modes, nested observations, masks, previous actions, saving."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import batch_space

from counting_env import MODES, CountingEnv, vector_env
from holdfast import envs
from holdfast.rollout.vector_env import VectorEnvAdapter

ACTION = torch.zeros(2, dtype=torch.long)
TWO = ({"unit": 1.0, "lengths": (2,)}, {"unit": 10.0, "lengths": (3,), "ends": ("truncated",)})


def started(env: Any, **options: Any) -> VectorEnvAdapter:
    feed = VectorEnvAdapter(env, **options)
    feed.start(seed=0)
    return feed


class StackedEnv:
    """A vector environment written by hand: no base class, numpy arrays, one observation array that it overwrites."""

    num_envs = 2
    single_observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    single_action_space = spaces.Discrete(2)
    action_space = batch_space(single_action_space, 2)

    def __init__(self) -> None:
        self.metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.obs, self.t = np.zeros((2, 1), np.float32), 0
        self.info: dict[str, Any] = {}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.t, self.obs[:] = 0, 0
        return self.obs, {}

    def step(self, actions: Any) -> tuple[Any, ...]:
        self.t += 1
        self.obs += 1
        ended = np.array([self.t % 2 == 0, False])
        return self.obs, np.ones(2), np.zeros(2, bool), ended, self.info


# --- modes ----------------------------------------------------------------------------------------------------------


def test_an_environment_that_does_not_say_how_it_resets_is_refused_with_the_line_to_add():
    env = StackedEnv()
    env.metadata = {}
    with pytest.raises(
        ValueError, match=r'self\.metadata\["autoreset_mode"\] = gymnasium\.vector\.AutoresetMode\.SAME_STEP'
    ):
        VectorEnvAdapter(env)


@pytest.mark.parametrize("name", ["SameStep", "same_step", "SAME-STEP"])
def test_a_mode_may_be_declared_as_text(name: str):
    env = StackedEnv()
    env.metadata = {"autoreset_mode": name}
    assert VectorEnvAdapter(env).mode == AutoresetMode.SAME_STEP


def test_a_single_environment_is_refused_with_what_to_use():
    with pytest.raises(TypeError, match=r"no num_envs.*make_vec"):
        VectorEnvAdapter(CountingEnv())


def test_same_step_gives_the_next_episode_and_the_final_observation_apart():
    feed = started(vector_env(AutoresetMode.SAME_STEP, *TWO))
    assert feed.obs.squeeze(1).tolist() == [1, 10] and feed.resets.all()
    assert feed.step(ACTION).final_obs is None and feed.obs.squeeze(1).tolist() == [2, 20]
    out = feed.step(ACTION)  # env 0 terminates: nothing to bootstrap, so no final observations are asked for
    assert out.terminated.tolist() == [True, False] and out.final_obs is None
    assert feed.obs.squeeze(1).tolist() == [1, 30] and feed.resets.tolist() == [True, False]
    out = feed.step(ACTION)  # env 1 is truncated
    assert out.truncated.tolist() == [False, True] and out.final_obs[1].item() == 40
    assert feed.obs.squeeze(1).tolist() == [2, 10] and feed.resets.tolist() == [False, True]
    assert feed.valid.all()


def test_next_step_plays_the_final_observation_and_marks_the_dummy_step():
    feed = started(vector_env(AutoresetMode.NEXT_STEP, *TWO, reward=5.0))
    feed.step(ACTION)
    out = feed.step(ACTION)  # env 0 ends; what comes next is its final observation, not yet a new episode
    assert out.terminated.tolist() == [True, False]
    assert feed.obs.squeeze(1).tolist() == [3, 30] and feed.resets.tolist() == [False, False]
    assert feed.valid.tolist() == [False, True]
    out = feed.step(ACTION)  # env 0's dummy step; env 1 is truncated
    assert out.rewards.tolist() == [0, 5] and out.truncated.tolist() == [False, True] and out.final_obs is None
    assert feed.obs.squeeze(1).tolist() == [1, 40] and feed.resets.tolist() == [True, False]
    assert feed.valid.tolist() == [True, False]


def test_a_dummy_step_counts_for_nothing_even_if_the_environment_reports_a_reward_and_an_end():
    class Talkative(SyncVectorEnv):
        def step(self, actions: Any) -> Any:
            waiting = self._autoreset_envs.copy()
            obs, rewards, terminated, truncated, info = super().step(actions)
            return obs, rewards + 7.0 * waiting, terminated | waiting, truncated, info

    feed = started(Talkative([lambda: CountingEnv(lengths=(1,))] * 2, autoreset_mode=AutoresetMode.NEXT_STEP))
    assert feed.step(ACTION).terminated.all()
    out = feed.step(ACTION)
    assert out.rewards.tolist() == [0, 0] and not out.terminated.any() and feed.valid.all() and feed.resets.all()


def test_disabled_resets_the_finished_environments_and_keeps_the_others():
    feed = started(vector_env(AutoresetMode.DISABLED, *TWO))
    feed.step(ACTION), feed.step(ACTION)
    assert feed.obs.squeeze(1).tolist() == [1, 30] and feed.resets.tolist() == [True, False]
    out = feed.step(ACTION)
    assert out.final_obs[1].item() == 40
    assert feed.obs.squeeze(1).tolist() == [2, 10] and feed.resets.tolist() == [False, True]


def test_same_step_without_a_final_observation_says_what_is_missing():
    feed = started(StackedEnv())
    feed.step(ACTION)
    with pytest.raises(ValueError, match=r"StackedEnv declares SAME_STEP.*info\['final_obs'\]"):
        feed.step(ACTION)


# --- observations ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_nested_observations_and_their_final_ones(mode: AutoresetMode):
    feed = started(vector_env(mode, *TWO, form="dict"))
    assert feed.obs["count"].squeeze(1).tolist() == [1, 10] and feed.obs["inner"]["step"].tolist() == [0, 0]
    out = [feed.step(ACTION) for _ in range(3)][-1]
    assert out.truncated.tolist() == [False, True]
    final = feed.obs if mode == AutoresetMode.NEXT_STEP else out.final_obs
    assert final["count"][1].item() == 40 and final["inner"]["step"][1].item() == 3


def test_final_observations_may_be_a_dense_array_or_stacked_per_part():
    dense, parts = StackedEnv(), StackedEnv()
    dense.info = {"final_obs": np.array([[5.0], [6.0]])}
    feed = started(dense)
    feed.step(ACTION)
    assert feed.step(ACTION).final_obs.squeeze(1).tolist() == [5, 6]
    parts.info = {"final_obs": {"a": np.array([np.array([5.0]), None], dtype=object)}}
    feed = started(parts)
    assert feed._final_obs({"a": torch.tensor([[1.0], [2.0]])}, parts.info)["a"].squeeze(1).tolist() == [5, 2]


def test_what_was_read_stays_when_the_environment_overwrites_its_arrays():
    env = StackedEnv()
    env.info = {"final_obs": env.obs}
    feed = started(env)
    first = feed.obs
    feed.step(ACTION)
    second, final = feed.obs, feed.step(ACTION).final_obs
    feed.step(ACTION)
    assert [first[0].item(), second[0].item(), final[0].item()] == [0, 1, 2]


def test_previous_action_and_reward_are_inputs_that_a_reset_clears():
    env = vector_env(AutoresetMode.SAME_STEP, *TWO, reward=3.0)
    feed = started(env, inputs=("obs", "prev_action", "prev_reward"))
    assert feed.obs["prev_action"].tolist() == [0, 0] and feed.obs["prev_reward"].tolist() == [0, 0]
    feed.step(torch.tensor([1, 1]))
    assert feed.obs["prev_action"].tolist() == [1, 1] and feed.obs["prev_reward"].tolist() == [3, 3]
    feed.step(torch.tensor([1, 1]))  # env 0 ended
    assert feed.obs["prev_action"].tolist() == [0, 1] and feed.obs["prev_reward"].tolist() == [0, 3]
    out = feed.step(torch.tensor([0, 1]))  # env 1 is truncated: its final observation belongs to the episode that ended
    assert out.final_obs["prev_action"][1] == 1 and out.final_obs["prev_reward"][1] == 3
    assert feed.obs["prev_action"].tolist() == [0, 0] and feed.obs["prev_reward"].tolist() == [3, 0]
    assert set(feed.observation_space.spaces) == {"obs", "prev_action", "prev_reward"}


def test_previous_actions_are_cleared_to_the_first_action_where_they_do_not_start_at_zero():
    env = vector_env(AutoresetMode.SAME_STEP, *TWO, action_space=spaces.Discrete(3, start=4))
    feed = started(env, inputs=("obs", "prev_action"))
    assert feed.obs["prev_action"].tolist() == [4, 4]
    feed.step(torch.tensor([5, 6])), feed.step(torch.tensor([5, 6]))
    assert feed.obs["prev_action"].tolist() == [4, 6]
    assert all(feed.observation_space["prev_action"].contains(int(a)) for a in feed.obs["prev_action"])


def test_box_actions_are_clipped_for_the_environment_only():
    box = spaces.Box(np.array([-1.0, 0.0], np.float32), np.array([1.0, 0.5], np.float32))
    env = vector_env(AutoresetMode.SAME_STEP, {}, action_space=box)
    feed = started(env, inputs=("obs", "prev_action"))
    raw = torch.tensor([[3.0, -2.0]])
    feed.step(raw)
    assert env.envs[0].received[0].tolist() == [1.0, 0.0]
    assert raw.tolist() == [[3.0, -2.0]] and feed.obs["prev_action"].tolist() == [[3.0, -2.0]]


# --- masks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["info", "method"])
@pytest.mark.parametrize("mode", MODES)
def test_action_masks_belong_to_the_observation_they_came_with(mode: AutoresetMode, source: str):
    feed = started(vector_env(mode, *TWO, masks=source))
    for _ in range(12):
        played = feed.valid
        place = feed.obs.squeeze(1) / torch.tensor([1.0, 10.0]) - 1  # the step within the episode
        expected = torch.stack([place % 2 == 0, place % 2 == 1], 1)
        assert torch.equal(feed.action_mask[played], expected[played])
        assert feed.action_mask[~played].all(), "a dummy step is playable although its episode allows nothing more"
        feed.step(ACTION)


def test_a_vector_environment_may_have_the_mask_method_itself():
    env = StackedEnv()
    env.action_masks = lambda: [[True, False], [True, True]]  # type: ignore[attr-defined]
    assert started(env).action_mask.tolist() == [[True, False], [True, True]]


def test_copies_that_give_no_mask_are_free_to_do_anything():
    feed = started(vector_env(AutoresetMode.SAME_STEP, {"masks": "info"}, {"masks": None}))
    assert feed.action_mask.tolist() == [[True, False], [True, True]]


# --- saving ---------------------------------------------------------------------------------------------------------


def test_a_saved_feed_goes_on_with_the_same_numbers():
    first, second = (started(envs.make("holdfast/TMaze-v0", 3, env_kwargs={"length": 3})) for _ in range(2))
    actions = torch.Generator().manual_seed(3)

    def act() -> torch.Tensor:
        return torch.randint(3, (3,), generator=actions)

    for _ in range(5):
        first.step(act())
    assert second.load_state_dict(first.state_dict())
    for _ in range(20):
        action = act()
        assert torch.equal(first.obs, second.obs) and torch.equal(first.resets, second.resets)
        for a, b in zip(first.step(action)[:3], second.step(action)[:3]):
            assert torch.equal(a, b)


class SavingEnv(StackedEnv):
    """Its state holds arrays and numbers, as an environment's may."""

    received: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"obs": self.obs, "t": np.int64(self.t), "nested": [{"seen": np.array([True])}]}

    def load_state_dict(self, d: dict[str, Any]) -> None:
        assert isinstance(d["obs"], np.ndarray) and d["nested"][0]["seen"].dtype == bool
        self.obs, self.t = d["obs"], d["t"]

    def step(self, actions: Any) -> tuple[Any, ...]:
        self.received = actions
        return super().step(actions)


def test_a_numpy_environments_state_comes_back_as_arrays_and_it_is_still_given_arrays():
    env, other = SavingEnv(), SavingEnv()
    feed, restored = started(env), VectorEnvAdapter(other)
    feed.step(ACTION)
    saved = feed.state_dict()
    env.obs[:] = 99.0  # a saved state is a copy
    assert restored.load_state_dict(saved)
    assert other.obs.tolist() == [[1.0], [1.0]] and other.t == 1
    other.info = {"final_obs": other.obs}
    restored.step(ACTION)
    assert isinstance(other.received, np.ndarray)


def test_an_environment_that_cannot_restore_says_so():
    feed = started(vector_env(AutoresetMode.SAME_STEP, *TWO))
    assert feed.state_dict()["env"] is None
    assert VectorEnvAdapter(vector_env(AutoresetMode.SAME_STEP, *TWO)).load_state_dict(feed.state_dict()) is False
