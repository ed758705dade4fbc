"""The PPO loss against numbers worked out by hand, and what an update does and does not do."""

from __future__ import annotations

import inspect
import math
from copy import deepcopy
from typing import Any

import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from torch import Tensor, nn

import holdfast as hf
from counting_env import SumPolicy, vector_env
from holdfast import envs
from holdfast.algorithms.optimizers import LearningRates
from holdfast.algorithms.ppo import LossSettings, clipped_objective, normalize_advantage
from holdfast.rollout.segment import Segment
from holdfast.state import leaves
from holdfast.training import replay_check
from ppo_parts import make_ppo, terms_of, update


def column(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32).unsqueeze(1)


def by_hand(num_envs: int = 1, **changes: Any) -> Segment:
    """Two steps, the same in each environment: advantages 1 and -1, returns 1 and 1, values 3 and 0, log-probabilities 0."""
    zeros, no = column(0, 0), torch.zeros(2, 1, dtype=torch.bool)
    parts = dict(
        obs=zeros, actions=zeros, resets=no, rewards=zeros, log_prob=zeros, value=column(3, 0), terminated=no,
        truncated=no, advantage=column(1, -1), returns=column(1, 1), valid=~no,
    )  # fmt: skip
    steps = {name: part.expand(2, num_envs) for name, part in parts.items()}
    return Segment(**{**steps, "start_state": {}, **changes})


ANSWER = column(1.5, 0.5).log(), column(0.3, 0.5), column(2, 0)
"""What the policy says now: log-probabilities, entropies, values."""


def make(core: str = "lstm", steps: int = 8, bptt: int | None = None, num_envs: int = 4, **settings: Any) -> Any:
    """A small policy, a segment of TMaze (episodes of up to 9 steps) and the PPO of a config."""
    torch.manual_seed(0)
    config = hf.TrainConfig(
        env="holdfast/TMaze-v0", hidden_size=8, num_envs=num_envs, num_steps=steps, bptt=bptt,
        **{"minibatches": 2, "epochs": 2, "learning_rate": 0.01, **settings},
    )  # fmt: skip
    env = envs.make(config.env, num_envs, env_kwargs={"length": 3})
    policy = hf.ActorCritic(env.single_observation_space, env.single_action_space, core, 8)
    autocast = torch.bfloat16 if config.precision == "bf16" else None
    collector = hf.Collector(env, policy, steps, bptt=bptt, seed=1, autocast=autocast)
    collector.rollout()
    return policy, collector.rollout(), make_ppo(policy, config)[0]


def gradient(policy: nn.Module) -> Tensor:
    return torch.cat(
        [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in policy.parameters()]
    )


# --- the loss -----------------------------------------------------------------------------------------------------


def test_loss_by_hand():
    terms = clipped_objective(*ANSWER, by_hand(), LossSettings(clip_range=0.2, value_coef=0.5, entropy_coef=0.01))
    # ratios 1.5 and 0.5: min(1.5, 1.2) = 1.2 and min(-0.5, -0.8) = -0.8, mean 0.2; value errors (2-1)^2 and (0-1)^2
    expected = {
        "policy_loss": -0.2,
        "value_loss": 0.5,
        "entropy": 0.4,
        "loss": -0.2 + 0.5 * 0.5 - 0.01 * 0.4,
        "approx_kl": ((0.5 - math.log(1.5)) + (-0.5 - math.log(0.5))) / 2,
        "clip_fraction": 1.0,
    }
    assert {name: getattr(terms, name).item() for name in expected} == pytest.approx(expected, abs=1e-6)


def test_clipped_values_by_hand():
    # The value moved from 3 to 2, but counts as 2.5: (2.5 - 1)^2 = 2.25 > 1. The other did not move.
    terms = clipped_objective(*ANSWER, by_hand(), LossSettings(clip_value=0.5))
    assert terms.value_loss.item() == pytest.approx(0.5 * (2.25 + 1) / 2)


def test_steps_that_are_not_real_are_left_out_even_if_they_are_not_finite():
    valid = torch.tensor([[True], [False]])
    answer = column(math.log(1.5), math.nan), column(0.3, math.nan), column(2, math.nan)
    terms = clipped_objective(*answer, by_hand(valid=valid), LossSettings(entropy_coef=0.01))
    assert terms.loss.item() == pytest.approx(-1.2 + 0.5 * 0.5 - 0.01 * 0.3)
    assert terms.approx_kl.item() == pytest.approx(0.5 - math.log(1.5))


def test_without_a_change_of_weights_the_loss_has_ratio_one():
    policy, segment, _ = make()
    terms = terms_of(policy, segment)
    assert terms.approx_kl.abs().item() < 1e-6 and terms.clip_fraction.item() == 0
    assert terms.policy_loss.item() == pytest.approx(-segment.advantage.mean().item(), abs=1e-5)


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_advantages_of_any_size_are_normalized_alike(size: float):
    advantage = torch.randn(20, 1, generator=torch.Generator().manual_seed(0))
    segments = [by_hand(10, advantage=(factor * advantage).view(2, 10)) for factor in (1.0, size)]
    usual, other = (normalize_advantage(segment).advantage for segment in segments)
    torch.testing.assert_close(other, usual, rtol=1e-5, atol=1e-6)
    assert float(other.std(unbiased=False)) == pytest.approx(1, rel=1e-5)


def test_advantages_are_normalised_over_real_steps():
    valid = torch.tensor([[1, 1], [1, 0]]).bool()
    segment = by_hand(num_envs=2, advantage=torch.tensor([[1.0, 3.0], [5.0, 1e6]]), valid=valid)
    normal = normalize_advantage(segment)
    real = normal.advantage[valid]
    assert real.tolist() == pytest.approx([-(1.5**0.5), 0.0, 1.5**0.5], abs=1e-6)
    assert segment.advantage[1, 1] == 1e6, "a copy"
    same = normalize_advantage(by_hand(advantage=column(2, 2)))
    assert same.advantage.tolist() == [[0.0], [0.0]]


def test_ppo_loss_is_the_normalised_objective():
    policy, segment, _ = make()
    loss = hf.ppo_loss(policy, segment, entropy_coef=0.0, value_coef=0.0)
    assert loss.item() == pytest.approx(0.0, abs=1e-5) and loss.requires_grad


# --- sequences ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("core", ["lstm", "gru"])
def test_minibatches_of_environments_add_up_to_the_whole_gradient(core: str):
    policy, segment, _ = make(core)
    terms_of(policy, segment).loss.backward()
    whole = gradient(policy)
    policy.zero_grad()
    for columns in torch.arange(4).split(1):
        (terms_of(policy, segment.select(columns)).loss / 4).backward()
    torch.testing.assert_close(gradient(policy), whole, rtol=1e-4, atol=1e-6)


def test_chunks_as_long_as_the_segment_give_the_same_gradient():
    policy, segment, _ = make(bptt=8)
    gradients = []
    for batch in (segment, segment.as_sequences(8)):
        policy.zero_grad()
        terms_of(policy, batch).loss.backward()
        gradients.append(gradient(policy))
    assert torch.equal(*gradients)


def test_chunks_have_the_same_loss_and_cut_the_gradient_between_them():
    policy, segment, _ = make(bptt=4)
    cut = segment.as_sequences(4)
    assert cut.resets.shape == (4, 8)
    losses, gradients = [], []
    for batch in (segment, cut):
        policy.zero_grad()
        loss = terms_of(policy, batch).loss
        loss.backward()
        losses.append(loss.item())
        gradients.append(policy.core.weight_hh_l0.grad.clone())
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    assert (gradients[0] - gradients[1]).abs().max() > 1e-6


def test_every_sequence_is_in_exactly_one_minibatch_of_each_epoch():
    _, _, ppo = make(minibatches=3, num_envs=7)
    epochs = [ppo.minibatches(7, torch.device("cpu")) for _ in range(4)]
    for parts in epochs:
        assert [len(part) for part in parts] == [3, 2, 2]
        assert sorted(torch.cat(parts).tolist()) == list(range(7))
    assert len({tuple(torch.cat(parts).tolist()) for parts in epochs}) > 1, "shuffled again"


# --- the update ---------------------------------------------------------------------------------------------------


def test_an_update_changes_weights_and_neither_memory_nor_the_segment():
    policy, segment, ppo = make()
    weights = torch.cat([p.detach().flatten().clone() for p in policy.parameters()])
    memory = policy.memory.state_dict()
    kept = {name: getattr(segment, name).clone() for name in ("advantage", "log_prob", "returns", "value", "resets")}
    metrics = update(ppo, segment, 0.0)
    assert not torch.equal(weights, torch.cat([p.flatten() for p in policy.parameters()]))
    assert all(torch.equal(a, b) for a, b in zip(memory["leaves"], policy.memory.state_dict()["leaves"]))
    assert all(torch.equal(value, getattr(segment, name)) for name, value in kept.items())
    assert {"train/policy_loss", "train/approx_kl", "train/entropy", "train/grad_norm"} <= metrics.keys()
    assert all(math.isfinite(value) for value in metrics.values())


def test_epochs_stop_when_the_policy_has_moved_further_than_the_target():
    _, segment, ppo = make(epochs=5, target_kl=1e-7, learning_rate=0.05)
    assert update(ppo, segment, 0.0)["train/epochs"] < 5
    _, segment, ppo = make(epochs=5, target_kl=1e7, learning_rate=0.05)
    assert update(ppo, segment, 0.0)["train/epochs"] == 5


def test_learning_rate_schedules():
    rates = {}
    for schedule in ("constant", "linear", "cosine"):
        ppo = make(learning_rate=0.4, lr_schedule=schedule)[2]
        rates[schedule] = [round(ppo.rates.set(done), 6) for done in (0.0, 0.25, 0.5, 1.0)]
    assert rates["constant"] == [0.4, 0.4, 0.4, 0.4]
    assert rates["linear"] == [0.4, 0.3, 0.2, 0.0]
    assert rates["cosine"] == [0.4, round(0.2 * (1 + 0.5**0.5), 6), 0.2, 0.0]


def test_the_scheduled_rate_is_the_one_used():
    policy, segment, ppo = make(lr_schedule="linear", learning_rate=0.1)
    before = [p.detach().clone() for p in policy.parameters()]
    metrics = update(ppo, segment, 1.0)
    assert metrics["train/learning_rate"] == 0.0
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters()))


def test_a_rate_that_captured_steps_read_stays_the_same_tensor_when_somebody_sets_another():
    _, _, ppo = make(learning_rate=0.1)
    rate = torch.tensor(0.1)
    ppo.optimizer.param_groups[0]["lr"] = rate  # as on a GPU
    rates = LearningRates([ppo.optimizer], ppo.config)
    ppo.optimizer.param_groups[0]["lr"] = 1e-4
    rates.set(0.0)
    assert ppo.optimizer.param_groups[0]["lr"] is rate and float(rate) == pytest.approx(0.1)


@pytest.mark.parametrize("max_norm", [1e-3, 1e3])
def test_a_step_is_adams_with_gradients_clipped_to_the_norm_asked_for(max_norm: float):
    policy, segment, ppo = make(max_grad_norm=max_norm, epochs=1, minibatches=1, normalize_advantage=False)
    twin = deepcopy(policy)
    adam = torch.optim.Adam(twin.parameters(), lr=0.01, eps=ppo.config.adam_eps)
    for _ in range(3):
        metrics = update(ppo, segment, 0.0)
        adam.zero_grad()
        terms_of(twin, segment).loss.backward()
        norm = nn.utils.clip_grad_norm_(twin.parameters(), max_norm)
        adam.step()
        assert metrics["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    for mine, theirs in zip(policy.parameters(), twin.parameters()):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_gradients_that_are_not_finite_leave_the_weights_as_they_were():
    policy, segment, ppo = make(epochs=1, normalize_advantage=False)
    before = [p.detach().clone() for p in policy.parameters()]
    segment.advantage[0] = torch.inf
    update(ppo, segment, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters()))


def test_two_runs_with_the_same_seed_are_the_same_and_a_restored_one_goes_on_the_same():
    results = []
    for _ in range(2):
        policy, segment, ppo = make()
        update(ppo, segment, 0.0)
        results.append((policy, segment, ppo))
    (policy, segment, ppo), (_, _, other) = results
    fresh_policy, _, restored = make()
    fresh_policy.load_state_dict(policy.state_dict())
    restored.load_state_dict(deepcopy(ppo.state_dict()))
    metrics = [update(p, segment, 0.5) for p in (ppo, other, restored)]
    assert metrics[0] == metrics[1] == metrics[2]


def test_a_restored_optimizer_keeps_the_options_of_its_own_run():
    """What another device saved (a tensor as the rate, capturable) must not reach this one's optimizer."""
    _, segment, ppo = make(learning_rate=0.02)
    update(ppo, segment, 0.0)
    saved = deepcopy(ppo.state_dict())
    group = saved["optimizer"]["param_groups"][0]
    group.update(lr=torch.tensor(0.5), capturable=True, eps=0.1)
    _, _, other = make(learning_rate=0.02)
    other.load_state_dict(saved)
    own = other.optimizer.param_groups[0]
    assert own["lr"] == 0.02 and own["capturable"] is False and own["eps"] == other.config.adam_eps
    assert len(other.optimizer.state) == len(ppo.optimizer.state), "its moments are taken over"


# --- start states -------------------------------------------------------------------------------------------------


def test_refreshed_start_states_are_those_of_the_present_weights():
    policy, segment, ppo = make(bptt=2, refresh_states=True)
    stored = segment.as_sequences(2).start_state
    for mine, theirs in zip(leaves(ppo.refreshed_starts(segment)), leaves(stored)):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
    with torch.no_grad():
        for p in policy.parameters():
            p.mul_(1.5)
    fresh = ppo.refreshed_starts(segment)
    first_half = policy.evaluate(
        segment.obs[:4], segment.actions[:4], segment.start_state, segment.resets[:4], return_state=True
    ).state
    for new, old, expected in zip(leaves(fresh), leaves(stored), leaves(first_half)):
        assert torch.equal(new[:4], old[:4]), "the first start is what the rollout had"
        torch.testing.assert_close(new[8:12], expected, rtol=0, atol=1e-6)
        assert (new[8:12] - old[8:12]).abs().max() > 1e-3


def test_refreshing_changes_later_epochs_only():
    def metrics(epochs: int, refresh: bool) -> dict[str, float]:
        _, segment, ppo = make(bptt=2, epochs=epochs, refresh_states=refresh, learning_rate=0.05)
        return update(ppo, segment)

    assert metrics(1, True) == metrics(1, False)
    assert metrics(3, True) != metrics(3, False)


# --- precision ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("core", ["lstm", "gru"])
def test_half_precision_trains_in_both_legs_with_full_precision_weights(core: str):
    policy, segment, ppo = make(core, precision="bf16", minibatches=1, epochs=1)
    gap = replay_check.measure(policy, segment, torch.bfloat16)
    assert gap.size < 1e-2
    full = replay_check.measure(policy, segment)
    assert full.size > gap.size, "the rollout ran in half precision"
    metrics = update(ppo, segment, 0.0)
    assert all(math.isfinite(value) for value in metrics.values())
    for name, p in policy.named_parameters():
        assert p.dtype == torch.float32
        assert p.grad is not None and p.grad.isfinite().all() and p.grad.abs().sum() > 0, name


def test_explained_variance_is_one_for_a_perfect_critic():
    _, segment, ppo = make(epochs=1)
    segment.returns = segment.value.clone()
    assert update(ppo, segment, 0.0)["train/explained_variance"] == pytest.approx(1.0)


def test_a_rollout_with_dummy_steps_trains():
    torch.manual_seed(0)
    env = vector_env(AutoresetMode.NEXT_STEP, {}, {"unit": 0.5, "ends": ("truncated",)})
    policy = hf.ActorCritic(env.single_observation_space, env.single_action_space, "gru", 8)
    segment = next(hf.collect(env, policy, 9))
    config = hf.TrainConfig(num_envs=2, num_steps=9, epochs=4, minibatches=1)
    metrics = update(make_ppo(policy, config)[0], segment)
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("schedule, expected", [("constant", [0.2, 0.2, 0.2]), ("linear", [0.2, 0.1, 0.0])])
def test_the_clip_range_stays_or_falls_linearly_over_the_run(schedule: Any, expected: list[float]):
    config = hf.TrainConfig(num_envs=2, num_steps=4, epochs=1, minibatches=1, clip_schedule=schedule)
    policy = hf.ActorCritic(spaces.Box(-1, 1, (3,)), spaces.Discrete(2), "gru", 8)
    ppo, _ = make_ppo(policy, config)
    assert [ppo.loss_settings(progress).clip_range for progress in (0.0, 0.5, 1.0)] == pytest.approx(expected)


@pytest.mark.parametrize("schedule, expected", [("constant", [0.01, 0.01, 0.01]), ("linear", [0.01, 0.005, 0.0])])
def test_the_entropy_bonus_stays_or_falls_linearly_over_the_run(schedule: Any, expected: list[float]):
    config = hf.TrainConfig(num_envs=2, num_steps=4, epochs=1, minibatches=1, entropy_schedule=schedule)
    policy = hf.ActorCritic(spaces.Box(-1, 1, (3,)), spaces.Discrete(2), "gru", 8)
    ppo, _ = make_ppo(policy, config)
    assert [ppo.loss_settings(progress).entropy_coef for progress in (0.0, 0.5, 1.0)] == pytest.approx(expected)


def test_ppo_loss_takes_a_policy_inside_ddp_and_refuses_other_modules():
    policy, segment, _ = make()

    class Wrapper(nn.Module):  # as DDP
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, *args: Any, **options: Any) -> Any:
            return self.module(*args, **options)

    assert hf.ppo_loss(Wrapper(policy), segment).item() == hf.ppo_loss(policy, segment).item()  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"takes an hf\.RecurrentPolicy, alone or inside DDP, got a Linear"):
        hf.ppo_loss(nn.Linear(1, 1), segment)  # type: ignore[arg-type]


def test_policy_and_segment_in_the_wrong_order_are_named():
    policy = SumPolicy()
    segment = next(hf.collect(vector_env(AutoresetMode.SAME_STEP, {}), policy, steps=4))
    with pytest.raises(TypeError, match=r"got a Segment and a SumPolicy; write hf\.ppo_loss\(policy, segment\)"):
        hf.ppo_loss(segment, policy)  # type: ignore[arg-type]


def test_the_loss_shows_its_arguments_to_editors():
    parameters = inspect.signature(hf.ppo_loss).parameters.values()
    assert {"clip_range", "clip_value", "entropy_coef", "value_coef"} <= {p.name for p in parameters}
    assert not any(p.kind is p.VAR_KEYWORD for p in parameters)
