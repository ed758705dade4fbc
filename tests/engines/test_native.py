"""PPO's gradient without autograd against autograd's, in float64, for every kind of policy that it takes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from gymnasium import spaces
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import holdfast as hf
from holdfast.algorithms.optimizers import make_optimizer
from holdfast.algorithms.ppo import ClippedLoss, LossSettings, PPOTerms
from holdfast.config import TrainConfig
from holdfast.engines import native, native_parts
from holdfast.engines.native import NativeMinibatches
from holdfast.engines.native import native_obstacle as obstacle
from holdfast.kernels.cpu import recurrence
from holdfast.policies.actor_critic import ActorCritic
from holdfast.rollout.segment import Segment
from holdfast.state import tree_map
from native_gradient import NativeGradient
from ppo_parts import make_ppo, settings_of, terms_of, update

pytestmark = pytest.mark.skipif(not recurrence.in_use(), reason=f"no native kernel: {recurrence.status()['reason']}")

ACTIONS: dict[str, spaces.Space[Any]] = {
    "discrete": spaces.Discrete(3),
    "from 2": spaces.Discrete(5, start=2),
    "box": spaces.Box(-1, 1, (2,)),
    "bits": spaces.MultiBinary(3),
    "several": spaces.MultiDiscrete([2, 4]),
}
OBS = spaces.Box(-1, 1, (4,))


def a_segment(policy: ActorCritic, T: int, B: int, seed: int = 0, masked: bool = False) -> Segment:
    """Anything a rollout could have been, from another policy: ratios away from 1, some of them clipped."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    obs = (
        {"a": normal(T, B, 4), "b": torch.randint(3, (T, B), generator=random)}
        if isinstance(policy.observation_space, spaces.Dict)
        else normal(T, B, 4)
    )
    policy.action_space.seed(seed)
    samples = torch.stack([torch.as_tensor(policy.action_space.sample()) for _ in range(T * B)])
    actions = samples.unflatten(0, (T, B))
    mask = None
    if masked:
        mask = torch.rand(T, B, int(policy.action_space.n), generator=random) < 0.5  # type: ignore[attr-defined]
        mask.scatter_(2, actions.unsqueeze(2), True)
    state = tree_map(lambda s: 0.5 * normal(*s.shape), policy.initial_state(B))
    with torch.no_grad():
        before = policy.evaluate(obs, actions, state, None, action_mask=mask)
    flags = torch.rand(T, B, generator=random) < 0.2
    return Segment(
        obs=obs, actions=actions, resets=flags, rewards=normal(T, B), log_prob=before.log_prob + 0.3 * normal(T, B),
        value=before.value + 0.2 * normal(T, B), terminated=flags, truncated=flags, advantage=normal(T, B),
        returns=before.value + normal(T, B), valid=torch.rand(T, B, generator=random) < 0.8, start_state=state,
        action_mask=mask,
    )  # fmt: skip


def in_float64(segment: Segment) -> Segment:
    def double(x: Tensor) -> Tensor:
        return x.double() if x.is_floating_point() else x

    names = ("obs", "log_prob", "value", "advantage", "returns", "start_state")
    if not isinstance(segment.actions, Tensor) or segment.actions.is_floating_point():
        names = (*names, "actions")
    wide = segment.changed(**{name: tree_map(double, getattr(segment, name)) for name in names})
    return wide.mark_all_valid() if segment.all_valid else wide


def check_against_autograd(policy: ActorCritic, segment: Segment, config: TrainConfig, all_valid: bool) -> None:
    assert obstacle(policy) is None
    segment = segment.mark_all_valid() if all_valid else segment
    native_gradient = NativeGradient(policy, settings_of(config))
    for p in policy.parameters():
        p.grad = torch.full_like(p, torch.nan)  # what was there before does not matter
    terms = native_gradient(segment)

    exact = copy.deepcopy(policy).double()
    exact.zero_grad()
    expected = terms_of(exact, in_float64(segment), settings_of(config))
    expected.loss.backward()
    for name, got, wanted in zip(PPOTerms._fields, terms, expected):
        assert float(got) == pytest.approx(float(wanted.detach()), rel=1e-5, abs=1e-6), name
    for (name, p), q in zip(policy.named_parameters(), exact.parameters()):
        wanted_grad = torch.zeros_like(q) if q.grad is None else q.grad
        assert p.grad is not None, name
        # 5e-8: a mean of terms of order 1 can cancel; what stays of their rounding does not shrink with it.
        allowed = 1e-5 * float(wanted_grad.abs().max()) + 5e-8
        assert float((p.grad.double() - wanted_grad).abs().max()) <= allowed, name


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("critic_core", ["shared", "separate", "none"])
@pytest.mark.parametrize("core", ["lstm", "gru", None])
def test_the_gradient_is_autograds_for_every_core_and_action_space(core: str | None, critic_core: str, action: str):
    torch.manual_seed(1)
    policy = ActorCritic(OBS, ACTIONS[action], core, 24, critic_core, head_sizes=(16, 8))
    config = TrainConfig(clip_value=0.1, entropy_coef=0.05)
    check_against_autograd(policy, a_segment(policy, 20, 3), config, all_valid=False)


@pytest.mark.parametrize("reset", ["zero", "learned", "detach", "never"])
@pytest.mark.parametrize("core", ["lstm", "gru"])
def test_the_gradient_is_autograds_in_every_reset_mode_and_with_layers(core: str, reset: str):
    torch.manual_seed(2)
    policy = ActorCritic(OBS, spaces.Discrete(2), core, 20, num_layers=2, reset=reset)
    check_against_autograd(policy, a_segment(policy, 15, 4), TrainConfig(), all_valid=True)


def test_the_gradient_is_autograds_with_action_masks_and_dict_observations():
    torch.manual_seed(3)
    obs = spaces.Dict({"a": OBS, "b": spaces.Discrete(3)})
    policy = ActorCritic(obs, spaces.Discrete(4), "gru", 16, "separate", encoder_sizes=(), activation="relu")
    check_against_autograd(policy, a_segment(policy, 12, 2), TrainConfig(), all_valid=False)
    check_against_autograd(policy, a_segment(policy, 12, 2, masked=True), TrainConfig(), all_valid=False)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("case", ["discrete", "from 2", "box", "masked"])
def test_minibatches_that_reuse_their_memory_have_the_gradients_of_their_own_segments(
    case: str, at_once: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(native_parts, "ENCODED_AT_ONCE", 10**9 if at_once else 0)
    torch.manual_seed(4)
    space = spaces.Dict({"a": OBS, "b": spaces.Discrete(3)})
    policy = ActorCritic(
        space, ACTIONS.get(case, ACTIONS["discrete"]), "lstm", 16, "separate", reset="learned", num_layers=2
    )
    config = TrainConfig(minibatches=3, max_grad_norm=1e9, learning_rate=1e-30)
    segment = a_segment(policy, 9, 5, seed=5, masked=case == "masked")
    engine = NativeMinibatches(
        policy, config, make_optimizer([{"params": list(policy.parameters()), "lr": config.learning_rate}], config)
    )
    engine.load(segment, ClippedLoss(settings_of(config)))
    alone = NativeGradient(policy, settings_of(config))
    for columns in (torch.tensor([3, 0]), torch.tensor([4]), torch.tensor([2, 1]), torch.tensor([0]), None):
        metrics = engine.step(columns)
        found = [p.grad.clone() for p in policy.parameters()]  # type: ignore[union-attr]
        terms = alone(segment if columns is None else segment.select(columns))
        for (name, p), grad in zip(policy.named_parameters(), found):
            assert torch.equal(grad, p.grad), (name, columns)  # type: ignore[arg-type]
        reported = dict(zip(engine.names, metrics.tolist()))
        assert all(reported[name] == float(getattr(terms, name)) for name in engine.loss.terms)


def distance_to_a_kink(policy: ActorCritic, segment: Segment) -> float:
    """The smallest input of a ReLU: rounding moves one that is nearly 0 to the other side, and the gradient with it."""
    exact, segment = copy.deepcopy(policy).double(), in_float64(segment)
    distances = [1.0]
    for module in exact.modules():
        if isinstance(module, torch.nn.ReLU):
            module.register_forward_hook(lambda _, inputs, __: distances.append(float(inputs[0].abs().min())))
    with torch.no_grad():
        exact.evaluate(segment.obs, segment.actions, segment.start_state, segment.resets)
    return min(distances)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_the_gradient_is_autograds_for_any_sizes(data: st.DataObject):
    size = st.integers(1, 70)
    torch.manual_seed(data.draw(st.integers(0, 99)))
    policy = ActorCritic(
        OBS, spaces.Discrete(data.draw(st.integers(1, 40))), data.draw(st.sampled_from(["lstm", "gru"])),
        data.draw(size), data.draw(st.sampled_from(["shared", "separate"])),
        encoder_sizes=data.draw(st.lists(size, max_size=2)), head_sizes=data.draw(st.lists(size, max_size=2)),
        activation=data.draw(st.sampled_from(["tanh", "relu"])),
    )  # fmt: skip
    segment = a_segment(policy, data.draw(st.integers(1, 40)), data.draw(st.integers(1, 9)))
    assume(distance_to_a_kink(policy, segment) > 1e-6)
    config = TrainConfig(clip_value=data.draw(st.sampled_from([None, 0.2])), entropy_coef=0.01)
    check_against_autograd(policy, segment, config, all_valid=data.draw(st.booleans()))


def test_two_threads_give_the_same_gradient():
    torch.manual_seed(4)
    policy = ActorCritic(OBS, spaces.Discrete(3), "lstm", 128, head_sizes=(256, 256))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        check_against_autograd(policy, a_segment(policy, 64, 16), TrainConfig(), all_valid=True)
    finally:
        torch.set_num_threads(before)


def test_a_whole_update_ends_at_the_weights_of_autograds(monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(5)
    config = TrainConfig(minibatches=2, epochs=3, learning_rate=1e-3, lr_schedule="constant")
    first = ActorCritic(OBS, spaces.Discrete(3), "lstm", 16, "separate")
    second = copy.deepcopy(first)
    segment = a_segment(first, 16, 4)
    metrics = update(make_ppo(first, config)[0], segment)
    monkeypatch.setattr(native, "native_obstacle", lambda policy: "a test says so")
    expected = update(make_ppo(second, config)[0], segment)
    for p, q in zip(first.parameters(), second.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-3, abs=1e-5, nan_ok=True), name


@pytest.mark.parametrize("spoiled", ["advantage", "returns", "obs", "log_prob"])
@pytest.mark.parametrize("action", ["discrete", "box"])
def test_a_loss_that_is_not_finite_takes_no_step(spoiled: str, action: str):
    policy = ActorCritic(OBS, ACTIONS[action], "lstm", 8)
    segment = a_segment(policy, 6, 2)
    getattr(segment, spoiled)[2, 1] = torch.nan
    before = copy.deepcopy(policy.state_dict())
    config = TrainConfig(minibatches=1, epochs=1, normalize_advantage=False)
    segment = segment.changed(valid=torch.ones(6, 2, dtype=torch.bool)).mark_all_valid()
    metrics = update(make_ppo(policy, config)[0], segment)
    assert metrics["train/skipped_steps"] == 1
    torch.testing.assert_close(dict(policy.state_dict()), dict(before), rtol=0, atol=0)


def test_a_nan_in_a_step_that_does_not_count_does_no_harm():
    policy = ActorCritic(OBS, spaces.Discrete(3), "lstm", 8)
    segment = a_segment(policy, 6, 2)
    segment.valid[3, 1] = False
    for name in ("advantage", "returns", "log_prob", "value"):
        getattr(segment, name)[3, 1] = torch.nan
    native_gradient = NativeGradient(policy, LossSettings())
    assert all(term.isfinite() for term in native_gradient(segment))
    assert all(p.grad is not None and p.grad.isfinite().all() for p in policy.parameters())


def test_an_action_that_is_none_is_an_error():
    policy = ActorCritic(OBS, spaces.Discrete(3), "lstm", 8)
    segment = a_segment(policy, 4, 2)
    segment.actions[1, 1] = 3
    with pytest.raises(IndexError, match="3 that the policy has"):
        update(make_ppo(policy, TrainConfig(epochs=4, minibatches=1))[0], segment)


class OwnDecode(ActorCritic):
    def decode(self, features: Tensor, action_mask: Any = None) -> tuple[Any, Tensor]:
        return super().decode(2 * features, action_mask)


def a_policy(**changes: Any) -> ActorCritic:
    return ActorCritic(OBS, spaces.Discrete(2), **{"core": "lstm", "hidden_size": 8, **changes})


def shared_weights() -> ActorCritic:
    policy = a_policy(head_sizes=(8,))
    policy.critic_head = policy.actor_head
    return policy


def frozen() -> ActorCritic:
    policy = a_policy()
    policy.actor.weight.requires_grad_(False)
    return policy


def watched_module() -> ActorCritic:
    policy = a_policy()
    policy.core.register_forward_hook(lambda *_: None)
    return policy


def watched_gradient() -> ActorCritic:
    policy = a_policy()
    policy.actor.weight.register_hook(lambda g: g)
    return policy


# What makes the policy, and a part of the reason that must be given.
LEFT_TO_AUTOGRAD = {
    "own decode": (lambda: OwnDecode(OBS, spaces.Discrete(2), "lstm", 8), "OwnDecode overrides decode"),
    "own layer": (
        lambda: setattr(p := a_policy(), "actor", nn.utils.parametrizations.weight_norm(p.actor)) or p,
        "actor is not a chain of Linear layers",
    ),
    "shared weights": (shared_weights, "layers share weights"),
    "frozen": (frozen, "actor.weight is frozen"),
    "hook on a module": (watched_module, "core has hooks"),
    "hook on a gradient": (watched_gradient, "actor.weight has a gradient hook"),
    "float64": (lambda: a_policy().double(), "is float64 on cpu"),
    "activation without a kernel": (lambda: a_policy(activation="gelu"), "trunk is not a chain of Linear layers"),
    "images": (
        lambda: ActorCritic(spaces.Box(0, 255, (8, 8, 3), "uint8"), spaces.Discrete(2), "lstm", 8),
        "the encoder has weights of its own",
    ),
    "stack": (lambda: a_policy(core=hf.Stack([hf.LSTM(8, 8), hf.GRU(8, 8)])), "and the core is Stack"),
    "portable kernel": (
        lambda: a_policy(core=hf.LSTM(8, 8, kernel="portable")),
        "on the compiled kernel, and the core is LSTM",
    ),
    "own policy": (lambda: nn.Linear(1, 1), "Linear is not an hf.ActorCritic"),
}


@pytest.mark.parametrize("case", LEFT_TO_AUTOGRAD)
def test_what_cannot_be_had_here_is_left_to_autograd(case: str):
    make, why = LEFT_TO_AUTOGRAD[case]
    reason = obstacle(make())
    assert reason is not None and why in reason
    assert obstacle(a_policy()) is None, "or else this test would show nothing"


def test_debugging_and_anomaly_detection_are_left_to_autograd():
    policy = a_policy()
    with torch.autograd.detect_anomaly(check_nan=False):
        assert obstacle(policy) is not None
    hf.debug(True)
    try:
        assert obstacle(policy) is not None
    finally:
        hf.debug(False)


def test_without_the_native_kernel_everything_is_left_to_autograd(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOLDFAST_CPU_KERNEL", "portable")
    assert obstacle(a_policy()) is not None
    assert obstacle(a_policy(core=None)) is not None
