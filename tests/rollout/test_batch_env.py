"""Environments that answer in batches and in any order: every one takes its T steps, with its own memory."""

from __future__ import annotations

import gc
import random
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode

import holdfast as hf
from counting_env import CountingEnv, SumPolicy, vector_env
from holdfast.envs import make
from holdfast.rollout.collector import Collector
from holdfast.rollout.vector_env import input_space
from holdfast.runs.log import read_progress

LENGTHS = (3, 5, 2, 7, 4, 6)


class ShuffledEnv:
    """CountingEnvs whose results come back in random order; environment 0 is slow: it answers last wherever it may."""

    is_asynchronous = True

    def __init__(self, count: int, batch_size: int, seed: int, ends: str = "terminated") -> None:
        self.num_envs, self.batch_size = count, batch_size
        self.envs = [CountingEnv(unit=0.1 * (i + 1), lengths=(LENGTHS[i % 6],), ends=(ends,)) for i in range(count)]
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.single_observation_space = self.envs[0].observation_space
        self.single_action_space = self.envs[0].action_space
        self.random, self.waiting, self.ended, self.batches = random.Random(seed), [], [False] * count, []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.stack([env.reset()[0] for env in self.envs]), {}

    def send(self, actions: Any, env_ids: Any) -> None:
        assert len(set(env_ids)) == len(env_ids) == self.batch_size
        for action, i in zip(actions, env_ids):
            assert all(other[-1] != i for other in self.waiting), "sent again before it answered"
            if self.ended[i]:
                result = (self.envs[i].reset()[0], 0.0, False, False)
            else:
                result = self.envs[i].step(action)[:4]
            self.ended[i] = result[2] or result[3]
            self.waiting.append((*result, i))

    def recv(self) -> Any:
        assert len(self.waiting) >= self.batch_size, "this would wait for ever"
        self.waiting.sort(key=lambda result: (result[-1] == 0, self.random.random()))
        batch, self.waiting = self.waiting[: self.batch_size], self.waiting[self.batch_size :]
        self.batches.append([result[-1] for result in batch])
        return tuple(np.array(part) for part in zip(*batch))


@pytest.mark.parametrize("ends", ["terminated", "truncated"])
@pytest.mark.parametrize(("batch", "seed"), [(1, 0), (2, 1), (3, 2), (6, 3)])
def test_segments_are_those_of_environments_in_lockstep(batch: int, seed: int, ends: str):
    policy = SumPolicy(slope=0.0)
    settings = [{"unit": 0.1 * (i + 1), "lengths": (n,), "ends": (ends,)} for i, n in enumerate(LENGTHS)]
    env = ShuffledEnv(6, batch, seed, ends)
    both = (env, vector_env(AutoresetMode.NEXT_STEP, *settings))
    segments = zip(*(hf.collect(e, policy, steps=9, bptt=3, memory=hf.Memory(policy.core)) for e in both))
    for _ in range(4):
        shuffled, lockstep = next(segments)
        for name in ("obs", "resets", "valid", "rewards", "terminated", "truncated", "value", "returns", "advantage"):
            assert torch.equal(getattr(shuffled, name), getattr(lockstep, name)), name
        for ours, theirs in zip(shuffled.chunk_states, lockstep.chunk_states):
            assert torch.equal(ours["sum"], theirs["sum"])
        assert len(shuffled.chunk_states) == 3
        assert sorted(shuffled.episode_returns) == sorted(lockstep.episode_returns)
        assert not env.waiting, "no step crosses an update"
    assert batch in (1, 6) or len({tuple(sorted(ids)) for ids in env.batches}) > 2, "the groups did change"


def test_training_replays_ten_thousand_steps_in_shuffled_order():
    env = ShuffledEnv(40, 10, seed=5)
    torch.manual_seed(1)
    policy = hf.ActorCritic(env.single_observation_space, env.single_action_space, "lstm", hidden_size=16)
    collector, steps = Collector(env, policy, 125, bptt=25), 0
    while steps < 10_000:
        segment = collector.rollout()
        for k, state in enumerate(segment.chunk_states):
            part = slice(25 * k, 25 * (k + 1))
            ev = policy.evaluate(segment.obs[part], segment.actions[part], state, segment.resets[part])
            assert (ev.log_prob - segment.log_prob[part]).abs().max() <= 1e-5
        steps += segment.resets.numel()
    assert len({tuple(ids) for ids in env.batches}) > 100, "the order did change"


def test_previous_actions_and_rewards_are_those_of_the_same_environment():
    env, inputs = ShuffledEnv(6, 2, seed=0), ("obs", "prev_action", "prev_reward")
    seen = input_space(env.single_observation_space, env.single_action_space, inputs)
    policy = hf.ActorCritic(seen, env.single_action_space, "gru", hidden_size=4)
    segment = Collector(env, policy, 20, inputs=inputs).rollout()
    follows = ~segment.resets[1:]
    assert torch.equal(segment.obs["prev_action"][1:][follows], segment.actions[:-1][follows])
    assert torch.equal(segment.obs["prev_reward"][1:][follows], segment.rewards[:-1][follows])
    assert not segment.obs["prev_action"][segment.resets].any()


# --- EnvPool itself ---------------------------------------------------------------------------------------------------


@pytest.fixture
def envpool():
    return pytest.importorskip("envpool")


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_envpool_trains_in_both_modes_and_the_replay_check_holds(envpool, tmp_path, vectorization):
    config = hf.TrainConfig(
        env="envpool:CartPole-v1", vectorization=vectorization, num_envs=6, num_steps=32, minibatches=2, total_steps=10_000,
        hidden_size=16, replay_check_every=1, quiet=True, final_eval_episodes=6, tensorboard=False, device="cpu",
        run_dir=str(tmp_path / "run"),
    )  # fmt: skip
    trainer = hf.Trainer(config)
    expected = "asynchronous batches" if vectorization == "async" else "step by step"
    assert trainer.engines["rollout"].startswith(expected)
    assert trainer.run().mean_return > 5
    assert max(float(row["memory/replay_gap"]) for row in read_progress(tmp_path / "run")) <= 1e-5


def test_envpool_environments_reset_in_the_next_step_and_repeat_with_their_seed(envpool):
    runs = []
    for seed in (3, 3, 4):
        env = make("envpool:CartPole-v1", 4)
        obs, _ = env.reset(seed=seed)
        seen = [obs]
        for _ in range(30):
            seen.append(env.step(np.zeros(4, np.int64))[0])
        runs.append(np.stack(seen))
    assert np.array_equal(runs[0], runs[1]) and not np.array_equal(runs[0], runs[2])
    assert env.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP


def test_making_envpool_environments_warns_of_nothing(envpool, recwarn):
    assert make("envpool:CartPole-v1", 4).single_observation_space.dtype == np.float32
    assert not recwarn.list


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_envpool_mistakes_are_one_line(envpool):
    with pytest.raises(ValueError, match=r"no environment 'CartPol-v1'; did you mean envpool:CartPole-v1\?"):
        make("envpool:CartPol-v1", 4)
    for batch in (3, "x"):
        with pytest.raises(ValueError, match=r"batch_size=.* must divide the 4 environments"):
            make("envpool:CartPole-v1", 4, env_kwargs={"batch_size": batch})
    for threads in (-3, 10**6, "two"):  # EnvPool itself would end the process
        with pytest.raises(ValueError, match=r"num_threads=.* must be between 0"):
            make("envpool:CartPole-v1", 4, env_kwargs={"num_threads": threads})
    with pytest.raises(ValueError, match="has no option 'num_thread'; it has num_envs, batch_size, num_threads"):
        make("envpool:CartPole-v1", 4, env_kwargs={"num_thread": 2})
    with pytest.raises(ValueError, match="seed is not an option here; `--seed`"):
        make("envpool:CartPole-v1", 4, env_kwargs={"seed": 2})
    gc.collect()  # an environment that was refused is deleted without a word
