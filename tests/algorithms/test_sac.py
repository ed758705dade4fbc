"""SAC: its policy, its losses against formulas and whole episodes, truncation, burn-in, resuming. Broken versions must be caught."""

from __future__ import annotations

import copy
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

import holdfast as hf
from holdfast.algorithms.base import RunContext
from holdfast.algorithms.off_policy import mean_over
from holdfast.algorithms.sac import SAC, sampled
from holdfast.distributed.ranks import ALONE
from holdfast.engines.choose import Engines
from holdfast.policies.heads import Categorical, SquashedGaussian
from holdfast.rollout.segment import Segment
from holdfast.runs.checkpoint import CheckpointError
from holdfast.runs.log import read_progress
from holdfast.state import map_tensors

BOX, OBS = spaces.Box(-2, 6, (2,)), spaces.Box(-1, 1, (3,))
SMALL: dict[str, Any] = dict(
    hidden_size=8, head_sizes=(8,), num_envs=2, num_steps=8, batch_size=4, train_length=12, warmup_steps=0, buffer_size=4000,
    device="cpu", threads=1, tensorboard=False, quiet=True, final_eval_episodes=2, replay_check_every=1,
)  # fmt: skip


def make(space: spaces.Space[Any] = BOX, **settings: Any) -> SAC:
    torch.manual_seed(3)
    config = hf.SACConfig(**{**SMALL, **settings})
    policy = SAC.make_policy(config, OBS, space)
    return SAC(
        policy, config, RunContext(ALONE, torch.device("cpu"), 1, Engines(config, torch.device("cpu")), 2, space)
    )


def played(algorithm: SAC, T: int = 40, masked: bool = False, ends: bool = True) -> Segment:
    """Random rows of the space of an algorithm: episodes end by termination, by truncation, or at the last row."""
    random = torch.Generator().manual_seed(5)
    B, space = 2, algorithm.policy.action_space
    resets = torch.zeros(T, B, dtype=torch.bool)
    terminated, truncated, valid = resets.clone(), resets.clone(), ~resets
    resets[0] = True
    if ends:
        terminated[6, 0] = True
        resets[7, 0] = True
        truncated[9, 1], valid[10, 1], resets[11, 1] = True, False, True
    if isinstance(space, spaces.Box):
        actions = torch.rand(T, B, 2, generator=random) * 8 - 2
    else:
        actions = torch.randint(3, (T, B), generator=random) + int(space.start)
    mask = None
    if masked:
        mask = torch.rand(T, B, 3, generator=random) < 0.5
        mask.scatter_(-1, (actions - int(space.start)).unsqueeze(-1), True)
    return Segment(
        obs=torch.randn(T, B, 3, generator=random), actions=actions, resets=resets,
        rewards=torch.randn(T, B, generator=random), terminated=terminated, truncated=truncated, valid=valid, action_mask=mask,
        start_state=algorithm.policy.initial_state(B),
    )  # fmt: skip


def moved_target(algorithm: SAC) -> None:
    """Targets differ from the critics, and what the actor does depends on its memory, so that a mix-up shows."""
    torch.manual_seed(7)
    with torch.no_grad():
        for p in algorithm.policy.actor_parameters():
            p.add_(0.3 * torch.randn_like(p))
    for p in algorithm.target.parameters():
        p.add_(0.1 * torch.randn_like(p))


# --- the policy -------------------------------------------------------------------------------------------------------


def test_rsample_has_the_log_probability_of_its_action_and_right_gradients_where_the_tanh_is_saturated():
    mean = torch.tensor([[0.3, -0.5], [12.0, -12.0]], dtype=torch.float64, requires_grad=True)
    dist = SquashedGaussian(
        mean, torch.tensor([-1.0, 0.5], dtype=torch.float64), torch.tensor([2.0]), torch.tensor([4.0])
    )
    torch.manual_seed(1)
    action, log_prob = dist.rsample()
    assert torch.allclose(log_prob[0], dist.log_prob(action)[0])
    # d log_prob / d mean at fixed noise is 2 tanh(u): here +-2, where the action itself no longer moves.
    (gradient,) = torch.autograd.grad(log_prob.sum(), mean)
    assert torch.allclose(gradient[1], torch.tensor([2.0, -2.0], dtype=torch.float64))


def test_log_std_keeps_its_range_and_begins_near_one():
    policy = hf.SoftActorCritic(OBS, BOX, hidden_size=8)
    wide = policy.distribution(torch.tensor([[0.0, 0.0, 1e4, -1e4]]), None)
    assert wide.log_std.tolist() == [[2.0, -5.0]]
    start, _ = policy.decode(torch.randn(5, policy._num_features()))
    assert float(start.log_std.detach().abs().max()) < 0.5 and start.params.shape == (5, 4)


@pytest.mark.parametrize("critic_core", ["separate", "shared", "none"])
@pytest.mark.parametrize("skip", [True, False])
def test_q_of_a_bounded_action_is_in_units_of_its_bounds(critic_core: str, skip: bool):
    torch.manual_seed(0)
    policy = hf.SoftActorCritic(OBS, BOX, "gru", 8, critic_core, head_sizes=(8,), skip=skip, critics=3)
    features, _ = policy.features(torch.randn(4, 2, 3), policy.initial_state(2))
    action = torch.rand(8, 2) * 8 - 2
    q = policy.q(features, action)
    by_hand = policy.critic(torch.cat([policy._parts(features)[1], (action - 2) / 4], 1)).squeeze(-1)
    assert q.shape == (3, 8) and torch.allclose(q, by_hand)
    assert not hf.doctor.examine(policy).findings


def test_the_previous_action_is_read_in_units_of_its_bounds():
    space = spaces.Dict({"obs": OBS, "prev_action": BOX})
    policy = hf.SoftActorCritic(space, BOX, hidden_size=8, normalize_obs=True)
    obs = {"obs": torch.zeros(1, 3), "prev_action": torch.tensor([[6.0, -2.0]])}
    policy.update_normalizer({"obs": torch.randn(9, 3), "prev_action": torch.full((9, 2), 5.0)})
    assert policy.encoder(obs)[0, 3:].tolist() == [1.0, -1.0]


@pytest.mark.parametrize(
    ("space", "words"),
    [
        (spaces.Box(-np.inf, 1, (2,)), "two different bounds for every action"),
        (spaces.MultiDiscrete([2, 3]), "takes Box and Discrete actions"),
    ],
)
def test_actions_that_it_cannot_learn_are_refused(space: Any, words: str):
    with pytest.raises(ValueError, match=words):
        hf.SoftActorCritic(OBS, space)


# --- targets ----------------------------------------------------------------------------------------------------------


def episodes(batch: Segment, column: int) -> list[list[int]]:
    """The rows of each episode of a column."""
    starts = [t for t in range(batch.num_steps) if batch.resets[t, column]] or [0]
    return [list(range(a, b)) for a, b in zip(starts, [*starts[1:], batch.num_steps])]


def targets_by_episode(algorithm: SAC, batch: Segment) -> torch.Tensor:
    """Targets in float64, one episode at a time from a fresh state: what the page must give if nothing is mixed up."""
    policy, target = copy.deepcopy(algorithm.policy).double(), copy.deepcopy(algorithm.target).double()
    T, B = batch.resets.shape
    values = torch.zeros(T, B, dtype=torch.float64)
    for column in range(B):
        for rows in episodes(batch, column):
            obs = batch.obs[rows, column].double().unsqueeze(1)
            features, _ = policy.features(obs, policy.initial_state(1))
            mask = None if batch.action_mask is None else batch.action_mask[rows, column]
            dist, _ = policy.decode(features, mask)
            critic, _ = target.features(obs, target.initial_state(1))
            alpha = algorithm.log_alpha.detach().double().exp()
            q = target.q(critic).amin(0)
            log_p = dist.log_probs
            soft = torch.where(log_p.exp() > 0, log_p.exp() * (q - alpha * log_p), 0.0)
            values[rows, column] = soft.sum(-1).detach().double()
    found = batch.rewards.double()[:-1].clone()
    for t in range(T - 1):
        for column in range(B):
            if not batch.terminated[t, column]:
                found[t, column] += algorithm.config.gamma * values[t + 1, column]
    return found


@pytest.mark.parametrize("core", ["gru", "lstm", "lru"])
@pytest.mark.parametrize("masked", [False, True])
def test_targets_equal_those_of_whole_episodes_in_double_precision(core: str, masked: bool):
    algorithm = make(spaces.Discrete(3, start=4), core=core)
    moved_target(algorithm)
    batch = played(algorithm, masked=masked)
    found, wanted = algorithm.losses(batch).targets.double(), targets_by_episode(algorithm, batch)
    real = batch.valid[:-1]
    assert float((found - wanted)[real].abs().max()) < 1e-5


def broken(batch: Segment, how: str) -> Segment:
    if how == "target one step late":
        return batch.changed(terminated=batch.terminated.roll(1, 0))
    if how == "truncation as termination":
        return batch.changed(terminated=batch.terminated | batch.truncated)
    if how == "across the write position":  # rows of another time follow, and nothing says so
        order = torch.cat([torch.arange(20, 40), torch.arange(0, 20)])
        return batch.changed(obs=batch.obs[order])
    assert how == "starts of another environment"
    return batch.changed(
        start_state=map_tensors(lambda x: x + 1.0, batch.start_state), resets=batch.resets.clone().fill_(False)
    )


@pytest.mark.parametrize(
    "how",
    ["target one step late", "truncation as termination", "across the write position", "starts of another environment"],
)
def test_broken_sequences_would_be_noticed(how: str):
    algorithm = make(spaces.Discrete(3))
    batch = played(algorithm)
    wanted = targets_by_episode(algorithm, batch)
    found = algorithm.losses(broken(batch, how)).targets.double()
    assert float((found - wanted)[batch.valid[:-1]].abs().max()) > 1e-3


def test_a_truncated_step_bootstraps_from_its_final_row_and_a_terminated_one_from_nothing():
    algorithm = make(spaces.Discrete(3))
    batch = played(algorithm)
    targets = algorithm.losses(batch).targets
    assert targets[6, 0] == batch.rewards[6, 0]
    changed = batch.obs.clone()
    changed[10, 1] += 1.0  # the final observation
    moved = algorithm.losses(batch.changed(obs=changed)).targets - targets
    assert moved[9, 1] != 0 and float(moved[11:].abs().max()) == 0, "and nothing behind the reset sees it"


def test_box_targets_by_hand(monkeypatch: pytest.MonkeyPatch):
    """gamma 0.5, temperature 2: r + 0.5 * (min Q' - 2 log pi)."""
    algorithm = make(gamma=0.5, initial_temperature=2.0)
    batch = played(algorithm, T=3, ends=False)
    action, log_prob = torch.zeros(6, 2, requires_grad=True), torch.arange(6.0, requires_grad=True)
    monkeypatch.setattr("holdfast.algorithms.sac.sampled", lambda dist: (action + 0 * log_prob.sum(), log_prob))
    q = torch.tensor([[10.0, 20.0, 30.0, 40.0], [11.0, 19.0, 31.0, 39.0]])
    monkeypatch.setattr(algorithm.target, "q", lambda features, actions: q)
    found = algorithm.losses(batch).targets - batch.rewards[:-1]
    assert torch.allclose(found, 0.5 * torch.tensor([[10 - 4.0, 19 - 6.0], [30 - 8.0, 39 - 10.0]]))


@pytest.mark.parametrize("burn_in", [0, 10])
def test_box_targets_are_those_of_whole_episodes_in_double_precision(monkeypatch: pytest.MonkeyPatch, burn_in: int):
    """With actions that are not drawn: tanh of the mean, and the mean's first number as log-probability."""

    def not_drawn(dist: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return dist.mean.tanh() * 4 + 2, dist.mean[:, 0]

    monkeypatch.setattr("holdfast.algorithms.sac.sampled", not_drawn)
    algorithm = make(burn_in=burn_in)
    moved_target(algorithm)
    batch = played(algorithm, ends=burn_in == 0)
    found = algorithm.losses(batch).targets.double()
    policy, target = (copy.deepcopy(network).double() for network in (algorithm.policy, algorithm.target))
    soft = torch.zeros(40, 2, dtype=torch.float64)
    for column in range(2):
        for rows in episodes(batch, column):
            obs = batch.obs[rows, column].double().unsqueeze(1)
            action, log_prob = not_drawn(policy.decode(policy.features(obs, policy.initial_state(1))[0])[0])
            q = target.q(target.features(obs, target.initial_state(1))[0], action).amin(0)
            soft[rows, column] = (q - algorithm.log_alpha.exp() * log_prob).detach().double()
    after = torch.where(batch.terminated[:-1], 0.0, soft[1:])
    wanted = (batch.rewards[:-1] + algorithm.config.gamma * after)[burn_in:]
    assert float((found - wanted)[batch.valid[burn_in:-1]].abs().max()) < 1e-5


def test_an_actor_s_gradient_is_that_of_the_objective():
    """The slope of Q by the action, times that of the action: what autograd gives for alpha * log pi - min Q."""
    algorithm = make()
    batch = played(algorithm, T=13)
    torch.manual_seed(2)
    algorithm.policy.zero_grad()
    losses = algorithm.losses(batch)
    losses.actor.backward()
    actor = algorithm.policy.actor_parameters()
    found = [p.grad.clone() for p in actor]
    assert all(p.grad is None for p in algorithm.policy.critic.parameters())
    torch.manual_seed(2)
    policy = algorithm.policy
    features, _ = policy.features(batch.obs, batch.start_state, batch.resets)
    action, log_prob = sampled(policy.decode(features)[0])
    q = policy.q(features.detach()[:-2], action[:-2]).amin(0)
    direct = mean_over(batch.valid[:-1], (log_prob[:-2] - q).view(-1, 2))
    wanted = torch.autograd.grad(direct, actor)
    assert float(losses.actor) == pytest.approx(float(direct), rel=1e-5)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, wanted))


def trained(policy: hf.SoftActorCritic) -> set[str]:
    return {name for name, p in policy.named_parameters() if p.grad is not None and float(p.grad.abs().max()) > 0}


@pytest.mark.parametrize("critic_core", ["separate", "shared"])
def test_each_loss_trains_its_own_part(critic_core: str):
    algorithm = make(critic_core=critic_core)
    batch = played(algorithm, T=13)
    policy = algorithm.policy
    algorithm.losses(batch).actor.backward()
    names = trained(policy)
    cores = {name for name in names if name.startswith("core")}
    assert cores == (
        {n for n, _ in policy.named_parameters() if n.startswith("core.cores.actor")}
        if critic_core == "separate"
        else set()
    )
    policy.zero_grad()
    algorithm.losses(batch).critic.backward()
    names = trained(policy)
    assert not any(name.startswith(("actor", "core.cores.actor")) for name in names)
    assert any(name.startswith("core") for name in names)


def test_burn_in_changes_states_and_gets_no_gradient():
    algorithm = make(spaces.Discrete(3), burn_in=10)
    moved_target(algorithm)
    batch = played(algorithm, ends=False)
    obs = batch.obs.clone().requires_grad_()
    losses = algorithm.losses(batch.changed(obs=obs))
    losses.critic.backward()
    assert float(obs.grad[:10].abs().max()) == 0 and float(obs.grad[10:].abs().max()) > 0
    wanted = targets_by_episode(algorithm, batch)[10:]
    assert float((losses.targets.double() - wanted).abs().max()) < 1e-5
    skipped = make(spaces.Discrete(3)).losses(batch.steps(10, 40)).targets
    assert float((skipped.double() - wanted).abs().max()) > 1e-4, "without burn-in the state is another one"


def test_the_temperature_follows_the_allowed_actions_and_leaves_out_single_choices():
    algorithm = make(spaces.Discrete(3), initial_temperature=2.0)
    batch = played(algorithm, T=3, ends=False)
    mask = torch.tensor([[[1, 1, 1], [1, 0, 0]], [[1, 1, 0], [1, 1, 1]], [[1, 1, 1], [1, 1, 1]]]).bool()
    losses = algorithm.losses(batch.changed(action_mask=mask, actions=torch.zeros(3, 2, dtype=torch.long)))
    features, _ = algorithm.policy.features(batch.obs, batch.start_state, batch.resets)
    entropy = Categorical(algorithm.policy.decode(features, mask.flatten(0, 1))[0].params, mask.flatten(0, 1)).entropy()
    wanted = 0.89 * torch.tensor([math.log(3), 0.0, math.log(2), math.log(3)])
    apart = (entropy[:4] - wanted)[[0, 2, 3]].mean()
    assert float(losses.temperature) == pytest.approx(2.0 * float(apart), rel=1e-5)
    (slope,) = torch.autograd.grad(losses.temperature, algorithm.log_alpha)
    assert (slope < 0) == (apart < 0) and math.isfinite(float(losses.actor + losses.critic))
    box = make(initial_temperature=2.0)
    losses = box.losses(played(box, T=3, ends=False))
    assert float(losses.temperature) == pytest.approx(2.0 * (float(losses.entropy) + 2.0), rel=1e-5)


def test_the_entropy_of_a_box_does_not_depend_on_its_bounds():
    mean, log_std = torch.randn(50, 2), torch.randn(2)
    both = []
    for half_range in (1.0, 50.0):
        torch.manual_seed(1)
        both.append(sampled(SquashedGaussian(mean, log_std, torch.zeros(2), torch.full((2,), half_range)))[1])
    assert torch.allclose(*both, atol=1e-4)


def test_an_update_with_numbers_that_are_not_finite_is_skipped():
    algorithm = make()
    batch = played(algorithm, T=13)
    batch.rewards[3, 0] = torch.nan
    before = {name: p.clone() for name, p in algorithm.policy.named_parameters()}
    found = algorithm.learn(batch)
    assert found["skipped"] == 1
    assert all(torch.equal(p, before[name]) for name, p in algorithm.policy.named_parameters())
    batch.valid[3, 0] = False
    assert algorithm.learn(batch)["skipped"] == 0 and all(p.isfinite().all() for p in algorithm.policy.parameters())


def test_the_target_moves_slowly_and_shares_the_normalizer():
    algorithm = make(normalize_obs=True, tau=0.25)
    before = [p.clone() for p in algorithm.target.parameters()]
    algorithm.policy.update_normalizer(torch.randn(100, 3) + 5)
    assert torch.equal(algorithm.target.encoder.mean, algorithm.policy.critic_encoder.mean)
    algorithm.learn(played(algorithm, T=13))
    for old, now, online in zip(before, algorithm.target.parameters(), algorithm.critics().parameters()):
        assert torch.allclose(now, old + 0.25 * (online - old), atol=1e-6)


def test_targets_take_the_smallest_of_some_critics():
    algorithm = make(critics=5, target_critics=2)
    q = torch.arange(5.0).unsqueeze(1)
    drawn = {float(algorithm.smallest(q)) for _ in range(200)}
    assert drawn == {0.0, 1.0, 2.0, 3.0}, "the largest of five is never the smallest of two"
    assert make(critics=2).smallest(q[:2]).tolist() == [0.0]


def test_learning_rates_of_their_own():
    algorithm = make(learning_rate=1.0, actor_learning_rate=2.0, critic_learning_rate=3.0, memory_learning_rate=4.0)
    names = {id(p): name for name, p in algorithm.policy.named_parameters()}
    for optimizer in algorithm.optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                name = names.get(id(p), "temperature")
                kind = next(k for k in ("core", "critic", "temperature", "") if name.startswith(k))
                assert group["lr"] == {"core": 4.0, "critic": 3.0, "temperature": 1.0, "": 2.0}[kind], name


# --- runs -------------------------------------------------------------------------------------------------------------


def config(folder: Path, **settings: Any) -> hf.SACConfig:
    task: dict[str, Any] = dict(
        env="Pendulum-v1", mask_velocity=True, total_steps=160, checkpoint_every=4, run_dir=str(folder)
    )
    return hf.SACConfig(**{**SMALL, **task, **settings})


ARCADE: dict[str, Any] = dict(env="holdfast/PositionOnlyCartPoleEasy-v0", mask_velocity=False)


@pytest.mark.parametrize(
    "settings",
    [
        dict(ARCADE),
        dict(ARCADE, core="lstm", critic_core="shared", burn_in=4, update_ratio=0.1),
        dict(ARCADE, core="lru", critics=3, normalize_reward=True, reset="learned"),
    ],
)
def test_a_resumed_run_has_the_rows_of_an_unbroken_one(tmp_path: Path, settings: dict[str, Any]):
    hf.Trainer(config(tmp_path / "whole", **settings)).run()
    rows = read_progress(tmp_path / "whole")
    assert len(rows) == 10 and max(float(row["memory/replay_gap"]) for row in rows) < 1e-5
    stopped = hf.Trainer(config(tmp_path / "part", **settings))
    stopped.config.total_steps = 64  # killed after its first checkpoint
    stopped.run()
    hf.Trainer.resume(tmp_path / "part", total_steps=160).run()
    for mine, theirs in zip(read_progress(tmp_path / "part"), rows, strict=True):
        kept = [name for name in theirs if not name.startswith("time/")]
        assert {name: mine[name] for name in kept} == {name: theirs[name] for name in kept}


def test_a_run_without_its_buffer_is_refused_and_may_begin_with_an_empty_one(tmp_path: Path):
    hf.Trainer(config(tmp_path / "run", **ARCADE)).run()
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "buffer-rank0")
    with pytest.raises(CheckpointError, match="refill_buffer"):
        hf.Trainer.resume(tmp_path / "run", total_steps=240)
    trainer = hf.Trainer.resume(tmp_path / "run", total_steps=240, refill_buffer=True)
    assert len(trainer.algorithm.buffer) == 0 and trainer.run().steps == 240
    assert hf.Trainer.resume(tmp_path / "run", total_steps=320).run().steps == 320, "once is enough"


def test_a_warm_up_leaves_no_debt(tmp_path: Path):
    trainer = hf.Trainer(config(tmp_path / "run", **ARCADE, warmup_steps=100, update_ratio=0.5))
    trainer.run()
    steps = [float(row["train/gradient_steps"]) for row in read_progress(tmp_path / "run")]
    assert steps == [0.0] * 6 + [8.0, 16.0, 24.0, 32.0]


def test_its_policy_is_loaded_shared_exported_and_run(tmp_path: Path):
    pytest.importorskip("onnxruntime")
    run = hf.Trainer(config(tmp_path / "run")).run().run_dir
    policy = hf.load(run)
    assert isinstance(policy, hf.SoftActorCritic) and not hf.doctor.examine(policy).findings
    hf.save_pretrained(policy, tmp_path / "shared")
    hf.export_policy(policy, tmp_path / "policy.onnx")
    runners = [hf.Runner(source) for source in (policy, hf.load(tmp_path / "shared"), tmp_path / "policy.onnx")]
    random = np.random.default_rng(1)
    for _ in range(10):
        obs, resets = random.normal(size=(3, 3)).astype(np.float32), random.random(3) < 0.2
        actions = [runner.act(obs, resets=resets, deterministic=True).action for runner in runners]
        assert all(np.allclose(action, actions[0], atol=1e-5) for action in actions)
    action, _ = policy.predict({"obs": obs, "prev_action": np.zeros((3, 1), np.float32)}, deterministic=True)
    assert action.shape == (3, 1) and (abs(action) <= 2).all()


def test_a_policy_of_your_own_needs_values_of_actions(tmp_path: Path):
    class Own(hf.RecurrentPolicy):
        def __init__(self, observation_space: Any, action_space: Any) -> None:
            super().__init__(core=hf.GRU(observation_space.shape[0], 8))
            self.mean, self.critic = torch.nn.Linear(8, 1), torch.nn.Linear(9, 2)

        def encode(self, obs: torch.Tensor) -> torch.Tensor:
            return obs

        def decode(self, features: torch.Tensor) -> Any:
            mean = self.mean(features)
            return SquashedGaussian(mean, torch.zeros_like(mean), torch.zeros(1), torch.full((1,), 2.0)), None

    class WithQ(Own):
        def q(self, features: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
            return self.critic(torch.cat([features, actions / 2], 1)).T

    with pytest.raises(TypeError, match=r"write q\(self, features, actions\) in Own"):
        hf.Trainer(config(tmp_path / "a"), policy=Own)
    assert hf.Trainer(config(tmp_path / "b"), policy=WithQ).run().steps == 160
