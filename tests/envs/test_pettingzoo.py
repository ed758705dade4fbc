"""PettingZoo's games as rows: agents that leave and join, their episodes, and that nothing passes between them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.wrappers.vector import DictInfoToList

import holdfast as hf
from counting_env import SumPolicy
from holdfast.envs import from_pettingzoo, make

# When each agent is there in a game of 6 steps: first step, steps, how it ends.
LIVES = {
    "a": [(0, 6, "truncated")],
    "b": [(0, 2, "terminated"), (4, 2, "truncated")],
    "c": [(3, 2, "truncated")],
}
# By hand, for row a, b and c over one game: is it there, and the sum of its episode's observations so far.
PRESENT = [[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 1, 1], [0, 0, 0, 1, 1, 0]]
SUMS = [[1, 3, 6, 10, 15, 21], [1, 3, 0, 0, 1, 3], [0, 0, 0, 1, 3, 0]]
# With gamma and lambda 1 and rewards 1: what is still to come, and V(last observation) where an episode was truncated.
RETURNS = [[34, 33, 32, 31, 30, 29], [2, 1, 0, 0, 8, 7], [0, 0, 0, 8, 7, 0]]


class Relay:
    """Observations count up from 1 in each life. `masks`: None, "info" or "obs"; the action `t % 2` is allowed."""

    def __init__(self, masks: str | None = None, noise: dict[str, float] | None = None) -> None:
        self.masks, self.noise, self.lives = masks, noise or {}, LIVES
        self.possible_agents = list(LIVES)
        self.agents: list[str] = []
        box, mask = spaces.Box(-100, 100, (1,), np.float32), spaces.Box(0, 1, (2,), np.int8)
        self.seen = spaces.Dict({"observation": box, "action_mask": mask}) if masks == "obs" else box
        self.done = spaces.Discrete(2)

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return self.seen

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return self.done

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        self.t = 0
        self.agents = [agent for agent in LIVES if self._life(agent)]
        return {agent: self._obs(agent) for agent in self.agents}, {agent: self._info() for agent in self.agents}

    def step(self, actions: dict[str, int]) -> tuple[dict[str, Any], ...]:
        assert actions.keys() == set(self.agents), "exactly the agents that are there act"
        assert self.masks is None or all(action == self.t % 2 for action in actions.values())
        acted = {agent: self._life(agent) for agent in self.agents}
        before, self.t = self.t, self.t + 1
        ends = {agent: before + 1 == first + steps for agent, (first, steps, _) in acted.items()}
        terminated = {agent: ends[agent] and acted[agent][2] == "terminated" for agent in acted}
        truncated = {agent: ends[agent] and acted[agent][2] == "truncated" for agent in acted}
        seen = {agent: self._obs(agent, acted[agent]) for agent in acted}
        self.agents = [agent for agent in LIVES if self._life(agent) and not ends.get(agent)]
        for agent in self.agents:
            if agent not in acted:  # it joins
                seen[agent] = self._obs(agent)
                terminated[agent] = truncated[agent] = False
        return seen, {agent: 1.0 for agent in seen}, terminated, truncated, {agent: self._info() for agent in seen}

    def close(self) -> None: ...

    def _life(self, agent: str) -> tuple[int, int, str] | None:
        return next((life for life in self.lives[agent] if life[0] <= self.t < life[0] + life[1]), None)

    def _obs(self, agent: str, life: tuple[int, int, str] | None = None) -> Any:
        first, _, _ = life or self._life(agent)
        obs = np.array([self.t - first + 1 + self.noise.get(agent, 0.0)], np.float32)
        return {"observation": obs, "action_mask": self._mask()} if self.masks == "obs" else obs

    def _mask(self) -> Any:
        return (np.arange(2) == self.t % 2).astype(np.int8)

    def _info(self) -> dict[str, Any]:
        return {"action_mask": self._mask()} if self.masks == "info" else {}


def rollout(policy: Any, steps: int = 12, **game: Any) -> hf.Segment:
    env = from_pettingzoo(lambda: Relay(**game), 6)
    return next(iter(hf.collect(env, policy, steps=steps, gamma=1.0, gae_lambda=1.0)))


def test_rows_are_agents_and_their_lives_are_episodes():
    segment = rollout(SumPolicy())
    present = torch.tensor(PRESENT).bool().T.repeat(2, 2)  # two games after another, two beside each other
    assert torch.equal(segment.valid, present)
    assert torch.equal(segment.value[present], torch.tensor(SUMS).T.repeat(2, 2).float()[present])
    assert torch.allclose(segment.returns[present], torch.tensor(RETURNS).T.repeat(2, 2).float()[present])
    starts = segment.resets & present
    assert starts[:6, :3].nonzero().tolist() == [[0, 0], [0, 1], [3, 2], [4, 1]] and starts.sum() == 4 * 4
    assert sorted(segment.episode_lengths) == [2] * 12 + [6] * 4 and set(segment.episode_returns) == {2.0, 6.0}
    assert not segment.rewards[~present].any()


@pytest.mark.parametrize("core", ["lstm", "gru"])
@pytest.mark.parametrize("seed", [0, 3])
def test_no_gradient_passes_from_one_agent_or_one_life_to_another(core: str, seed: int):
    torch.manual_seed(seed)
    env = from_pettingzoo(Relay, 6)
    policy = hf.ActorCritic(env.single_observation_space, env.single_action_space, core, hidden_size=8)
    segment = next(iter(hf.collect(env, policy, steps=12)))
    life = (segment.resets & segment.valid).long().cumsum(0)  # which life of a row a step belongs to
    for t, row in ((5, 1), (4, 2), (11, 4)):
        obs = segment.obs.clone().requires_grad_(True)
        ev = policy.evaluate(obs, segment.actions, segment.start_state, segment.resets)
        assert torch.allclose(ev.log_prob[segment.valid], segment.log_prob[segment.valid], atol=1e-5)
        (gradient,) = torch.autograd.grad(ev.value[t, row], obs)
        reached = gradient.abs().sum(-1) > 0
        mine = (life == life[t, row]) & (torch.arange(6) == row) & segment.valid
        assert reached[t, row] and not (reached & ~mine).any()
        assert reached[t - 1, row], "inside a life gradients do flow"


def test_what_another_agent_sees_changes_nothing():
    plain, other = rollout(SumPolicy(slope=0.0)), rollout(SumPolicy(slope=0.0), noise={"b": 50.0})
    for row in (0, 2, 3, 5):
        valid = plain.valid[:, row]
        assert torch.equal(plain.value[valid, row], other.value[valid, row])
        assert torch.equal(plain.returns[valid, row], other.returns[valid, row])
    assert not torch.equal(plain.value[:, 1], other.value[:, 1])


def test_what_stands_in_the_rows_of_absent_agents_is_in_no_loss():
    env = from_pettingzoo(Relay, 6)
    policy = hf.ActorCritic(env.single_observation_space, env.single_action_space, "lstm", hidden_size=8)
    segment = next(iter(hf.collect(env, policy, steps=12)))
    loss = hf.ppo_loss(policy, segment)
    segment.obs[~segment.valid] = 77.0
    assert torch.allclose(loss, hf.ppo_loss(policy, segment), atol=1e-6)


@pytest.mark.parametrize("masks", ["info", "obs"])
def test_masks_come_from_the_info_or_from_beside_the_observation(masks: str):
    segment = rollout(SumPolicy(), masks=masks)  # the game asserts that only allowed actions are taken
    assert segment.obs.shape == (12, 6, 1)
    allowed = torch.arange(12).unsqueeze(1) % 2 == torch.arange(2)
    assert torch.equal(segment.action_mask[:, 0], allowed) and segment.action_mask[~segment.valid].all()


def test_an_agent_that_is_gone_without_a_word_counts_as_truncated():
    class Vanishing(Relay):
        def step(self, actions: dict[str, int]) -> tuple[dict[str, Any], ...]:
            seen, rewards, *_, infos = super().step(actions)
            return seen, rewards, {}, {}, infos

    env = from_pettingzoo(Vanishing, 3)
    env.reset()
    flags = [env.step(np.zeros(3, int))[2:4] for _ in range(6)]
    assert np.array([truncated for _, truncated in flags]).T.tolist() == [
        [False] * 5 + [True], [False, True, False, False, False, True], [False] * 4 + [True, False],
    ]  # fmt: skip
    assert not np.any([terminated for terminated, _ in flags])


@pytest.mark.parametrize("seed", [1, 2])
def test_a_run_trains_on_a_game_and_its_replay_check_holds(tmp_path, seed):
    config = hf.TrainConfig(
        num_envs=6, num_steps=16, minibatches=2, total_steps=200, hidden_size=8, replay_check_every=1, quiet=True,
        final_eval_episodes=4, tensorboard=False, device="cpu", run_dir=str(tmp_path / "run"), seed=seed, env_failure="stop",
    )  # fmt: skip
    result = hf.Trainer(config, env=Relay).run()
    assert result.mean_return == (6 + 2 + 2 + 6) / 4, "an episode each of a, b, c, and a of the second game"
    assert result.updates == 3 and result.steps == 3 * 16 // 6 * 2 * sum(map(sum, PRESENT)), (
        "absent agents take no steps"
    )


def test_rows_are_rounded_up_to_whole_games_and_a_wrong_number_is_named(tmp_path):
    assert make(Relay, 4).num_envs == 6
    config = hf.TrainConfig(num_envs=4, run_dir=str(tmp_path / "run"), minibatches=1, device="cpu")
    with pytest.raises(
        ValueError, match="the environment has 6 copies, the config says num_envs=4; set one to the other"
    ):
        hf.Trainer(config, env=Relay)


class OneArray(Relay):
    """Writes every observation of an agent into the same array."""

    def _obs(self, agent: str, life: tuple[int, int, str] | None = None) -> Any:
        kept = self.__dict__.setdefault("arrays", {}).setdefault(agent, np.zeros(1, np.float32))
        kept[:] = super()._obs(agent, life)
        return kept


def test_last_observations_stay_when_a_game_writes_the_next_ones_into_the_same_array():
    envs = [from_pettingzoo(kind, 3) for kind in (Relay, OneArray)]
    for env in envs:
        env.reset(seed=0)
    for _ in range(13):
        (obs, *_, info), (same, *_, other) = (env.step(np.zeros(3, int)) for env in envs)
        assert np.array_equal(obs, same) and np.array_equal(info.get("final_obs", 0), other.get("final_obs", 0))


class Broken(Relay):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def step(self, actions: dict[str, int]) -> Any:
        seen, gained, ended, cut, infos = super().step(actions)
        if self.what == "reward":
            gained.pop("a")
        if self.what == "shape":
            seen["a"] = np.zeros(2, np.float32)
        if self.what == "stranger":
            seen["z"] = seen["a"]
        return (seen, gained, cut, infos) if self.what == "four" else (seen, gained, ended, cut, infos)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("reward", "gave agent 'a' an observation, but no reward"),
        ("shape", r"agent 'a' sees shape \(2,\), but its observation space has \(1,\)"),
        ("stranger", "agent 'z' that possible_agents does not name"),
        ("four", "Broken.step did not return five dicts"),
    ],
)
def test_a_game_that_breaks_pettingzoos_rules_is_named_with_what_is_wrong(what, said):
    env = from_pettingzoo(lambda: Broken(what), 3)
    env.reset(seed=0)
    with pytest.raises(ValueError, match=said):
        env.step(np.zeros(3, int))


@pytest.mark.parametrize("typed", ["sisl.multiwalker", "sisl.multiwalker_v3"])
def test_a_game_without_its_version_is_answered_with_it(typed):
    pytest.importorskip("pettingzoo")
    with pytest.raises(ValueError, match=r"did you mean pettingzoo:sisl\.multiwalker_v\d+\?"):
        make(f"pettingzoo:{typed}", 6)


def test_agents_with_different_spaces_and_things_that_are_no_games_are_refused():
    class Uneven(Relay):
        def action_space(self, agent: str) -> spaces.Space[Any]:
            return spaces.Discrete(2 if agent == "a" else 3)

    with pytest.raises(ValueError, match=r"one action_space, but a has Discrete\(2\) and b has Discrete\(3\)"):
        from_pettingzoo(Uneven, 3)
    with pytest.raises(TypeError, match="dict is not a PettingZoo parallel environment with possible_agents"):
        from_pettingzoo(dict, 3)
    with pytest.raises(ValueError, match="no module pettingzoo"):
        make("pettingzoo:no_such_family.game_v0", 3)


def test_the_game_of_these_tests_keeps_pettingzoos_rules():
    pettingzoo = pytest.importorskip("pettingzoo")
    from pettingzoo.test import parallel_api_test

    game = type("RelayEnv", (Relay, pettingzoo.ParallelEnv), {"metadata": {"name": "relay_v0"}})()
    game.lives = {**LIVES, "b": LIVES["b"][:1]}  # PettingZoo's games do not bring an agent back
    parallel_api_test(game, num_cycles=50)
    assert make(type(game), 3).num_envs == 3


def test_last_observations_that_are_tuples_can_be_listed_and_trained_on():
    class Paired(Relay):
        def observation_space(self, agent: str) -> spaces.Space[Any]:
            return spaces.Tuple([super().observation_space(agent), spaces.Discrete(2)])

        def step(self, actions: Any) -> Any:
            obs, *rest = super().step(actions)
            return {agent: (seen, 1) for agent, seen in obs.items()}, *rest

        def reset(self, **options: Any) -> Any:
            obs, infos = super().reset(**options)
            return {agent: (seen, 0) for agent, seen in obs.items()}, infos

    plain, listed = from_pettingzoo(Relay, 3), DictInfoToList(from_pettingzoo(Paired, 3))
    plain.reset(seed=0), listed.reset(seed=0)
    ends = 0
    for _ in range(20):
        actions = np.zeros(plain.num_envs, int)
        *_, terminated, truncated, info = plain.step(actions)
        *_, infos = listed.step(actions)
        for row in (terminated | truncated).nonzero()[0]:
            ends += 1
            np.testing.assert_array_equal(infos[row]["final_obs"][0], info["final_obs"][row])
            assert infos[row]["final_obs"][1] == 1
    assert ends > 3
    env = from_pettingzoo(Paired, 3)
    policy = hf.ActorCritic(env.single_observation_space, env.single_action_space, "gru", hidden_size=4)
    assert next(iter(hf.collect(env, policy, steps=20))).final_value is not None


def test_the_example_keeps_pettingzoos_rules():
    pytest.importorskip("pettingzoo")
    from pettingzoo.test import parallel_api_test

    path = Path(__file__).parents[2] / "examples" / "pettingzoo_signals.py"
    spec = importlib.util.spec_from_file_location("signals", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    parallel_api_test(module.Signals(), num_cycles=50)
