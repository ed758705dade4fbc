"""Runs that 0.1 wrote stay usable: `run_0_1/` holds two run folders as 0.1 left them, and they never change.

`lstm`: RepeatPreviousEasy, separate cores, a learned reset, chunks with refreshed starts, scaled rewards.
`gru-cartpole`: CartPole-v1 without velocities, three inputs, normalized observations.
Both have 6 updates, with checkpoints after updates 3 and 6.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import holdfast as hf
from holdfast import envs
from holdfast.runs.log import read_progress

FIXTURES = Path(__file__).parent / "run_0_1"
MEAN_RETURN = {"lstm": -0.502, "gru-cartpole": 9.750}
"""What 0.1 printed for `holdfast eval RUN --episodes 20 --deterministic --seed 5`."""


@pytest.fixture
def run_of_0_1(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of the named run folder, free to be written to."""
    return Path(shutil.copytree(FIXTURES / request.param, tmp_path / request.param))


both = pytest.mark.parametrize("run_of_0_1", ["lstm", "gru-cartpole"], indirect=True)
lstm = pytest.mark.parametrize("run_of_0_1", ["lstm"], indirect=True)
gru_cartpole = pytest.mark.parametrize("run_of_0_1", ["gru-cartpole"], indirect=True)


@both
def test_the_policy_loads_with_every_weight_of_the_checkpoint(run_of_0_1: Path) -> None:
    from holdfast.runs import checkpoint

    policy = hf.load(run_of_0_1)
    saved = checkpoint.load(run_of_0_1 / "checkpoints" / "update_00000006.pt")["policy"]
    weights = policy.state_dict()
    assert saved.keys() <= weights.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in saved.items())


@both
def test_it_plays_as_it_did_under_0_1(run_of_0_1: Path) -> None:
    config = hf.TrainConfig.load(run_of_0_1 / "config.json")
    env = envs.make(config.env, config.num_envs, mask_velocity=config.mask_velocity, env_kwargs=config.env_kwargs)
    result = hf.evaluate(hf.load(run_of_0_1), env, 20, deterministic=True, seed=5, inputs=config.inputs)
    env.close()
    assert result.mean_return == pytest.approx(MEAN_RETURN[run_of_0_1.name], abs=0.0005)  # three printed decimals


@lstm
def test_a_resumed_run_writes_the_rows_that_0_1_wrote(run_of_0_1: Path) -> None:
    expected = read_progress(FIXTURES / "lstm")
    trainer = hf.Trainer.resume(run_of_0_1 / "checkpoints" / "update_00000003.pt")
    assert (trainer.update, trainer.steps) == (3, 192)
    result = trainer.run()
    rows = read_progress(run_of_0_1)
    assert (result.updates, result.steps, len(rows)) == (6, 384, 6)
    for row, before in zip(rows[3:], expected[3:]):
        assert (row["update"], row["steps"]) == (before["update"], before["steps"])
        columns = [name for name in before if name.startswith(("train/", "rollout/", "memory/"))]
        assert len(columns) == 20
        for name in columns:
            # Processors round differently. A ratio near 1 cannot be known better than to 1e-7. The loss is a mean of ratios
            # times normalized advantages of size 1 to 3, which cancel: 5e-5 is what is left of them.
            rounding = 5e-7 if name == "train/policy_loss" else 1e-7
            same = pytest.approx(float(before[name]), rel=1e-4, abs=rounding, nan_ok=True)
            assert float(row[name]) == same, f"{name} of update {row['update']}"


@gru_cartpole
def test_a_resumed_run_whose_environment_has_no_state_says_that_episodes_restart(
    run_of_0_1: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = hf.Trainer.resume(run_of_0_1 / "checkpoints" / "update_00000003.pt", quiet=False)
    result = trainer.run()
    assert (result.updates, result.steps) == (6, 384)
    assert [row["update"] for row in read_progress(run_of_0_1)] == ["1", "2", "3", "4", "5", "6"]
    words = " ".join(capsys.readouterr().out.split())
    assert "update_00000003.pt" in words and "all episodes were restarted with fresh memory" in words


@both
def test_a_finished_run_trains_on(run_of_0_1: Path) -> None:
    trainer = hf.Trainer.resume(run_of_0_1, total_steps=512)
    result = trainer.run()
    assert (result.updates, result.steps) == (8, 512)
    assert len(read_progress(run_of_0_1)) == 8


def test_the_fixtures_are_what_0_1_wrote() -> None:
    for name in MEAN_RETURN:
        assert '"holdfast": "0.1.0"' in (FIXTURES / name / "meta.json").read_text()
        files = sorted(path.name for path in (FIXTURES / name / "checkpoints").iterdir())
        assert files == ["update_00000003.pt", "update_00000006.pt"]
        assert len(read_progress(FIXTURES / name)) == 6
