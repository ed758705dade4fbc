import random

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode

import holdfast as hf
import holdfast.envs
from holdfast.training import evaluation
from holdfast.training.evaluation import EvalResult, evaluate


class Counter(gym.vector.VectorEnv):
    """Environment b has episodes of b + 1 steps, reward 1 each; the observation is (steps so far, b)."""

    def __init__(self, num_envs, mode, truncate=False):
        self.num_envs, self.mode, self.truncate = num_envs, mode, truncate
        self.metadata = {"autoreset_mode": mode}
        self.single_observation_space = gym.spaces.Box(-np.inf, np.inf, (2,))
        self.single_action_space = gym.spaces.Discrete(3)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)
        self.ids = np.arange(num_envs)
        self.actions = []

    def obs(self):
        return np.stack([self.t, self.ids], 1).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        if options is None:
            self.t, self.over = np.zeros(self.num_envs), np.zeros(self.num_envs, bool)
        else:
            self.t = np.where(options["reset_mask"], 0, self.t)
        return self.obs(), {}

    def step(self, actions):
        self.actions.append(np.array(actions))
        restarted = self.over if self.mode == AutoresetMode.NEXT_STEP else np.zeros(self.num_envs, bool)
        self.t = np.where(restarted, 0, self.t + 1)
        done = (self.t > self.ids) & ~restarted
        rewards = np.where(restarted, 0.0, 1.0)
        info = {}
        if self.mode == AutoresetMode.SAME_STEP and done.any():
            final = np.full(self.num_envs, None, dtype=object)
            for b in done.nonzero()[0]:
                final[b] = self.obs()[b]
            info = {"final_obs": final, "_final_obs": done.copy()}
            self.t = np.where(done, 0, self.t)
        self.over = done
        no = np.zeros(self.num_envs, bool)
        return (self.obs(), rewards, no, done, info) if self.truncate else (self.obs(), rewards, done, no, info)


class Watching(hf.ActorCritic):
    """Keeps what it was given."""

    seen: list

    def act(self, obs, resets=None, env_ids=None, **options):
        self.seen.append((obs.clone(), resets.clone(), options["memory"]))
        return super().act(obs, resets, env_ids, **options)


def make_policy(env, kind=hf.ActorCritic, **options):
    torch.manual_seed(0)
    return kind(env.single_observation_space, env.single_action_space, hidden_size=8, **options)


@pytest.mark.parametrize("truncate", [False, True])
@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_every_environment_plays_its_quota_in_all_autoreset_modes(mode, truncate):
    env = Counter(4, mode, truncate)
    result = evaluate(make_policy(env), env, episodes=10)
    # 10 over 4 environments: 3, 3, 2, 2. The first ten to end would have been mostly of environment 0.
    assert result.lengths == [1, 1, 1, 2, 2, 2, 3, 3, 4, 4]
    assert result.returns == [float(n) for n in result.lengths]
    assert result.mean_length == pytest.approx(2.3)


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_memory_is_reset_at_first_observations_and_nowhere_else(mode):
    env = Counter(3, mode)
    policy = make_policy(env, Watching)
    policy.seen = []
    evaluate(policy, env, episodes=9)
    for obs, resets, _ in policy.seen:
        torch.testing.assert_close(resets, obs[:, 0] == 0)  # 0 steps so far: the first observation
    assert any(resets.any() and not resets.all() for _, resets, _ in policy.seen)


def test_fewer_episodes_than_environments():
    env = Counter(5, AutoresetMode.SAME_STEP)
    assert evaluate(make_policy(env), env, episodes=2).lengths == [1, 2]


def test_it_disturbs_neither_random_streams_nor_memory_nor_mode():
    env = holdfast.envs.make("holdfast/RepeatFirstEasy-v0", 4)
    policy = make_policy(env)
    policy.act(env.reset(seed=0)[0])
    policy.train()
    policy.critic.eval()  # as someone who froze a part of it
    memory = policy.get_memory()
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    expected = random.random(), np.random.rand(), torch.rand(3)
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    evaluate(policy, env, episodes=3, seed=5)
    assert random.random() == expected[0] and np.random.rand() == expected[1]
    torch.testing.assert_close(torch.rand(3), expected[2], rtol=0, atol=0)
    assert policy.training and policy.actor.training and not policy.critic.training
    for name, leaf in _leaves(memory):
        torch.testing.assert_close(dict(_leaves(policy.get_memory()))[name], leaf, rtol=0, atol=0)


def _leaves(tree, name=""):
    if isinstance(tree, torch.Tensor):
        return [(name, tree)]
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, (list, tuple)) else []
    return [pair for key, part in items for pair in _leaves(part, f"{name}.{key}")]


def test_a_seed_makes_it_repeatable_and_another_gives_other_episodes():
    env = holdfast.envs.make("holdfast/RepeatPreviousEasy-v0", 4)
    policy = make_policy(env)
    first, again, other = (evaluate(policy, env, 6, seed=seed).returns for seed in (1, 1, 2))
    assert first == again != other


def test_deterministic_takes_the_most_likely_action():
    env = Counter(3, AutoresetMode.SAME_STEP)
    policy = make_policy(env)
    evaluate(policy, env, episodes=3, deterministic=True, seed=1)
    first = [a.tolist() for a in env.actions]
    env.actions.clear()
    evaluate(policy, env, episodes=3, deterministic=True, seed=2)
    assert [a.tolist() for a in env.actions] == first


def test_evaluation_acts_as_the_training_rollout_does_on_the_same_observations():
    """The same seed for environments and sampling: actions of an evaluation are those of a rollout, step by step."""
    from holdfast.rollout.collector import Collector

    env = holdfast.envs.make("holdfast/RepeatPreviousEasy-v0", 4)
    policy = make_policy(env, Watching)
    policy.seen = []
    evaluate(policy, env, episodes=8, seed=7)
    observed = torch.stack([obs for obs, _, _ in policy.seen])
    policy.seen = []
    torch.manual_seed(7)
    segment = Collector(env, policy, steps=102, seed=7).rollout()
    torch.testing.assert_close(observed, segment.obs)
    played = evaluate(policy, env, episodes=8, seed=7)
    assert sorted(played.returns) == pytest.approx(sorted(segment.episode_returns))


def test_action_masks_and_previous_action_and_reward_reach_the_policy():
    class Masked(Counter):
        def action_masks(self):
            return np.tile([False, True, False], (self.num_envs, 1))

    env = Masked(3, AutoresetMode.SAME_STEP)
    inputs = ("obs", "prev_action", "prev_reward")
    from holdfast.rollout.vector_env import input_space

    torch.manual_seed(0)
    space = input_space(env.single_observation_space, env.single_action_space, inputs)
    policy = hf.ActorCritic(space, env.single_action_space, hidden_size=8)
    evaluate(policy, env, episodes=6, inputs=inputs)
    assert {int(a) for actions in env.actions for a in actions} == {1}


@pytest.mark.parametrize("max_steps", [None, 4 * 60 + 1])
def test_reading_the_ends_every_few_steps_changes_no_result(monkeypatch, max_steps):
    """As on a GPU. Episodes are of different lengths, and some end inside a block of steps."""
    env = holdfast.envs.make("holdfast/PositionOnlyCartPoleEasy-v0", num_envs=4)
    policy = hf.ActorCritic(env.single_observation_space, env.single_action_space, hidden_size=8)
    one_by_one = evaluate(policy, env, 9, seed=3, max_steps=max_steps)
    monkeypatch.setattr(evaluation, "steps_per_read", lambda env, device: 7)
    assert evaluate(policy, env, 9, seed=3, max_steps=max_steps) == one_by_one
    assert len(set(one_by_one.lengths)) > 1 and (len(one_by_one.lengths) < 9) == (max_steps is not None)


def test_record_is_called_before_each_step_with_the_flags():
    env = Counter(1, AutoresetMode.SAME_STEP)
    flags = []
    evaluate(make_policy(env), env, episodes=3, record=lambda resets: flags.append(resets.tolist()))
    assert flags == [[True], [True], [True]]


def test_an_environment_without_an_end_is_given_up(monkeypatch):
    monkeypatch.setattr(evaluation, "MAX_STEPS_WITHOUT_END", 5)
    env = Counter(1, AutoresetMode.SAME_STEP)
    env.ids = np.array([1000])
    with pytest.raises(RuntimeError, match="time limit"):
        evaluate(make_policy(env), env, episodes=1)


def test_mean_and_standard_error_by_hand():
    result = EvalResult.of([1.0, 2.0, 3.0], [4, 4, 10])
    assert result.mean_return == 2.0 and result.mean_length == 6.0
    assert result.std_error == pytest.approx(1 / 3**0.5)
    assert np.isnan(EvalResult.of([1.0], [4]).std_error)


def test_an_environment_with_other_spaces_is_refused_by_name():
    env = holdfast.envs.make("CartPole-v1", 2)
    more_actions = hf.ActorCritic(env.single_observation_space, gym.spaces.Discrete(3), hidden_size=8)
    with pytest.raises(ValueError, match=r"action_space is Discrete\(2\), and the policy was made for Discrete\(3\)"):
        hf.evaluate(more_actions, env, 1)


def test_an_evaluation_without_what_is_fed_back_to_the_policy_names_the_argument():
    env = holdfast.envs.make("holdfast/RepeatPreviousEasy-v0", num_envs=2)
    seen = gym.spaces.Dict(obs=env.single_observation_space, prev_action=env.single_action_space)
    policy = hf.ActorCritic(seen, env.single_action_space, hidden_size=8)
    with pytest.raises(ValueError, match=r"the policy was made for Dict.*; pass inputs=\('obs', 'prev_action'\)$"):
        hf.evaluate(policy, env, episodes=2)
    assert hf.evaluate(policy, env, episodes=2, inputs=("obs", "prev_action")).lengths == [51, 51]
