"""Runs that earlier versions wrote stay usable. The folders `run_0_1/` and `run_0_2/` are as 0.1 and 0.2 left them, and never change.

`run_0_1/lstm`: RepeatPreviousEasy, separate cores, a learned reset, chunks with refreshed starts, scaled rewards.
`run_0_1/gru-cartpole`: CartPole-v1 without velocities, three inputs, normalized observations.
`run_0_2/lstm`: as 0.1's, with normalized values. `run_0_2/own`: a policy class of the user's own.
`run_0_2/box`: Box actions, correlated noise, schedules. `run_0_2/policy`, `policy.onnx`: the LSTM, shared and exported.
All runs have 6 updates, with checkpoints after updates 3 and 6.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import holdfast as hf
from holdfast import envs
from holdfast.runs.log import read_progress

FIXTURES = Path(__file__).parent
MEAN_RETURN = {
    "run_0_1/lstm": -0.502,
    "run_0_1/gru-cartpole": 9.750,
    "run_0_2/lstm": -0.502,
    "run_0_2/own": -0.504,
    "run_0_2/box": 0.236,
}
"""What that version printed for `holdfast eval RUN --episodes 20 --deterministic --seed 5`."""


@pytest.fixture
def old_run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of the named run folder, free to be written to."""
    return Path(shutil.copytree(FIXTURES / request.param, tmp_path / request.param))


def version_of(run: Path) -> str:
    """ "run_0_1" or "run_0_2"."""
    return run.parent.name


every_run = pytest.mark.parametrize("old_run", list(MEAN_RETURN), indirect=True)
exact_runs = pytest.mark.parametrize("old_run", [name for name in MEAN_RETURN if "cartpole" not in name], indirect=True)
gru_cartpole = pytest.mark.parametrize("old_run", ["run_0_1/gru-cartpole"], indirect=True)


@every_run
def test_the_policy_loads_with_every_weight_of_the_checkpoint(old_run: Path) -> None:
    from holdfast.runs import checkpoint

    policy = hf.load(old_run, allow_imports=True)
    saved = checkpoint.load(old_run / "checkpoints" / "update_00000006.pt")["policy"]
    weights = policy.state_dict()
    assert saved.keys() <= weights.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in saved.items())


@every_run
def test_it_plays_as_it_did_under_its_version(old_run: Path) -> None:
    config = hf.TrainConfig.load(old_run / "config.json")
    env = envs.make(config.env, config.num_envs, mask_velocity=config.mask_velocity, env_kwargs=config.env_kwargs)
    result = hf.evaluate(
        hf.load(old_run, allow_imports=True), env, 20, deterministic=True, seed=5, inputs=config.inputs
    )
    env.close()
    assert result.mean_return == pytest.approx(
        MEAN_RETURN[f"{version_of(old_run)}/{old_run.name}"], abs=0.0005
    )  # three printed decimals


@exact_runs
def test_a_resumed_run_writes_the_rows_that_its_version_wrote(old_run: Path) -> None:
    expected = read_progress(FIXTURES / version_of(old_run) / old_run.name)
    trainer = hf.Trainer.resume(old_run / "checkpoints" / "update_00000003.pt", allow_imports=True)
    assert (trainer.update, trainer.steps) == (3, 192)
    result = trainer.run()
    rows = read_progress(old_run)
    assert (result.updates, result.steps, len(rows)) == (6, 384, 6)
    for row, before in zip(rows[3:], expected[3:]):
        assert (row["update"], row["steps"]) == (before["update"], before["steps"])
        columns = [name for name in before if name.startswith(("train/", "rollout/", "memory/"))]
        assert len(columns) >= 20
        for name in columns:
            # Processors round differently. A ratio near 1 cannot be known better than to 1e-7. The loss is a mean of ratios
            # times normalized advantages of size 1 to 3, which cancel: 5e-5 is what is left of them.
            rounding = 5e-7 if name == "train/policy_loss" else 1e-7
            same = pytest.approx(float(before[name]), rel=1e-4, abs=rounding, nan_ok=True)
            assert float(row[name]) == same, f"{name} of update {row['update']}"


@gru_cartpole
def test_a_resumed_run_whose_environment_has_no_state_says_that_episodes_restart(
    old_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = hf.Trainer.resume(old_run / "checkpoints" / "update_00000003.pt", quiet=False)
    result = trainer.run()
    assert (result.updates, result.steps) == (6, 384)
    assert [row["update"] for row in read_progress(old_run)] == ["1", "2", "3", "4", "5", "6"]
    words = " ".join(capsys.readouterr().out.split())
    assert "update_00000003.pt" in words and "all episodes were restarted with fresh memory" in words


@every_run
def test_a_finished_run_trains_on(old_run: Path) -> None:
    trainer = hf.Trainer.resume(old_run, total_steps=512, allow_imports=True)
    result = trainer.run()
    assert (result.updates, result.steps) == (8, 512)
    assert len(read_progress(old_run)) == 8


def test_a_policy_folder_of_0_2_holds_the_policy_of_its_run() -> None:
    shared, trained = hf.load(FIXTURES / "run_0_2" / "policy"), hf.load(FIXTURES / "run_0_2" / "lstm")
    weights = trained.state_dict()
    assert shared.state_dict().keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in shared.state_dict().items())


def test_an_onnx_file_of_0_2_acts_as_the_policy_of_its_run() -> None:
    pytest.importorskip("onnxruntime")
    exported = hf.Runner(FIXTURES / "run_0_2" / "policy.onnx")
    runner = hf.Runner(hf.load(FIXTURES / "run_0_2" / "lstm"))
    generator = torch.Generator().manual_seed(1)
    for _ in range(30):
        obs = torch.randint(4, (5,), generator=generator).numpy()
        resets = (torch.rand(5, generator=generator) < 0.2).numpy()
        actions = [each.act(obs, resets=resets).action for each in (exported, runner)]
        assert (actions[0] == actions[1]).all()


def test_the_fixtures_are_what_their_versions_wrote() -> None:
    for name in MEAN_RETURN:
        version = name.partition("/")[0].removeprefix("run_").replace("_", ".")
        assert f'"holdfast": "{version}.0"' in (FIXTURES / name / "meta.json").read_text()
        files = sorted(path.name for path in (FIXTURES / name / "checkpoints").iterdir())
        assert files == ["update_00000003.pt", "update_00000006.pt"]
        assert len(read_progress(FIXTURES / name)) == 6
