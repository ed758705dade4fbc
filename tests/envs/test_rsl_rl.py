"""`from_rsl_rl`: environments with rsl_rl's interface in our trainer. rsl_rl itself is not needed."""

from __future__ import annotations

import pytest
import torch

import holdfast as hf
from holdfast.envs import from_rsl_rl


class Counter:
    """Environment b counts 1, 2, 3, ... and ends after `lengths[b]` steps, in a timeout where `by_time[b]`.

    It writes into the tensors that it returned, as simulators do.
    """

    def __init__(self, lengths=(2, 3, 4), by_time=(True, False, True), final_obs=True, resets=True):
        self.num_envs, self.num_actions, self.device = len(lengths), 2, torch.device("cpu")
        self.lengths, self.by_time, self.give = torch.tensor(lengths), torch.tensor(by_time), final_obs
        self.count = torch.ones(self.num_envs, 1)
        self.twice = torch.full((self.num_envs, 2), 2.0)
        self.received, self.seeds = [], []
        if resets:
            self.reset = self._reset

    def _reset(self):
        self.count.fill_(1.0)
        self.twice.fill_(2.0)
        return self.get_observations(), {}

    def seed(self, seed):
        self.seeds.append(seed)

    def get_observations(self):
        return {"policy": self.count, "critic": self.twice}

    def step(self, actions):
        self.received.append(actions)
        rewards = self.count.squeeze(1).clone()
        done = self.count.squeeze(1) >= self.lengths
        self.count += 1
        self.twice += 2
        extras = {"time_outs": done & self.by_time}
        if self.give:
            extras["final_obs"] = {"policy": self.count.clone(), "critic": self.twice.clone()}
        self.count[done] = 1.0
        self.twice[done] = 2.0
        return self.get_observations(), rewards, done.long(), extras


def test_groups_become_keys_and_timeouts_truncations():
    env = from_rsl_rl(Counter())
    obs, _ = env.reset(seed=7)
    assert env.env.seeds == [7] and {k: v.shape for k, v in obs.items()} == {"policy": (3, 1), "critic": (3, 2)}
    assert env.single_action_space.shape == (2,) and set(env.single_observation_space) == {"policy", "critic"}
    seen, ends = [obs["policy"].flatten().tolist()], []
    for _ in range(4):
        obs, rewards, terminated, truncated, info = env.step(torch.zeros(3, 2))
        seen.append(obs["policy"].flatten().tolist())
        ends.append([("-", "terminated", "truncated")[int(a) + 2 * int(b)] for a, b in zip(terminated, truncated)])
    assert seen == [[1, 1, 1], [2, 2, 2], [1, 3, 3], [2, 1, 4], [1, 2, 1]]  # copies: not overwritten later
    assert ends[1] == ["truncated", "-", "-"] and ends[2] == ["-", "terminated", "-"]
    assert ends[3] == ["truncated", "-", "truncated"]
    assert info["final_obs"]["policy"].flatten().tolist() == [3, 2, 5] and rewards.tolist() == [2, 1, 4]


def test_a_timeout_is_bootstrapped_with_the_final_observation():
    """A critic whose value is its observation: the return after the truncated step is reward + gamma * final."""

    class Reads(hf.RecurrentPolicy):
        def __init__(self):
            super().__init__(core=hf.LSTM(1, 2))
            self.head = torch.nn.Linear(2, 2)

        def encode(self, obs):
            self.seen = obs["policy"]
            return obs["policy"]

        def decode(self, features):
            dist = torch.distributions.Independent(torch.distributions.Normal(self.head(features), 1.0), 1)
            return dist, self.seen.flatten()

    for final_obs, expected in ((True, 2 + 0.5 * 3), (False, 2 + 0.5 * 2)):
        env = from_rsl_rl(Counter(final_obs=final_obs))
        collecting = hf.collect(env, Reads(), steps=2, gamma=0.5, gae_lambda=1.0)
        if final_obs:
            segment = next(collecting)
        else:
            with pytest.warns(UserWarning, match=r"gives no extras\['final_obs'\]"):
                segment = next(collecting)
        assert segment.returns[1, 0] == pytest.approx(expected)
        assert segment.truncated[1].tolist() == [True, False, False]


def test_an_environment_without_a_reset_method_goes_on():
    env = from_rsl_rl(Counter(resets=False))
    env.reset()
    env.step(torch.zeros(3, 2))
    obs, _ = env.reset()
    assert obs["policy"].flatten().tolist() == [2, 2, 2]


def test_actions_are_bounded_if_asked_for():
    env = from_rsl_rl(Counter(), groups=["policy"], clip_actions=0.1)
    policy = hf.ActorCritic(env.single_observation_space, env.single_action_space, "gru", 4)
    next(hf.collect(env, policy, steps=3))
    assert set(env.single_observation_space) == {"policy"}
    assert all(actions.abs().max() <= 0.1 for actions in env.env.received)


def test_the_trainer_takes_it_with_a_critic_that_sees_more(tmp_path):
    config = hf.TrainConfig(
        core="gru", hidden_size=8, num_envs=3, num_steps=8, total_steps=96, epochs=1, minibatches=1, quiet=True,
        run_dir=str(tmp_path / "run"), final_eval_episodes=3, actor_obs=("policy",), critic_obs=("policy", "critic"),
        device="cpu",
    )  # fmt: skip
    trainer = hf.Trainer(config, env=from_rsl_rl(Counter()))
    assert trainer.run().steps == 96
    assert set(trainer.policy.actor_only().observation_space) == {"policy"}


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: from_rsl_rl(object()), TypeError, "object is not an rsl_rl environment .* RslRlVecEnvWrapper"),
        (
            lambda: from_rsl_rl(Counter(), groups=["polcy"]),
            ValueError,
            "expected some of the observation groups 'policy', 'critic'",
        ),
    ],
)
def test_a_wrong_environment_or_group_is_refused(make, error, said):
    with pytest.raises(error, match=said):
        make()
