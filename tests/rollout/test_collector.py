"""Segments: advantages worked out by hand in every autoreset mode, bootstraps, states, statistics.

The policy's value is the sum of the episode's observations (see counting_env), so all numbers can be checked by eye.
"""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from itertools import islice
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import holdfast as hf
import holdfast.rollout.collector
from counting_env import MODES, CountingEnv, SumPolicy, vector_env
from holdfast import envs
from holdfast.state import leaves, tree_map

# env 0 counts 1, 2, 3.. and terminates after 2 steps, reward 1; env 1 counts 10, 20.. and is truncated after 3
TERMINATES = {"unit": 1.0, "reward": 1.0, "lengths": (2,), "ends": ("terminated",)}
TRUNCATES = {"unit": 10.0, "reward": 2.0, "lengths": (3,), "ends": ("truncated",)}


def rollout(mode: AutoresetMode, steps: int, *settings: dict[str, Any], **options: Any) -> hf.Segment:
    env = vector_env(mode, *(settings or (TERMINATES, TRUNCATES)))
    return next(hf.collect(env, SumPolicy(), steps, gamma=0.5, gae_lambda=0.5, **options))


def numbers(x: torch.Tensor) -> list[list[float]]:
    """One list per environment."""
    return x.T.tolist()


# --- advantages ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_advantages_by_hand_where_episodes_follow_one_another(mode: AutoresetMode):
    segment = rollout(mode, 4)
    assert numbers(segment.obs.squeeze(-1)) == [[1, 2, 1, 2], [10, 20, 30, 10]]
    assert numbers(segment.resets) == [[True, False, True, False], [True, False, False, True]]
    assert numbers(segment.value) == [[1, 3, 1, 3], [10, 30, 60, 10]]
    # env 0: deltas 1 + 0.5*3 - 1 = 1.5 and, at the end, 1 - 3 = -2; the first also gets 0.25 * -2
    # env 1: 2 + 0.5*30 - 10 = 7,  2 + 0.5*60 - 30 = 2 (+ 0.25 * -8),  truncated: V(40) = 10+20+30+40 = 100,
    #        2 + 0.5*100 - 60 = -8,  and in the new episode 2 + 0.5*30 - 10 = 7, where 30 = V(20) after the segment
    assert numbers(segment.advantage) == [[1, -2, 1, -2], [7, 0, -8, 7]]
    assert torch.equal(segment.returns, segment.advantage + segment.value)
    assert segment.valid.all()
    assert segment.episode_returns == [2.0, 6.0, 2.0] and segment.episode_lengths == [2, 3, 2]


def test_advantages_by_hand_with_dummy_steps_between_episodes():
    segment = rollout(AutoresetMode.NEXT_STEP, 6)
    assert numbers(segment.obs.squeeze(-1)) == [[1, 2, 3, 1, 2, 3], [10, 20, 30, 40, 10, 20]]
    assert numbers(segment.valid) == [[1, 1, 0, 1, 1, 0], [1, 1, 1, 0, 1, 1]]
    assert numbers(segment.resets) == [[1, 0, 0, 1, 0, 0], [1, 0, 0, 0, 1, 0]]
    # The dummy step's value is V(final observation) with the state before the reset: 1+2+3 = 6 and 10+20+30+40 = 100.
    assert numbers(segment.value) == [[1, 3, 6, 1, 3, 6], [10, 30, 60, 100, 10, 30]]
    # Last column: V(30) = 60 follows the segment, 2 + 0.5*60 - 30 = 2, and 7 + 0.25*2 before it.
    assert numbers(segment.advantage) == [[1, -2, 0, 1, -2, 0], [7, 0, -8, 0, 7.5, 2]]
    assert segment.episode_returns == [2.0, 6.0, 2.0] and segment.episode_lengths == [2, 3, 2]


def test_a_truncation_at_the_last_step_of_a_segment_is_bootstrapped_in_every_mode():
    for mode in MODES:
        segment = rollout(mode, 3)
        assert segment.advantage[2, 1] == 2 + 0.5 * 100 - 60, mode


def test_an_episode_both_terminated_and_truncated_is_not_bootstrapped():
    for mode in MODES:
        segment = rollout(mode, 3, {**TRUNCATES, "ends": ("both",)})
        assert segment.advantage[2, 0] == 2 - 60, mode


def test_only_the_truncated_environments_are_bootstrapped_each_with_its_own_state():
    # 1, 3 and 4 are truncated after 2 steps, 0 and 2 go on; what follows is 1 + 2 + 3 units in all of them.
    units = (1.0, 10.0, 100.0, 1000.0, 10000.0)
    lengths = (4, 2, 4, 2, 2)
    settings = [{"unit": u, "reward": 0.0, "lengths": (n,), "ends": ("truncated",)} for u, n in zip(units, lengths)]
    for mode in (AutoresetMode.SAME_STEP, AutoresetMode.DISABLED):
        segment = rollout(mode, 2, *settings)
        next_value = 2 * (segment.advantage[1] + segment.value[1])
        assert next_value.tolist() == [6 * u for u in units]


def test_the_scale_of_rewards_changes_advantages_and_leaves_the_rewards_alone():
    env = vector_env(AutoresetMode.SAME_STEP, TERMINATES, TRUNCATES)
    collector = hf.Collector(env, SumPolicy(), 4, gamma=0.5, gae_lambda=0.5)
    collector.reward_scale = 3.0
    segment = collector.rollout()
    assert segment.advantage[1, 0] == 3 * 1 - 3 and segment.rewards[1, 0] == 1
    assert segment.episode_returns == [2.0, 6.0, 2.0]


# --- the bootstrap leaves memory alone -------------------------------------------------------------------------------


class Watching(SumPolicy):
    """Keeps what every look at a value was given and what memory held before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.looks: list[dict[str, Any]] = []

    def peek_value(self, obs: Any, env_ids: Any = None, **options: Any) -> Any:
        before = self.memory.state_dict()
        value = super().peek_value(obs, env_ids, **options)
        self.looks.append({"ids": env_ids, "before": before, "after": self.memory.state_dict(), "value": value})
        return value


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_a_bootstrap_sees_the_state_before_the_reset_of_the_truncated_only_and_changes_nothing(mode: AutoresetMode):
    policy = Watching()
    settings = [{"unit": u, "lengths": (n,), "ends": ("truncated",)} for u, n in ((1.0, 2), (10.0, 3), (100.0, 2))]
    next(hf.collect(vector_env(mode, *settings), policy, 2))
    final, last = policy.looks
    assert final["ids"].tolist() == [0, 2], "the truncated environments, in order"
    assert final["value"].tolist() == [6, 600]
    assert last["ids"] is None and last["value"].tolist() == [1, 60, 100]  # the next step's own values, after resets
    for look in policy.looks:
        assert torch.equal(look["before"]["leaves"][0], look["after"]["leaves"][0])
        assert torch.equal(look["before"]["fresh"], look["after"]["fresh"])


def test_with_a_real_core_the_bootstrap_is_the_value_of_one_more_step_of_the_same_episode():
    torch.manual_seed(0)
    env = vector_env(AutoresetMode.SAME_STEP, {"unit": 0.1, "lengths": (3,), "ends": ("truncated",)})
    policy = hf.ActorCritic(env.single_observation_space, env.single_action_space, "lstm", 8)
    segment = next(hf.collect(env, policy, 3, gamma=0.5, gae_lambda=0.0))
    bootstrap = 2 * (segment.advantage[2] + segment.value[2] - segment.rewards[2])
    whole = torch.tensor([[0.1], [0.2], [0.3], [0.4]]).unsqueeze(1)  # [4, 1, 1]
    resets = torch.tensor([[True], [False], [False], [False]])
    value = policy.evaluate(whole, torch.zeros(4, 1, dtype=torch.long), policy.initial_state(1), resets).value
    torch.testing.assert_close(bootstrap, value[3], rtol=0, atol=1e-6)


# --- what the policy was given ---------------------------------------------------------------------------------------


class RandomEpisodes(gym.Env[Any, Any]):
    """Random observations; ends at random, terminated or truncated."""

    observation_space = spaces.Box(-1, 1, (3,), np.float32)
    action_space = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self._obs(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        end, kind = self.np_random.random(2)
        return self._obs(), float(self.np_random.normal()), end < 0.2 and kind < 0.5, end < 0.2 and kind >= 0.5, {}

    def _obs(self) -> Any:
        return self.np_random.uniform(-1, 1, 3).astype(np.float32)


def random_env(mode: AutoresetMode, num_envs: int = 5) -> SyncVectorEnv:
    return SyncVectorEnv([RandomEpisodes] * num_envs, autoreset_mode=mode)


@pytest.mark.parametrize("core", ["lstm", "gru"])
@pytest.mark.parametrize("mode", MODES)
def test_segments_replay_what_the_rollout_gave_over_several_segments(mode: AutoresetMode, core: str):
    torch.manual_seed(1)
    env = random_env(mode)
    policy = hf.ActorCritic(env.single_observation_space, env.single_action_space, core, 8)
    torch.nn.init.normal_(policy.actor.weight)
    ends = 0
    for segment in islice(hf.collect(env, policy, 7, seed=3), 4):
        new = policy.evaluate(segment.obs, segment.actions, segment.start_state, segment.resets)
        torch.testing.assert_close(new.log_prob, segment.log_prob, rtol=0, atol=1e-5)
        torch.testing.assert_close(new.value, segment.value, rtol=0, atol=1e-5)
        ends += int(segment.terminated.sum()) + int(segment.truncated.sum())
    assert ends > 10


def test_the_start_states_of_chunks_are_the_states_the_rollout_had_there():
    torch.manual_seed(2)
    env = random_env(AutoresetMode.SAME_STEP)
    policy = hf.ActorCritic(env.single_observation_space, env.single_action_space, "lstm", 8)
    whole = next(hf.collect(env, policy, 12, bptt=4, seed=1))
    assert len(whole.chunk_states) == 3
    state = whole.start_state
    for k, stored in enumerate(whole.chunk_states):
        for mine, theirs in zip(leaves(state), leaves(stored)):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
        span = slice(4 * k, 4 * k + 4)
        state = policy.evaluate(
            whole.obs[span], whole.actions[span], state, whole.resets[span], return_state=True
        ).state
    cut = whole.as_sequences(4)
    assert cut.resets.shape == (4, 15)
    new = policy.evaluate(cut.obs, cut.actions, cut.start_state, cut.resets)
    torch.testing.assert_close(new.log_prob, cut.log_prob, rtol=0, atol=1e-5)


def test_columns_lay_chunks_side_by_side_and_select_takes_some_of_them():
    segment = rollout(AutoresetMode.SAME_STEP, 6, bptt=2)
    cut = segment.as_sequences(2)  # (chunk, env): (0,0) (0,1) (1,0) (1,1) (2,0) (2,1)
    assert numbers(cut.obs.squeeze(-1)) == [[1, 2], [10, 20], [1, 2], [30, 10], [1, 2], [20, 30]]
    assert cut.start_state["sum"].squeeze(1).tolist() == [0, 0, 3, 30, 3, 10]
    some = cut.select(torch.tensor([3, 0]))
    assert numbers(some.obs.squeeze(-1)) == [[30, 10], [1, 2]] and some.start_state["sum"].tolist() == [[30], [0]]
    assert segment.as_sequences(None) is segment
    with pytest.raises(ValueError, match="Collect it with bptt=3"):
        segment.as_sequences(3)
    with pytest.raises(ValueError, match="bptt=4 must divide steps=6"):
        rollout(AutoresetMode.SAME_STEP, 6, bptt=4)


def test_what_is_put_into_a_segment_has_one_number_per_step():
    segment = next(hf.collect(vector_env(AutoresetMode.SAME_STEP, {}, {}, {}), SumPolicy(), steps=4))
    segment.advantage = segment.advantage / 2
    for name, wrong in ("advantage", torch.zeros(3)), ("returns", torch.zeros(4, 1)), ("value", torch.zeros(3, 4)):
        with pytest.raises(ValueError, match=rf"{name} of a segment has shape .*, expected \[T, B\] = \[4, 3\]"):
            setattr(segment, name, wrong)
        with pytest.raises(ValueError, match=f"{name} of a segment has shape"):
            replace(segment, **{name: wrong})


def test_a_segment_moves_whole():
    moved = rollout(AutoresetMode.SAME_STEP, 4, inputs=("obs", "prev_action"), bptt=2).to("meta")
    parts = [moved.obs, moved.actions, moved.advantage, moved.valid, moved.start_state, moved.chunk_states]
    assert all(leaf.is_meta for leaf in leaves(parts))
    assert moved.episode_lengths == [2, 3, 2]


def test_the_start_state_is_the_one_before_the_resets_of_the_first_step():
    env = vector_env(AutoresetMode.SAME_STEP, TERMINATES, TRUNCATES)
    _, second = islice(hf.collect(env, SumPolicy(), 2), 2)
    assert second.resets[0].tolist() == [True, False]
    assert second.start_state["sum"].squeeze(1).tolist() == [3, 30]


@pytest.mark.parametrize("mode", MODES)
def test_environments_that_overwrite_their_arrays_do_not_corrupt_segments(mode: AutoresetMode):
    # In SAME_STEP gymnasium itself resets the copy before it hands over final_obs: a copy must keep that one.
    copies_overwrite = mode != AutoresetMode.SAME_STEP
    settings = [{**TERMINATES, "overwrite": copies_overwrite}, {**TRUNCATES, "overwrite": copies_overwrite}]
    reusing = vector_env(mode, *settings, copy=False)
    segment = next(hf.collect(reusing, SumPolicy(), 6, gamma=0.5, gae_lambda=0.5))
    expected = rollout(mode, 6)
    assert torch.equal(segment.obs, expected.obs) and torch.equal(segment.advantage, expected.advantage)


def test_later_steps_leave_an_earlier_segment_as_it_was():
    env = random_env(AutoresetMode.SAME_STEP)
    policy = hf.ActorCritic(env.single_observation_space, env.single_action_space, "lstm", 8)
    segments = hf.collect(env, policy, 4, bptt=2)
    first = next(segments)
    names = ("obs", "resets", "log_prob", "value", "start_state", "chunk_states")
    copy = tree_map(torch.clone, [getattr(first, name) for name in names])
    next(segments), next(segments)
    for before, after in zip(leaves(copy), leaves([getattr(first, name) for name in names])):
        assert torch.equal(before, after)


@pytest.mark.parametrize("source", ["info", "method"])
@pytest.mark.parametrize("mode", MODES)
def test_masks_are_obeyed_and_stored(mode: AutoresetMode, source: str):
    env = vector_env(mode, {**TERMINATES, "masks": source}, {**TRUNCATES, "masks": source})
    policy = SumPolicy()
    segment = next(hf.collect(env, policy, 12))
    unit = torch.tensor([1.0, 10.0])
    allowed = (segment.obs.squeeze(-1) / unit - 1).long() % 2
    assert torch.equal(segment.actions[segment.valid], allowed[segment.valid])
    assert segment.log_prob[segment.valid].abs().max() == 0, "the only allowed action has probability 1"
    mask = segment.action_mask
    new = policy.evaluate(segment.obs, segment.actions, segment.start_state, segment.resets, action_mask=mask)
    torch.testing.assert_close(new.log_prob, segment.log_prob, rtol=0, atol=1e-6)


def test_steps_without_a_mask_between_steps_with_one_allow_everything():
    class Forgetful(CountingEnv):
        def _info(self) -> dict[str, Any]:
            return {"action_mask": np.array([False, True])} if self.t == 1 else {}

    env = SyncVectorEnv([lambda: Forgetful(lengths=(3,))], autoreset_mode=AutoresetMode.SAME_STEP)
    segment = next(hf.collect(env, SumPolicy(), 3))
    assert segment.action_mask.squeeze(1).tolist() == [[True, True], [False, True], [True, True]]


def test_box_actions_are_stored_raw_and_given_to_the_environment_clipped():
    torch.manual_seed(0)
    env = vector_env(AutoresetMode.SAME_STEP, {"action_space": spaces.Box(-0.1, 0.1, (2,), np.float32)})
    policy = hf.ActorCritic(env.single_observation_space, env.single_action_space, "gru", 8)
    segment = next(hf.collect(env, policy, 20))
    received = np.stack(env.envs[0].received)
    assert segment.actions.abs().max() > 0.5 and np.abs(received).max() <= np.float32(0.1)
    assert np.array_equal(received, segment.actions[:, 0].clamp(-0.1, 0.1).numpy())
    new = policy.evaluate(segment.obs, segment.actions, segment.start_state, segment.resets)
    torch.testing.assert_close(new.log_prob, segment.log_prob, rtol=0, atol=1e-5)


def test_previous_action_and_reward_in_a_segment():
    inputs = ("obs", "prev_action", "prev_reward")
    segment = rollout(AutoresetMode.SAME_STEP, 5, inputs=inputs)
    shifted = torch.cat([torch.zeros_like(segment.actions[:1]), segment.actions[:-1]])
    assert torch.equal(segment.obs["prev_action"], shifted.masked_fill(segment.resets, 0))
    assert numbers(segment.obs["prev_reward"]) == [[0, 1, 0, 1, 0], [0, 2, 2, 0, 2]]


# --- dummy steps -----------------------------------------------------------------------------------------------------


def test_dummy_steps_change_neither_loss_nor_gradient():
    torch.manual_seed(0)
    segment = rollout(AutoresetMode.NEXT_STEP, 6)
    policy = SumPolicy()
    gradients = []
    for junk in (0.0, 1e6):
        dummy = ~segment.valid
        changed = dataclasses.replace(segment)
        changed.advantage = torch.where(dummy, junk, segment.advantage)
        changed.returns = torch.where(dummy, junk, segment.returns)
        changed.log_prob = torch.where(dummy, junk / 1e5, segment.log_prob)
        policy.zero_grad()
        loss = hf.ppo_loss(policy, changed, entropy_coef=0.1)
        loss.backward()
        gradients.append((loss.item(), policy.slope.grad.item()))
    assert gradients[0] == gradients[1] and np.isfinite(gradients).all()


# --- evaluation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_evaluation_acts_as_the_training_rollout_did_on_the_same_observations(mode: AutoresetMode):
    """The same seeds and the same observations give the same actions, so memory was carried and reset alike."""
    torch.manual_seed(4)
    env = random_env(mode, 3)
    policy = hf.ActorCritic(env.single_observation_space, env.single_action_space, "lstm", 8)
    torch.nn.init.normal_(policy.actor.weight)

    played: list[Any] = []
    inner = policy.act

    def act(obs: Any, resets: Any = None, *args: Any, **options: Any) -> Any:
        step = inner(obs, resets, *args, **options)
        played.append((obs, resets, step))
        return step

    policy.act = act  # type: ignore[method-assign]
    hf.evaluate(policy, env, 12, seed=7)
    steps = len(played)
    evaluated, played[:] = list(played), []
    torch.manual_seed(7)
    next(hf.collect(random_env(mode, 3), policy, steps, seed=7))
    for (obs, resets, a), (obs_t, resets_t, b) in zip(evaluated, played):
        assert torch.equal(obs, obs_t) and torch.equal(resets, resets_t)
        assert torch.equal(a.action, b.action) and torch.equal(a.log_prob, b.log_prob)
    assert sum(int(resets.sum()) for _, resets, _ in evaluated) >= 12


# --- going on --------------------------------------------------------------------------------------------------------


def test_a_restored_collector_goes_on_with_the_same_segments_and_open_episodes():
    def make() -> hf.Collector:
        torch.manual_seed(0)
        env = envs.make("holdfast/TMaze-v0", 4, env_kwargs={"length": 4})
        policy = hf.ActorCritic(env.single_observation_space, env.single_action_space, "lstm", 8)
        return hf.Collector(env, policy, 5, seed=1)

    first, second = make(), make()
    for _ in range(3):
        first.rollout()
    rng = torch.get_rng_state()
    assert second.load_state_dict(first.state_dict())
    segments = []
    for collector in (first, second):
        torch.set_rng_state(rng)
        segments.append([collector.rollout() for _ in range(4)])
    for a, b in zip(*segments):
        assert torch.equal(a.obs, b.obs) and torch.equal(a.value, b.value) and torch.equal(a.advantage, b.advantage)
        assert a.episode_returns == b.episode_returns and a.episode_lengths == b.episode_lengths
    assert any(segment.episode_lengths for segment in segments[0])


def test_where_the_environment_cannot_restore_every_episode_starts_afresh():
    def make() -> hf.Collector:
        return hf.Collector(vector_env(AutoresetMode.SAME_STEP, TERMINATES, TRUNCATES), SumPolicy(), 1)

    first, second = make(), make()
    first.rollout()
    assert second.load_state_dict(first.state_dict()) is False
    segment = second.rollout()
    assert segment.resets.all() and segment.value[0].tolist() == [1, 10]
    assert second.rollout().episode_lengths == [2], "the open episode is not counted"


# --- whose memory ----------------------------------------------------------------------------------------------------


def recall_env(num_envs: int = 3) -> Any:
    return envs.make("holdfast/RepeatPreviousEasy-v0", num_envs=num_envs)


def recall_policy() -> hf.ActorCritic:
    env = recall_env()
    torch.manual_seed(0)
    return hf.ActorCritic(env.single_observation_space, env.single_action_space, hidden_size=8)


def start_states(segments: list[hf.Segment]) -> list[torch.Tensor]:
    return [leaf for segment in segments for leaf in leaves(segment.start_state)]


def test_acting_elsewhere_between_two_segments_changes_nothing_in_them():
    def collected(disturbed: bool) -> list[hf.Segment]:
        policy, segments = recall_policy(), []
        torch.manual_seed(1)
        for segment in islice(hf.collect(recall_env(), policy, steps=5, seed=3), 3):
            segments.append(segment)
            if disturbed:
                with torch.random.fork_rng():
                    policy.act(torch.zeros(3, dtype=torch.long), torch.ones(3, dtype=torch.bool))
        return segments

    alone, next_to_evaluation = start_states(collected(False)), start_states(collected(True))
    assert all(torch.equal(a, b) for a, b in zip(alone, next_to_evaluation))
    assert alone[-1].abs().sum() > 0


def test_two_collectors_of_one_policy_do_not_disturb_each_other():
    policy = recall_policy()
    one, other = (hf.rollout.collector.Collector(recall_env(), policy, steps=5, seed=seed) for seed in (1, 2))
    for _ in range(2):
        segments = one.rollout(), other.rollout()
        for segment, collector in zip(segments, (one, other)):
            replayed = policy.evaluate(
                segment.obs, segment.actions, segment.start_state, segment.resets, return_state=True
            )
            torch.testing.assert_close(replayed.log_prob, segment.log_prob)
            for now, after in zip(leaves(collector.memory.read()), leaves(replayed.state)):
                torch.testing.assert_close(now, after.detach())
    assert policy.memory.num_envs == 0 and one.memory is not other.memory


def test_a_memory_that_two_loops_share_is_noticed():
    policy = recall_policy()
    own = hf.collect(recall_env(), policy, steps=2, memory=policy.memory)
    next(own), next(own)
    policy.memory.reset([1])  # no states of anybody else
    next(own)
    policy.act(torch.zeros(3, dtype=torch.long))
    with pytest.warns(UserWarning, match=r"other code has used this collector's memory.*hf\.Memory"):
        next(own)
