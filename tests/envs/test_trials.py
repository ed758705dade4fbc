"""Trials: several episodes of one task that the learner sees as one, hand-computed; the same in every vectorization."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

import holdfast as hf
from counting_env import CountingEnv
from holdfast import envs
from holdfast.envs import Trials
from holdfast.rollout.vector_env import VectorEnvAdapter


class Noisy(gym.Env):
    """`reset` draws a task, a step draws noise; both are the observation. Two steps, of which the second pays 1 and is the last."""

    observation_space = spaces.Box(0.0, 1.0, (2,))
    action_space = spaces.Discrete(2)

    def __init__(self, ends: str = "terminated") -> None:
        self.ends = ends

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.task, self.t = self.np_random.random(), 0
        return self._seen(), {"masked": False}

    def step(self, action):
        self.t += 1
        over = self.t == 2
        return self._seen(), float(over), over and self.ends == "terminated", over and self.ends == "truncated", {}

    def _seen(self):
        return np.array([self.task, self.np_random.random() if self.t else 0.0], np.float32)


def played(env: gym.Env, steps: int) -> list[tuple]:
    return [env.step(0) for _ in range(steps)]


@pytest.mark.parametrize("ends", ["terminated", "truncated"])
def test_inner_ends_are_hidden_and_the_last_one_is_the_trials(ends):
    env = Trials(Noisy(ends), episodes=3)
    obs, _ = env.reset(seed=0)
    steps = played(env, 6)
    assert [bool(step[2] or step[3]) for step in steps] == [False] * 5 + [True]
    assert steps[-1][2:4] == ((True, False) if ends == "terminated" else (False, True))
    assert [step[1] for step in steps] == [0, 1, 0, 1, 0, 1]  # what the last step of an episode pays is paid
    starts = [obs["episode_start"][0], *(step[0]["episode_start"][0] for step in steps)]
    assert starts == [1, 0, 1, 0, 1, 0, 0]
    assert steps[-1][4]["trial_returns"].tolist() == [1, 1, 1] and "trial_returns" not in steps[1][4]
    assert steps[1][4]["masked"] is False  # the info of the inner reset, where action masks are


def test_a_trial_keeps_its_task_and_draws_new_chances():
    env = Trials(Noisy(), episodes=4)
    tasks, chances = [], []
    for trial in range(3):
        obs, _ = env.reset(seed=7 if trial == 0 else None)
        steps = played(env, 8)
        seen = [obs["obs"], *(step[0]["obs"] for step in steps)]
        tasks.append({float(o[0]) for o in seen})
        chances += [float(o[1]) for o in seen if o[1]]
    assert [len(task) for task in tasks] == [1, 1, 1] and len(set.union(*tasks)) == 3
    assert len(set(chances)) == len(chances) == 15
    again, _ = env.reset(seed=7)
    assert {float(again["obs"][0])} == tasks[0]  # the seed of a run seeds its trials


def test_copies_that_were_never_seeded_play_different_tasks():
    env = envs.make(Trials(Noisy(), 2), 3)
    tasks = env.reset()[0]["obs"][:, 0]
    assert len(set(tasks.tolist())) == 3


def test_a_task_that_the_environment_keeps_itself():
    class Kept(Trials):
        def begin_next(self):
            return self.env.reset(options={"episode": len(self.returns)})

    env = Kept(CountingEnv(lengths=(1,)), episodes=2)
    env.reset()
    assert env.step(0)[0]["episode_start"] == 1


@pytest.mark.parametrize("vectorization", ["sync", "async", "workers"])
def test_only_trials_reset_memory_and_what_is_fed_back(vectorization):
    env = envs.make(Noisy, 2, vectorization=vectorization, trial_episodes=2)
    try:
        feed = VectorEnvAdapter(env, inputs=("obs", "prev_action", "prev_reward"))
        feed.start(seed=0)
        assert env.metadata["inputs"] == feed.inputs  # so that --inputs need not be given
        resets, rewards, returns = [], [], []
        for _ in range(5):
            returns.append(feed.step(torch.tensor([1, 1])).trial_returns)
            resets.append(feed.resets.tolist())
            rewards.append(feed.obs["prev_reward"].tolist())
    finally:
        env.close()
    assert resets == [[False] * 2] * 3 + [[True] * 2, [False] * 2]
    assert rewards == [[0, 0], [1, 1], [0, 0], [0, 0], [0, 0]]  # seen after the inner end, cleared after the trial's
    assert [r is not None for r in returns] == [False, False, False, True, False]
    assert returns[3].tolist() == [[1, 1], [1, 1]]


def test_dict_observations_keep_their_keys_and_masks_come_from_inside():
    env = Trials(CountingEnv(lengths=(1,), form="dict", masks="method"), 2)
    assert set(env.observation_space.spaces) == {"count", "inner", "episode_start"}
    obs, _ = env.reset()
    assert env.observation_space.contains(obs) and env.observation_space.contains(env.step(0)[0])
    assert env.get_wrapper_attr("action_masks")().tolist() == [True, False]
    with pytest.raises(ValueError, match="have a part episode_start already"):
        Trials(env, 2)


@pytest.mark.parametrize("episodes", [0, 1.0, True, None])
def test_a_number_of_episodes_is_asked_for(episodes):
    with pytest.raises(ValueError, match=r"expected the number of episodes in a trial, at least 1"):
        Trials(Noisy(), episodes)


def test_environments_whose_copies_step_together_are_refused():
    with pytest.raises(ValueError, match=r"trial_episodes, .* need an environment that is made one copy at a time"):
        envs.make("holdfast/TMaze-v0", 2, trial_episodes=3)
    one = Trials(gym.make("holdfast/TMaze-v0", length=3), 2)  # one copy works, slowly
    assert envs.make(one, 2).reset(seed=0)[0]["episode_start"].tolist() == [[1], [1]]


def test_masks_of_observations_are_inside():
    env = envs.make("CartPole-v1", 1, mask_velocity=True, trial_episodes=2)
    env.reset(seed=0)
    obs = env.step(np.array([0]))[0]
    assert obs["obs"][0, [1, 3]].tolist() == [0, 0] and obs["obs"][0, 0] != 0


class Longer(Noisy):
    """Pays the number of the episode in its trial."""

    def __init__(self) -> None:
        super().__init__()
        self.last_task, self.number = None, 0

    def step(self, action):
        obs, reward, *rest = super().step(action)
        if reward:
            self.number = self.number + 1 if self.task == self.last_task else 1
            self.last_task = self.task
        return obs, reward * self.number, *rest


def test_evaluations_and_runs_tell_returns_of_trials_and_of_their_episodes(tmp_path):
    config = hf.PPOConfig(
        trial_episodes=3, core="gru", hidden_size=8, num_envs=2, num_steps=8, total_steps=64, final_eval_episodes=4, threads=1,
        tensorboard=False, quiet=True, run_dir=str(tmp_path / "run"),
    )  # fmt: skip
    rows = []

    class Rows(hf.Callback):
        def on_update_end(self, trainer, row):
            rows.append(row)

    trainer = hf.Trainer(config, env=Longer, callbacks=[Rows()])
    assert trainer.config.inputs == ("obs", "prev_action", "prev_reward")
    assert trainer.run().mean_return == 6
    assert rows[-1]["rollout/ep_rew_mean"] == 6 and rows[-1]["rollout/ep_len_mean"] == 6
    assert (rows[-1]["rollout/first_in_trial"], rows[-1]["rollout/last_in_trial"]) == (1, 3)
    result = trainer.evaluate(5)
    assert result.returns == [6] * 5 and result.returns_in_trial == [1, 2, 3]
    resumed = hf.Trainer.resume(tmp_path / "run", env=Longer, total_steps=128)
    assert resumed.config.trial_episodes == 3 and resumed.run().mean_return == 6
