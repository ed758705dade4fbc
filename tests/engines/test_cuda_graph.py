"""Training on a GPU: what a captured graph must not freeze, one rank through NCCL, the profile. Skipped without a GPU."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import holdfast as hf
from holdfast.algorithms.base import Progress
from holdfast.engines import graph_rollout
from holdfast.engines.cuda_graph import capturing, side_stream
from holdfast.engines.graph_rollout import GraphCollector
from holdfast.runs.log import read_progress
from holdfast.training.iteration import start_memory_metrics

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

SMALL = dict(
    hidden_size=32, num_envs=64, num_steps=64, minibatches=4, epochs=2, total_steps=64 * 64 * 12, checkpoint_every=0,
    final_eval_episodes=1, learning_rate=3e-3, tensorboard=False, quiet=True, device="cuda",
)  # fmt: skip


def config(folder: Path, **settings: Any) -> hf.TrainConfig:
    return hf.TrainConfig(**{**SMALL, "run_dir": str(folder), **settings})


def test_a_captured_rollout_scales_rewards_as_the_statistics_say_now(tmp_path: Path):
    scales: list[float] = []

    class Look(hf.Callback):
        def on_rollout_end(self, trainer: hf.Trainer, segment: hf.Segment) -> None:
            assert trainer.algorithm.reward_scale is not None and bool(segment.terminated.any())
            scales.append(trainer.algorithm.reward_scale.value)
            # Nothing follows a terminal step: its return is its reward, scaled.
            torch.testing.assert_close(
                segment.returns[segment.terminated],
                segment.rewards[segment.terminated] * scales[-1],
                rtol=1e-4,
                atol=1e-5,
            )

    trainer = hf.Trainer(
        config(tmp_path / "run", env="holdfast/RepeatPreviousEasy-v0", normalize_reward=True), callbacks=[Look()]
    )
    assert isinstance(trainer.collector, GraphCollector)
    trainer.run()
    assert scales[1] > 2 * scales[0], "they did move"


def test_captured_graphs_see_the_observation_statistics_move(tmp_path: Path):
    """The replay check computes outside of the graphs: statistics that stood still in them would be a gap."""
    settings: dict[str, Any] = dict(
        env="holdfast/PositionOnlyCartPoleEasy-v0", normalize_obs=True, replay_check_every=1
    )
    trainer = hf.Trainer(config(tmp_path / "run", **settings))
    trainer.run()
    gaps = [float(row["memory/replay_gap"]) for row in read_progress(tmp_path / "run")]
    assert len(gaps) == 12 and max(gaps) < 1e-3
    variances = [buffer for name, buffer in trainer.policy.encoder.named_buffers() if name.endswith("var")]
    assert len(variances) == 1 and float(variances[0].min()) < 0.5


def test_a_resumed_run_follows_its_learning_rate_schedule(tmp_path: Path):
    """The optimizer's rate is a tensor on the GPU that the captured step reads; a checkpoint holds it on the host."""

    class Stop(hf.Callback):
        def on_update_end(self, trainer: hf.Trainer, row: dict[str, float]) -> bool:
            return trainer.update < 6

    settings: dict[str, Any] = dict(env="holdfast/RepeatPreviousEasy-v0", lr_schedule="linear")
    hf.Trainer(config(tmp_path / "unbroken", **settings)).run()
    hf.Trainer(config(tmp_path / "resumed", **settings), callbacks=[Stop()]).run()
    resumed = hf.Trainer.resume(tmp_path / "resumed")
    group = resumed.algorithm.optimizer.param_groups[0]
    assert group["lr"].is_cuda and group["capturable"]
    resumed.run()
    unbroken, broken = (read_progress(tmp_path / name) for name in ("unbroken", "resumed"))
    assert len(unbroken) == len(broken) == 12
    for name in ("train/policy_loss", "train/entropy", "train/approx_kl", "rollout/ep_rew_mean"):
        mine, theirs = ([float(row[name]) for row in rows] for rows in (broken, unbroken))
        assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize("every", [1, 100])
@pytest.mark.parametrize("env", ["RepeatPreviousEasy", "PositionOnlyCartPoleEasy"])
def test_a_resumed_run_writes_the_rows_of_an_unbroken_one(tmp_path: Path, env: str, every: int):
    """Bit for bit: random numbers, memory, environments, weights and moments continue, and no sum changes its order. Without a
    replay check in each update, rollouts are prefetched; the run that is stopped cancels one."""

    class Stop(hf.Callback):
        only_watches = True

        def on_update_end(self, trainer: hf.Trainer, row: dict[str, float]) -> bool:
            return trainer.update < 5

    settings: dict[str, Any] = dict(env=f"holdfast/{env}-v0", replay_check_every=every)
    hf.Trainer(config(tmp_path / "unbroken", **settings)).run()
    hf.Trainer(config(tmp_path / "resumed", **settings), callbacks=[Stop()]).run()
    hf.Trainer.resume(tmp_path / "resumed").run()
    unbroken, broken = (read_progress(tmp_path / name) for name in ("unbroken", "resumed"))
    assert len(unbroken) == len(broken) == 12
    for mine, theirs in zip(broken, unbroken):
        kept = [name for name in theirs if not name.startswith("time/")]
        assert {name: mine[name] for name in kept} == {name: theirs[name] for name in kept}


def test_rollouts_that_are_prefetched_change_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    settings: dict[str, Any] = dict(env="holdfast/RepeatPreviousEasy-v0", normalize_value=True)
    hf.Trainer(config(tmp_path / "ahead", **settings)).run()
    monkeypatch.setattr(GraphCollector, "prefetches", False)
    hf.Trainer(config(tmp_path / "waiting", **settings)).run()
    ahead, waiting = (read_progress(tmp_path / name) for name in ("ahead", "waiting"))
    kept = [name for name in waiting[0] if not name.startswith("time/")]
    assert len(kept) > 15 and [[row[n] for n in kept] for row in ahead] == [[row[n] for n in kept] for row in waiting]


@pytest.mark.parametrize("settings", [{}, {"normalize_value": True, "normalize_reward": False, "epochs": 3}])
def test_nothing_waits_for_the_gpu_between_a_rollout_and_the_metrics_of_its_update(tmp_path: Path, settings: Any):
    trainer = hf.Trainer(config(tmp_path / "run", env="holdfast/RepeatPreviousEasy-v0", **settings))
    trainer.run()
    rows = []
    for _ in range(3):
        torch.cuda.set_sync_debug_mode("error")
        try:
            segment = trainer.collector.rollout()
            trainer.algorithm.prepare(segment)
            finish = trainer.algorithm.start_update(segment, Progress(0, 2, 1, 2, 0.5))
            memory = start_memory_metrics(
                trainer.collector.memory.read(), segment.resets, trainer.parts.engines.read_later
            )
            kept = trainer.collector.prefetch(segment)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert kept is not None and len(kept.episode_returns) == int((kept.terminated | kept.truncated).sum()) > 0
        rows.append({**finish(), **memory()})
    assert rows[0] != rows[1] and all(row["train/skipped_steps"] == 0 for row in rows)


def test_one_nccl_rank_trains_as_no_ranks_do(tmp_path: Path):
    command = """train --env holdfast/RepeatPreviousEasy-v0 --hidden-size 32 --num-envs 64 --num-steps 64 --minibatches 4
        --total-steps 16384 --no-tensorboard --quiet --device cuda --run-dir"""
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node 1"
    for launcher, name in (("", "alone"), (torchrun, "joined")):
        words = [sys.executable, *launcher.split(), "-m", "holdfast", *command.split(), str(tmp_path / name)]
        done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "NCCL_DEBUG": "INFO"})
        assert done.returncode == 0, done.stderr[-3000:]
    assert "Init COMPLETE" in done.stdout + done.stderr, "NCCL was there"
    alone, joined = read_progress(tmp_path / "alone"), read_progress(tmp_path / "joined")
    assert len(alone) == len(joined) == 4
    for name in ("rollout/ep_rew_mean", "train/policy_loss", "train/entropy", "train/grad_norm", "train/approx_kl"):
        mine, theirs = ([float(row[name]) for row in rows[:2]] for rows in (alone, joined))
        assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-6), name


def test_the_profile_of_a_captured_run_names_graphs_and_kernels(tmp_path: Path):
    watch = hf.Profile()
    hf.Trainer(
        config(tmp_path / "run", env="holdfast/RepeatPreviousEasy-v0", total_steps=64 * 64 * 40), callbacks=[watch]
    ).run()
    assert "policy and environment (one CUDA graph)" in watch.report
    assert "forward, backward, optimizer (one CUDA graph)" in watch.report
    assert "the GPU was busy for" in watch.report and "without it:" in watch.report
    assert watch.trace is not None and watch.trace.stat().st_size < 16 * 2**20


# --- policies that cannot be captured --------------------------------------------------------------------------------


class Plain(hf.RecurrentPolicy):
    """As in the README: its distribution is torch's, which looks at its arguments unless told otherwise."""

    def __init__(self, inputs: int, actions: int) -> None:
        super().__init__(core=hf.LSTM(16, 16))
        self.encoder, self.actor, self.critic = nn.Linear(inputs, 16), nn.Linear(16, actions), nn.Linear(16, 1)

    def encode(self, obs: Tensor) -> Tensor:
        return self.encoder(obs.float().flatten(1))

    def decode(self, features: Tensor) -> Any:
        return torch.distributions.Categorical(logits=self.actor(features)), self.critic(features)


class Looks(Plain):
    def decode(self, features: Tensor) -> Any:
        if features.abs().max() > 1e9:
            raise ValueError("too large")
        return super().decode(features)


def test_a_policy_with_torchs_distribution_has_its_minibatches_captured(tmp_path: Path):
    trainer = hf.Trainer(
        config(tmp_path / "run", env="CartPole-v1", num_envs=8, total_steps=8 * 64 * 3), policy=Plain(4, 2)
    )
    assert trainer.run().updates == 3 and trainer.engines["update"] == "CUDA graph"


@pytest.mark.parametrize("env", ["CartPole-v1", "holdfast/PositionOnlyCartPoleEasy-v0"])
def test_a_policy_that_waits_for_the_gpu_trains_without_graphs_and_the_line_is_named(
    tmp_path: Path, env: str, capsys: pytest.CaptureFixture[str]
):
    settings = {"env": env, "num_envs": 8, "total_steps": 8 * 64 * 3, "quiet": False, "replay_check_every": 1}
    policy = Looks(4 if env == "CartPole-v1" else 2, 2)
    trainer = hf.Trainer(config(tmp_path / "run", **settings), policy=policy)
    assert trainer.run().updates == 3
    line = "waits for the GPU (if features.abs().max() > 1e9:)"
    assert line in trainer.engines["update"] and trainer.engines["update"].startswith(
        "autograd, because test_cuda_graph.py:"
    )
    said = " ".join(capsys.readouterr().out.split())
    assert said.count(f"update: {trainer.engines['update']}") == 1
    assert (line in trainer.engines["rollout"]) == env.startswith("holdfast")
    gaps = [float(row["memory/replay_gap"]) for row in read_progress(tmp_path / "run")]
    assert len(gaps) == 3 and max(gaps) < 1e-3


def test_reading_the_episodes_of_a_rollout_in_which_none_ended_waits_until_its_tensors_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    picked = graph_rollout._picked

    def late(*tensors: Tensor) -> Any:
        episodes = picked(*tensors)
        torch.cuda._sleep(200_000_000)  # clock ticks, about 0.1 s: the stream that reads is late
        return episodes

    class Look(hf.Callback):
        looked = 0

        def on_rollout_end(self, trainer: hf.Trainer, segment: hf.Segment) -> None:
            collector = trainer.collector
            assert isinstance(collector, GraphCollector) and collector._captured is not None
            assert segment.episode_returns == []
            assert collector._captured.reader.query(), "the flags that it reads are free for other work now"
            self.looked += 1

    monkeypatch.setattr(graph_rollout, "_picked", late)
    look = Look()
    settings = {"env": "holdfast/RepeatPreviousEasy-v0", "num_envs": 8, "num_steps": 8, "total_steps": 8 * 8 * 2}
    hf.Trainer(config(tmp_path / "run", **settings), callbacks=[look]).run()
    assert look.looked == 2


def test_a_captured_update_follows_moments_and_rates_that_a_callback_replaced(tmp_path: Path):
    class Replace(hf.Callback):
        def on_update_end(self, trainer: hf.Trainer, row: dict[str, Any]) -> None:
            optimizer = trainer.algorithm.optimizer
            for state in optimizer.state.values():
                for name, tensor in state.items():
                    state[name] = tensor.clone()
            optimizer.param_groups[0]["lr"] = 1e-4  # the next update sets its own
            gc.collect()
            torch.cuda.empty_cache()

    def weights(name: str, callbacks: list[Any]) -> list[Tensor]:
        trainer = hf.Trainer(config(tmp_path / name, total_steps=64 * 64 * 4), callbacks=callbacks)
        trainer.run()
        return [p.detach().clone() for p in trainer.policy.parameters()]

    for plain, replaced in zip(weights("plain", [hf.Callback()]), weights("replaced", [Replace()])):
        torch.testing.assert_close(replaced, plain, rtol=0, atol=0)


@pytest.mark.parametrize("raises", [lambda y: y.sum().item(), lambda y: 1 / 0], ids=["in CUDA", "in Python"])
def test_memory_of_a_capture_that_failed_is_given_back(raises: Callable[[torch.Tensor], object]):
    def fail() -> None:
        with pytest.raises((RuntimeError, ZeroDivisionError)), capturing(torch.cuda.CUDAGraph()):
            raises(torch.rand(1 << 24, device="cuda"))

    fail()  # what the first one loads stays
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    fail()
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before


def test_the_process_goes_on_after_a_capture_that_failed():
    x, stream = torch.ones(1024, device="cuda"), torch.cuda.current_stream()
    torch.manual_seed(5)
    expected = torch.rand(3, device="cuda")
    torch.manual_seed(5)
    gc.collect()  # what tests before this one left
    before = torch.cuda.memory_allocated()
    with pytest.raises(RuntimeError), capturing(torch.cuda.CUDAGraph()):
        y = torch.rand(1024, device="cuda") + x
        y.sum().item()
    del y
    gc.collect()  # the frames of the exception hold the graph, and a graph two numbers of the random generator
    assert torch.cuda.current_stream() == stream and torch.cuda.memory_allocated() <= before
    assert torch.equal(torch.rand(3, device="cuda"), expected)
    graph = torch.cuda.CUDAGraph()
    with side_stream():
        torch.rand_like(x)
    with capturing(graph):
        z = 2 * torch.rand_like(x) + x
    seen = set()
    for _ in range(3):
        graph.replay()
        assert bool((z >= 1).all() and (z < 3).all())
        seen.add(float(z.sum()))
    assert len(seen) == 3, "replays draw other numbers"
