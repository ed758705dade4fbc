"""One reading of every vector environment: modes, nested observations, masks, previous actions, saving."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space

import holdfast as hf
from counting_env import MODES, CountingEnv, vector_env
from holdfast import envs
from holdfast.envs.workers import WorkersVectorEnv
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


@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
def test_the_mode_is_that_of_this_environment_and_not_of_the_one_made_last(kind: Any):
    """Before gymnasium 1.4, vector environments over one class share their metadata."""
    env = kind([CountingEnv] * 2, autoreset_mode=AutoresetMode.NEXT_STEP)
    env.metadata["autoreset_mode"] = AutoresetMode.SAME_STEP  # as another one over the same class does there
    try:
        assert VectorEnvAdapter(env).mode == AutoresetMode.NEXT_STEP
        assert VectorEnvAdapter(VectorWrapper(env)).mode == AutoresetMode.NEXT_STEP
    finally:
        env.close()


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


def test_discrete_observations_are_compared_with_their_space_before_they_leave_the_host():
    env = StackedEnv()
    env.single_observation_space, env.obs = spaces.Discrete(3, start=1), np.array([1, 3])  # type: ignore[assignment]
    feed = VectorEnvAdapter(env, "meta")  # any device but the host: a GPU would stop the process instead
    with pytest.raises(ValueError, match="got 0 to 0, observation_space allows 1 to 3"):
        feed.start()
    final = np.array([None, 7], dtype=object)
    with pytest.raises(ValueError, match="got 7 to 7, observation_space allows 1 to 3"):
        feed._final_obs(torch.tensor([1, 3]), {"final_obs": final}, torch.tensor([False, True]))


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
    truncated = torch.tensor([True, False])
    assert feed._final_obs({"a": torch.tensor([[1.0], [2.0]])}, parts.info, truncated)["a"].squeeze(1).tolist() == [
        5,
        2,
    ]


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


@pytest.mark.parametrize("mode", MODES)
def test_where_memory_crosses_episodes_so_do_previous_action_and_reward(mode):
    """In NEXT_STEP mode the step that plays the reset has shown them already, and its own action was never played."""
    feed = started(
        vector_env(mode, {"lengths": (2,)}, reward=3.0),
        inputs=("obs", "prev_action", "prev_reward"),
        crosses_episodes=True,
    )
    seen = []
    for _ in range(3):
        feed.step(torch.tensor([1]))
        seen.append((feed.resets.item(), feed.obs["prev_action"].item(), feed.obs["prev_reward"].item()))
    if mode == AutoresetMode.NEXT_STEP:
        assert seen == [(False, 1, 3), (False, 1, 3), (True, 0, 0)]
    else:
        assert seen == [(False, 1, 3), (True, 1, 3), (False, 1, 3)]


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


@pytest.fixture
def vectorized():
    """Makes vector environments, in this process or in others, and closes them."""
    made: list[Any] = []

    def vectorized(kind: type[Any], mode: AutoresetMode, *settings: dict[str, Any], **shared: Any) -> Any:
        makers = [partial(CountingEnv, **{**shared, **one}) for one in settings]
        made.append(kind(makers, autoreset_mode=mode))
        return made[-1]

    yield vectorized
    for env in made:
        env.close()


@pytest.mark.parametrize("source", ["info", "method"])
@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv, WorkersVectorEnv])
@pytest.mark.parametrize("mode", MODES)
def test_action_masks_belong_to_the_observation_they_came_with(
    vectorized: Any, kind: type[Any], mode: AutoresetMode, source: str
):
    feed = started(vectorized(kind, mode, *TWO, masks=source))
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


class Verbs(CountingEnv):
    """Two heads, MultiDiscrete([2, 3]). The first allows `t % 2`, the second everything but `t % 3`."""

    def __init__(self, layout: str) -> None:
        super().__init__(lengths=(5,), action_space=spaces.MultiDiscrete([2, 3]))
        self.layout = layout
        if layout == "method":
            self.action_masks = self._mask

    def _mask(self) -> Any:
        heads = np.arange(2) == self.t % 2, np.arange(3) != self.t % 3
        return heads if self.layout == "a tuple" else np.concatenate(heads)

    def _info(self) -> dict[str, Any]:
        return {} if self.layout == "method" else {"action_mask": self._mask()}

    def step(self, action: Any) -> Any:
        assert action[0] == self.t % 2 and action[1] != self.t % 3, "a forbidden action was taken"
        return super().step(action)


@pytest.mark.parametrize("layout", ["one array", "a tuple", "method"])
@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv, WorkersVectorEnv])
def test_masks_of_several_heads_stand_side_by_side(kind: type[Any], layout: str):
    env = kind([partial(Verbs, layout)] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    try:
        policy = hf.ActorCritic(env.single_observation_space, env.single_action_space, hidden_size=4)
        segment = next(iter(hf.collect(env, policy, steps=12)))
        assert segment.action_mask.shape == (12, 2, 5)
        assert segment.action_mask[1, 0].tolist() == [False, True, True, False, True]
        ev = policy.evaluate(
            segment.obs, segment.actions, segment.start_state, segment.resets, action_mask=segment.action_mask
        )
        assert torch.allclose(ev.log_prob, segment.log_prob, atol=1e-5)
    finally:
        env.close()


def test_masks_that_are_not_one_per_environment_are_refused():
    env = StackedEnv()
    env.action_masks = lambda: np.ones((1, 2), bool)
    with pytest.raises(ValueError, match=r"StackedEnv: the action masks have shape \(1, 2\), expected 2 rows"):
        started(env)


# --- shapes that are wrong --------------------------------------------------------------------------------------------


class WrongStep(StackedEnv):
    """`step` returns what `wrong` says, by position: 0 observations, 1 rewards, 2 terminated, 3 truncated."""

    def __init__(self, **wrong: Any) -> None:
        super().__init__()
        self.wrong = wrong

    def step(self, actions: Any) -> tuple[Any, ...]:
        results = list(super().step(actions))
        names = ["obs", "rewards", "terminated", "truncated"]
        return (*(self.wrong.get(name, result) for name, result in zip(names, results)), results[4])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"rewards": np.ones((2, 1))}, r"returned rewards of shape \(2, 1\), expected \(2,\): one per environment"),
        ({"rewards": 1.0}, r"returned rewards of shape \(\)"),
        ({"rewards": [1.0, None]}, "returned rewards of type list that are not numbers"),
        ({"terminated": np.zeros(3, bool)}, r"returned terminated of shape \(3,\)"),
        ({"truncated": np.zeros((1, 2), bool)}, r"returned truncated of shape \(1, 2\)"),
        ({"obs": np.zeros((1, 1), np.float32)}, r"returned observations of shape \(1, 1\), expected 2 rows"),
    ],
)
def test_a_wrong_shape_from_step_names_the_environment_and_the_shape_expected(wrong: dict[str, Any], said: str):
    feed = started(WrongStep(**wrong))
    with pytest.raises((ValueError, TypeError), match=f"WrongStep.step {said}") as error:
        feed.step(ACTION)
    assert "\n" not in str(error.value)


def rows_of(*rows: Any) -> Any:
    array = np.empty(len(rows), dtype=object)
    array[:] = rows
    return array


@pytest.mark.parametrize(
    ("final", "said"),
    [
        (np.zeros((1, 1), np.float32), r"final_obs'\] has shape \(1, 1\), the observations have \(2, 1\)"),
        (torch.zeros(2, 3), r"final_obs'\] has shape \(2, 3\), the observations have \(2, 1\)"),
        (rows_of([1.0]), r"final_obs'\] has 1 rows, expected 2"),
        (rows_of(None, [1.0]), r"environment 0 was truncated, but row 0 of info\['final_obs'\] is None"),
        (rows_of([1.0, 2.0], None), r"row 0 of info\['final_obs'\] has shape \(2,\), an observation has \(1,\)"),
    ],
)
def test_final_observations_that_do_not_cover_the_truncated_episodes_are_refused(final: Any, said: str):
    env = StackedEnv()
    env.info = {"final_obs": final}
    feed = started(env)
    feed.step(ACTION)
    with pytest.raises(ValueError, match=said):
        feed.step(ACTION)  # environment 0 is truncated


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


class Talks(gym.Env[Any, Any]):
    """Observations with text in them, next to numbers."""

    action_space = spaces.Discrete(2)
    observation_space = spaces.Dict(said=spaces.Tuple([spaces.Text(5)]), seen=spaces.Box(-1, 1, (2,), np.float32))

    def reset(self, **options: Any) -> Any:
        super().reset(seed=options.get("seed"))
        return {"said": ("abc",), "seen": np.zeros(2, np.float32)}, {}

    def step(self, action: Any) -> Any:
        return {"said": ("de",), "seen": np.ones(2, np.float32)}, 1.0, True, False, {}


class SeesNumbers(hf.RecurrentPolicy):
    """Looks at the numbers only."""

    def __init__(self) -> None:
        super().__init__(core=hf.GRU(2, 4))
        self.out = torch.nn.Linear(4, 3)

    def encode(self, obs: Any) -> torch.Tensor:
        return obs["seen"]

    def decode(self, features: torch.Tensor) -> Any:
        return hf.heads.Categorical(self.out(features)[:, :2]), self.out(features)[:, 2]


def test_observations_with_text_are_refused_with_a_wrapper_that_works():
    said = r"observations of Text cannot be stored as tensors: .*gymnasium\.wrappers\.FilterObservation"
    two = [Talks, Talks]
    policies = (
        SeesNumbers(),
        hf.ActorCritic(Talks.observation_space["seen"], Talks.action_space, "gru", hidden_size=4),
    )
    for policy in policies:
        with pytest.raises(ValueError, match=said):
            next(iter(hf.collect(SyncVectorEnv(two), policy, steps=3)))
    with pytest.raises(ValueError, match=said):
        hf.ActorCritic(Talks.observation_space, Talks.action_space)
    with pytest.raises(ValueError, match=said):
        hf.Trainer(hf.TrainConfig("", num_envs=2, actor_obs=("seen",), device="cpu"), env=Talks)
    filtered = SyncVectorEnv([lambda: gym.wrappers.FilterObservation(Talks(), ["seen"])] * 2)
    policy = hf.ActorCritic(filtered.single_observation_space, filtered.single_action_space, "gru", hidden_size=4)
    assert next(iter(hf.collect(filtered, policy, steps=3))).obs["seen"].shape == (3, 2, 2)
