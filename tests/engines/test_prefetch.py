"""A rollout that starts before its turn changes nothing: on the CPU, with graphs that are played again into the same tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast as hf
from holdfast import envs
from holdfast.engines import choose
from holdfast.rollout.collector import Collector
from holdfast.rollout.segment import PER_STEP, Segment
from holdfast.runs import checkpoint
from holdfast.runs.log import read_progress
from holdfast.state import leaves
from uncaptured import UncapturedCollector


def make(task: str, seed: int, kind: type[Collector] = UncapturedCollector, core: str = "lstm") -> Collector:
    env = envs.make(f"holdfast/{task}-v0", 6)
    torch.manual_seed(seed)
    policy = hf.ActorCritic(env.single_observation_space, env.single_action_space, core=core, hidden_size=8)
    collector = kind(env, policy, 10, bptt=5, gamma=0.9, seed=seed)
    torch.manual_seed(seed)
    return collector


def numbers(segment: Segment) -> list[Any]:
    parts = [leaves(getattr(segment, name)) for name in (*PER_STEP, "chunk_states", "start_state")]
    tensors = [leaf.clone() for part in parts for leaf in part if leaf is not None]
    return [*tensors, list(segment.episode_returns), list(segment.episode_lengths)]


def same(mine: Any, theirs: Any) -> bool:
    return torch.equal(mine, theirs) if isinstance(mine, torch.Tensor) else mine == theirs


@pytest.mark.parametrize(
    ("task", "core", "seed"),
    [("RepeatPreviousEasy", "lstm", 4), ("PositionOnlyCartPoleEasy", "gru", 5), ("TMaze", "window", 6)],
)
def test_rollouts_are_the_same_whether_they_start_early_or_were_taken_back(task: str, core: str, seed: int):
    usual, wanted = make(task, seed, core=core), []
    for _ in range(9):
        wanted.append((numbers(usual.rollout()), leaves(usual.state_dict()), torch.get_rng_state()))
    early = make(task, seed, core=core)
    segment = early.rollout()
    for i, (played, state, random) in enumerate(wanted):
        kept = early.prefetch(segment)
        assert kept is not None and all(map(same, numbers(kept), played))
        if i % 3 == 1:
            early.cancel_prefetch()
            assert len(state) > 8 and all(map(same, leaves(early.state_dict()), state))
            assert torch.equal(torch.get_rng_state(), random)
        segment = early.rollout()


def test_only_captured_rollouts_prefetch():
    collector = make("RepeatPreviousEasy", 7, Collector)
    assert collector.prefetch(collector.rollout()) is None
    collector.cancel_prefetch()
    captured = make("RepeatPreviousEasy", 7)
    segment = captured.rollout()
    captured.prefetches = False  # type: ignore[attr-defined]
    assert captured.prefetch(segment) is None


class Stop(hf.Callback):
    only_watches = True

    def on_update_end(self, trainer: hf.Trainer, row: dict[str, float]) -> bool:
        return trainer.update != 7


def trainer(folder: Path, monkeypatch: pytest.MonkeyPatch, env: str, *callbacks: hf.Callback) -> hf.Trainer:
    """With rollouts that write the same tensors each time."""
    monkeypatch.setattr(choose, "Collector", UncapturedCollector)
    if (folder / "config.json").exists():
        return hf.Trainer.resume(folder, callbacks=callbacks)
    config = hf.TrainConfig(
        env=f"holdfast/{env}-v0", device="cpu", num_envs=8, num_steps=16, hidden_size=8, minibatches=2, epochs=1,
        total_steps=8 * 16 * 15, replay_check_every=6, checkpoint_every=4, run_dir=str(folder), tensorboard=False, quiet=True,
        final_eval_episodes=1, normalize_value=True,
    )  # fmt: skip
    return hf.Trainer(config, callbacks=callbacks)


@pytest.mark.parametrize("env", ["RepeatPreviousEasy", "PositionOnlyCartPoleEasy"])
def test_a_run_that_prefetches_writes_the_same_rows_also_after_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, env: str
):
    began: list[int] = []
    prefetch = UncapturedCollector.prefetch

    def counted(self: Any, segment: Segment) -> Any:
        began.append(1)
        return prefetch(self, segment)

    monkeypatch.setattr(UncapturedCollector, "prefetch", counted)
    trainer(tmp_path / "ahead", monkeypatch, env).run()
    assert len(began) == 15 - 1 - 3 - 3, "not in the last update, before a checkpoint or in one with a replay check"
    stopped = trainer(tmp_path / "stopped", monkeypatch, env, Stop())
    assert stopped.run().stopped_by == "callback"
    trainer(tmp_path / "stopped", monkeypatch, env).run()
    monkeypatch.setattr(UncapturedCollector, "prefetches", False)
    trainer(tmp_path / "usual", monkeypatch, env).run()
    usual, ahead, resumed = (read_progress(tmp_path / name) for name in ("usual", "ahead", "stopped"))
    assert len(usual) == len(ahead) == len(resumed) == 15
    for wanted, *others in zip(usual, ahead, resumed):
        for row in others:
            kept = [name for name in wanted if not name.startswith("time/")]
            assert {name: row[name] for name in kept} == {name: wanted[name] for name in kept}


def test_a_callback_that_may_change_the_run_sees_it_as_the_update_left_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    class Look(hf.Callback):
        ahead: bool = False

        def on_update_end(self, trainer: hf.Trainer, row: dict[str, float]) -> None:
            self.ahead |= trainer.collector._prefetched is not None

    look, watch = Look(), Look()
    watch.only_watches = True
    trainer(tmp_path / "one", monkeypatch, "RepeatPreviousEasy", look).run()
    trainer(tmp_path / "other", monkeypatch, "RepeatPreviousEasy", watch).run()
    assert not look.ahead and watch.ahead


def test_skipped_updates_keep_their_own_rollout_and_clear_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The evidence is the rollout that was trained on; the next one starts from the memory that was cleared."""
    seen: list[Segment] = []

    class Spoil(hf.Callback):
        only_watches = True

        def on_rollout_end(self, trainer: hf.Trainer, segment: hf.Segment) -> None:
            seen.append(segment.map_tensors(torch.clone))
            if trainer.update == 2:
                segment.advantage.fill_(float("nan"))
                trainer.collector.memory.rows.state["h"][3].fill_(float("nan"))

    run = trainer(tmp_path / "run", monkeypatch, "RepeatPreviousEasy", Spoil())
    run.run()
    assert run.nonfinite_guard.total == 1
    (file,) = (tmp_path / "run" / "nonfinite").glob("*.pt")
    evidence = checkpoint.load(file)["segment"]
    assert torch.equal(evidence["actions"], seen[2].actions) and not torch.equal(seen[3].actions, seen[2].actions)
    assert all(bool(s.value.isfinite().all()) for s in seen)
    assert not seen[3].start_state["h"][3].any(), "a fresh row"
