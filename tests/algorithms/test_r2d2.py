"""R2D2: rescaling and n-step returns by hand, targets against whole episodes, priorities, epsilons, resuming."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

import holdfast as hf
from holdfast.algorithms.base import RunContext
from holdfast.algorithms.r2d2 import R2D2, n_step_returns, priorities, rescaled, unscaled
from holdfast.distributed.ranks import ALONE
from holdfast.engines.choose import Engines
from holdfast.rollout.exploration import EpsilonNoise
from holdfast.rollout.segment import Segment
from holdfast.runs.log import read_progress

OBS, ACTIONS = spaces.Box(-1, 1, (3,)), spaces.Discrete(3, start=2)
SMALL: dict[str, Any] = dict(
    hidden_size=8, head_sizes=(8,), num_envs=2, num_steps=8, batch_size=4, train_length=10, burn_in=4, warmup_steps=0, n_step=3,
    buffer_size=4000, update_ratio=0.25, target_every=3, device="cpu", threads=1, tensorboard=False, quiet=True,
    final_eval_episodes=2, replay_check_every=1, lr_schedule="constant",
)  # fmt: skip


def make(**settings: Any) -> R2D2:
    torch.manual_seed(3)
    config = hf.R2D2Config(**{**SMALL, **settings})
    policy = R2D2.make_policy(config, OBS, ACTIONS)
    engines = Engines(config, torch.device("cpu"))
    algorithm = R2D2(policy, config, RunContext(ALONE, torch.device("cpu"), 1, engines, 2, ACTIONS))
    torch.manual_seed(4)
    for p in algorithm.target.parameters():  # another network, so that a mix-up shows
        p.add_(0.1 * torch.randn_like(p))
    return algorithm


def column(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers).unsqueeze(1)


def rows_of(rewards: torch.Tensor, **flags: list[int]) -> Segment:
    none = torch.zeros_like(rewards, dtype=torch.bool)
    marked = {
        name: none.index_fill(0, torch.tensor(flags.get(name, []), dtype=torch.long), True)
        for name in ("terminated", "truncated", "invalid", "resets")
    }
    return Segment(
        obs=none, actions=none.long(), resets=marked["resets"], rewards=rewards, terminated=marked["terminated"],
        truncated=marked["truncated"], valid=~marked["invalid"], start_state={},
    )  # fmt: skip


def test_rescaling_by_hand_and_back():
    assert rescaled(torch.tensor([0.0, 3.0, -8.0, 99.0])).tolist() == pytest.approx([0.0, 1.003, -2.008, 9.099])
    x = torch.tensor([-1e5, -30.0, -0.01, 0.0, 0.3, 7.0, 2e4])
    assert torch.allclose(unscaled(rescaled(x)), x, rtol=1e-5, atol=1e-6)


def test_n_step_returns_by_hand_stop_at_ends_and_at_the_last_row():
    """gamma 0.5, n = 3. Row 2 terminates; row 4 is truncated, row 5 holds its final observation; row 8 is the last."""
    rows = rows_of(
        column(1, 2, 4, 8, 16, 999, 32, 64, 999), terminated=[2], truncated=[4], invalid=[5], resets=[0, 3, 6]
    )
    value = column(10, 20, 30, 40, 50, 60, 70, 80, 90)
    all_greedy = torch.ones_like(rows.resets)
    found = n_step_returns(rows, value, all_greedy, 3, 0.5).squeeze(1).tolist()
    wanted = [1 + 1 + 1, 2 + 2, 4, 8 + 8 + 0.25 * 60, 16 + 0.5 * 60, 60, 32 + 32 + 0.25 * 90, 64 + 0.5 * 90]
    assert found == wanted
    assert n_step_returns(rows, value, all_greedy, 1, 0.5).squeeze(1).tolist()[:2] == [1 + 10, 2 + 15]


def test_n_step_returns_by_hand_end_before_an_action_that_is_not_greedy():
    """gamma 0.5, n = 3: what a random action at row 2 costs counts for row 2 alone."""
    rows, value = rows_of(column(1, 2, 4, 8, 999)), column(10, 20, 40, 80, 160)
    greedy = torch.tensor([False, True, False, True, True]).unsqueeze(1)
    found = n_step_returns(rows, value, greedy, 3, 0.5).squeeze(1).tolist()
    assert found == [1 + 1 + 0.25 * 40, 2 + 0.5 * 40, 4 + 4 + 0.25 * 160, 8 + 0.5 * 160]


def played(T: int = 30) -> Segment:
    random = torch.Generator().manual_seed(5)
    resets = torch.zeros(T, 2, dtype=torch.bool)
    terminated, truncated, valid = resets.clone(), resets.clone(), ~resets
    resets[0], terminated[6, 0], resets[7, 0] = True, True, True
    truncated[9, 1], valid[10, 1], resets[11, 1] = True, False, True
    return Segment(
        obs=torch.randn(T, 2, 3, generator=random), actions=torch.randint(3, (T, 2), generator=random) + 2, resets=resets,
        rewards=torch.randn(T, 2, generator=random), terminated=terminated, truncated=truncated, valid=valid, start_state=None,
    )  # fmt: skip


def targets_by_episode(algorithm: R2D2, batch: Segment) -> torch.Tensor:
    """In float64: each episode alone, from a fresh state; each sum written out."""
    policy, target = (copy.deepcopy(network).double() for network in (algorithm.policy, algorithm.target))
    T, B = batch.resets.shape
    value, greedy = torch.zeros(T, B, dtype=torch.float64), torch.zeros(T, B, dtype=torch.bool)
    for b in range(B):
        starts = [t for t in range(T) if batch.resets[t, b]]
        for first, last in zip(starts, [*starts[1:], T]):
            obs = batch.obs[first:last, b].double().unsqueeze(1)
            best = policy.unroll(obs, policy.initial_state(1)).dist.mode
            greedy[first:last, b] = best == batch.actions[first:last, b]
            value[first:last, b] = unscaled(target.unroll(obs, target.initial_state(1)).dist.of(best).double()).detach()
    found = torch.zeros(T - 1, B, dtype=torch.float64)
    for t in range(T - 1):
        for b in range(B):
            total, discount, at = 0.0, 1.0, t
            for _ in range(algorithm.config.n_step):
                if at == T - 1 or not batch.valid[at, b] or (at > t and not greedy[at, b]):
                    break
                total += discount * float(batch.rewards[at, b])
                discount *= 0.0 if batch.terminated[at, b] else algorithm.config.gamma
                at += 1
                if discount == 0.0:
                    break
            found[t, b] = total + (discount * float(value[at, b]) if discount else 0.0)
    return rescaled(found)


def errors(algorithm: R2D2, batch: Segment) -> torch.Tensor:
    """Q - target of rows after burn-in, with targets by episodes taken away: 0 if the page is right."""
    whole = batch.changed(start_state=algorithm.policy.initial_state(2))
    found, valid, q, _ = algorithm.errors(whole)
    return torch.where(
        valid, q.double() - found.double() - targets_by_episode(algorithm, played())[algorithm.config.burn_in :], 0.0
    )


@pytest.mark.parametrize("core", ["gru", "lstm", "lru"])
@pytest.mark.parametrize("burn_in", [0, 4])
def test_targets_equal_those_of_whole_episodes_in_double_precision(core: str, burn_in: int):
    assert float(errors(make(core=core, burn_in=burn_in), played()).abs().max()) < 1e-5


@pytest.mark.parametrize(
    "broken",
    [
        lambda s: s.changed(terminated=s.terminated.roll(1, 0)),
        lambda s: s.changed(terminated=s.terminated | s.truncated),
        lambda s: s.changed(obs=s.obs.roll(9, 0)),
        lambda s: s.changed(resets=s.resets.roll(1, 0)),
    ],
    ids=["a step late", "truncation as termination", "across the write position", "resets late"],
)
def test_broken_sequences_would_be_noticed(broken: Any):
    assert float(errors(make(), broken(played())).abs().max()) > 1e-3


def test_burn_in_gets_no_gradient():
    algorithm = make()
    batch = played().changed(start_state=algorithm.policy.initial_state(2))
    obs = batch.obs.clone().requires_grad_()
    algorithm.errors(batch.changed(obs=obs))[0].square().sum().backward()
    assert float(obs.grad[:4].abs().max()) == 0 and float(obs.grad[4:].abs().max()) > 0


def test_the_online_network_chooses_among_allowed_actions_and_the_target_network_values_them():
    algorithm = make(burn_in=0, n_step=1, rescale=False, gamma=1.0)
    batch = played().changed(start_state=algorithm.policy.initial_state(2))
    mask = torch.ones(30, 2, 3, dtype=torch.bool)
    mask[..., 1] = False
    masked = batch.changed(action_mask=mask, actions=torch.full((30, 2), 2))
    online, target = (
        n.unroll(batch.obs, batch.start_state, batch.resets, action_mask=mask).dist
        for n in (algorithm.policy, algorithm.target)
    )
    best = online.q.masked_fill(~mask.flatten(0, 1), -torch.inf).argmax(-1)
    wanted = target.q.gather(-1, best.unsqueeze(-1)).view(30, 2)
    found = algorithm.targets(masked, online.mode)
    rows = batch.valid[:-1] & ~batch.terminated[:-1]
    assert torch.allclose(found[rows], (batch.rewards[:-1] + wanted[1:])[rows], atol=1e-6)


def test_priorities_by_hand():
    size = torch.tensor([[1.0, 0.0], [3.0, 2.0], [0.0, 0.0]])
    valid = torch.tensor([[True, True], [True, True], [False, True]])
    assert priorities(size, valid).tolist() == pytest.approx([0.9 * 3 + 0.1 * 2, 0.9 * 2 + 0.1 * 2 / 3])


def test_each_environment_has_an_epsilon_of_its_own_also_when_some_act():
    algorithm = make(num_envs=2, epsilon=0.4, epsilon_spread=7.0)
    assert algorithm.epsilons() == pytest.approx([0.4, 0.4**8])
    noise = EpsilonNoise(3, 2, torch.device("cpu"))
    noise.epsilon.copy_(torch.tensor([0.0, 0.0, 1.0]))
    flags = torch.zeros(1, dtype=torch.bool)
    for _ in range(20):
        assert noise.advance(flags, torch.tensor([2]))[0, 0] < 0 <= noise.advance(flags, torch.tensor([1]))[0, 0]


def test_the_target_network_is_copied_now_and_then():
    algorithm = make()
    same = lambda: all(torch.equal(a, b) for a, b in zip(algorithm.policy.parameters(), algorithm.target.parameters()))  # noqa: E731
    copies = []
    for _ in range(6):
        batch = played(15).changed(
            start_state=algorithm.policy.initial_state(2), index=torch.zeros(2, dtype=torch.long)
        )
        algorithm.buffer.update_priorities = lambda *a: None  # type: ignore[method-assign]
        algorithm.learn(batch)
        algorithm.gradient_steps += 1
        copies.append(same())
    assert copies == [False, False, True, False, False, True]


def config(folder: Path, **settings: Any) -> hf.R2D2Config:
    task: dict[str, Any] = dict(
        env="holdfast/RepeatPreviousEasy-v0", total_steps=160, checkpoint_every=4, run_dir=str(folder)
    )
    return hf.R2D2Config(**{**SMALL, **task, **settings})


class Stop(hf.Callback):
    """As Ctrl-C would, after the first checkpoint."""

    def on_update_end(self, trainer: hf.Trainer, row: dict[str, float]) -> bool:
        return trainer.update < 4


@pytest.mark.parametrize(
    "settings",
    [
        dict(lr_schedule="linear"),
        dict(core="lstm", prioritized=False, env="holdfast/PositionOnlyCartPoleEasy-v0", layer_norm=True),
    ],
)
def test_a_resumed_run_has_the_rows_of_an_unbroken_one(tmp_path: Path, settings: dict[str, Any]):
    hf.Trainer(config(tmp_path / "whole", **settings)).run()
    rows = read_progress(tmp_path / "whole")
    assert len(rows) == 10 and max(float(row["memory/replay_gap"]) for row in rows) < 1e-5
    hf.Trainer(config(tmp_path / "part", **settings), callbacks=[Stop()]).run()
    hf.Trainer.resume(tmp_path / "part").run()
    for mine, theirs in zip(read_progress(tmp_path / "part"), rows, strict=True):
        kept = [name for name in theirs if not name.startswith("time/")]
        assert {name: mine[name] for name in kept} == {name: theirs[name] for name in kept}


def test_its_policy_is_loaded_and_examined(tmp_path: Path):
    run = hf.Trainer(config(tmp_path / "run")).run().run_dir
    policy = hf.load(run)
    assert isinstance(policy, hf.QNetwork) and not hf.doctor.examine(policy).findings
    acted = hf.Runner(policy).act(np.zeros(3, np.int64), resets=np.ones(3, bool), deterministic=True)
    assert acted.action.shape == (3,)


def test_it_trains_with_action_masks(tmp_path: Path):
    from tables import MaskedTable

    env = lambda: MaskedTable(spaces.Discrete(4), spaces.Discrete(3), 1, 0, masks=True)  # noqa: E731
    assert hf.Trainer(config(tmp_path / "run"), env=env).run().updates == 10
