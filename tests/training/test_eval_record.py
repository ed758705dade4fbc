"""What an evaluation records is what was played: replayed from its own observations it gives the same numbers."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode

import holdfast as hf
from holdfast.cli import eval as command
from holdfast.cli.errors import UserError
from holdfast.training.eval_record import RECORDED, numbers_of

MODES = [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED]


def recorded(env_id="CartPole-v1", record=RECORDED, **more):
    env = hf.envs.make(env_id, num_envs=3)
    torch.manual_seed(0)
    policy = hf.ActorCritic(env.single_observation_space, env.single_action_space, "lstm", 8)
    return policy, hf.evaluate(policy, env, 7, seed=1, record=record, **more)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_states_values_and_distributions_follow_from_the_observations(env_id, deterministic):
    policy, result = recorded(env_id, deterministic=deterministic)
    _, plain = recorded(env_id, None, deterministic=deterministic)
    assert plain.returns == result.returns and plain.record is None
    given = {name: torch.as_tensor(x) for name, x in result.record.items()}
    with torch.no_grad():
        output = policy.unroll(given["obs"], policy.initial_state(3), given["resets"])
    T = len(given["resets"])
    torch.testing.assert_close(output.value, given["value"], atol=1e-5, rtol=1e-5)
    expected = numbers_of(output.dist)
    for name, numbers in expected.items() if isinstance(expected, dict) else [("", expected)]:
        found = given[f"dist.{name}" if name else "dist"]
        torch.testing.assert_close(numbers.view(T, 3, -1), found.view(T, 3, -1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(output.state["h"], given["state.h"][-1], atol=1e-5, rtol=1e-5)
    if deterministic and env_id == "CartPole-v1":
        assert torch.equal(output.dist.mode.view(given["action"].shape), given["action"])


@pytest.mark.parametrize("mode", MODES)
def test_counted_steps_are_those_of_the_result(mode):
    from training.test_evaluation import Counter, make_policy  # environment b has episodes of b + 1 steps

    env = Counter(3, mode)
    result = hf.evaluate(make_policy(env), env, 7, record=("obs",))
    r = result.record
    counted = r["counted"] & r["valid"]
    assert counted.sum() == sum(result.lengths) and r["reward"][counted].sum() == sum(result.returns)
    assert counted.sum(0).tolist() == [3 * 1, 2 * 2, 2 * 3] and (r["resets"] & counted).sum() == 7
    assert sorted(r) == ["counted", "obs", "resets", "reward", "terminated", "truncated", "valid"]
    assert np.array_equal(r["obs"][..., 1], np.broadcast_to([0.0, 1.0, 2.0], r["valid"].shape))


def test_what_cannot_be_recorded_is_said():
    for wrong in ("obs", ("obs", "weights")):
        with pytest.raises(ValueError, match="must be a tuple of obs, state, value, action, dist"):
            recorded(record=wrong)


def test_distributions_of_torch_are_recorded_by_their_parameters():
    categorical = torch.distributions.Categorical(logits=torch.zeros(2, 3))
    normal = torch.distributions.Independent(torch.distributions.Normal(torch.zeros(2, 3), torch.ones(2, 3)), 1)
    beta = torch.distributions.Beta(torch.ones(2), torch.ones(2))
    assert set(numbers_of(categorical)) == {"logits"} and set(numbers_of(normal)) == {"loc", "scale"}
    assert set(numbers_of(beta)) == {"concentration1", "concentration0"}


def test_the_command_writes_a_file_that_numpy_reads_or_names_it(tmp_path, capsys, monkeypatch):
    config = hf.PPOConfig(
        env="CartPole-v1", core="gru", hidden_size=8, num_envs=2, num_steps=8, total_steps=16, quiet=True, tensorboard=False,
        final_eval_episodes=1, run_dir=str(tmp_path / "run"),
    )  # fmt: skip
    hf.Trainer(config).run()
    assert command.main([str(tmp_path / "run"), "--episodes", "2", "--record", str(tmp_path / "steps.npz")]) == 0
    found = np.load(tmp_path / "steps.npz")
    assert (
        found["obs"].shape[1:] == (2, 4)
        and found["state.h"].shape[-1] == 8
        and "steps.npz: obs, " in capsys.readouterr().out
    )
    for place in ["/dev/full"] * os.path.exists("/dev/full"):  # a full disk does not name the file itself
        with pytest.raises(UserError, match=r"^/dev/full: No space left"):
            command.main([str(tmp_path / "run"), "--episodes", "1", "--record", place])
    monkeypatch.setattr(hf, "evaluate", lambda *_, **__: pytest.fail("it played first"))
    with pytest.raises(UserError, match=r"nowhere/steps.npz: there is no such"):
        command.main([str(tmp_path / "run"), "--episodes", "2", "--record", str(tmp_path / "nowhere" / "steps.npz")])
