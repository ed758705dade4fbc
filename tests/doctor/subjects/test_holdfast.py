"""Holdfast's own policies pass, and isolation is not asked of those that declare to carry memory on."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

import holdfast as hf
from cores.all_cores import CELLS, KINDS_AND_RESETS, core_of
from holdfast import doctor
from holdfast.doctor import subjects

BOX = spaces.Box(-np.inf, np.inf, (4,), np.float32)
FEW = spaces.Discrete(3)


def _policy(observations=BOX, actions=FEW, **arguments):
    torch.manual_seed(3)
    return hf.ActorCritic(observations, actions, hidden_size=16, **arguments)


@pytest.mark.parametrize(("kind", "reset"), [pair for pair in KINDS_AND_RESETS if pair[0] in CELLS])
def test_every_core_and_reset_mode_is_healthy(kind, reset):
    report = doctor.assert_healthy(_policy(core=core_of(kind, reset, 16)))
    status = {o.check: (o.status, o.said) for o in report.outcomes}
    carries = reset in ("detach", "never")
    for name in ("rollout-resets", "gradient-isolation", "nan"):
        assert (status[name] == ("not applicable", "by declaration: memory continues across episodes")) == carries, name
    assert status["replay"][0] == "passed"
    assert not [o for o in report.outcomes if o.status == "not examined"]
    assert not report.findings


@pytest.mark.parametrize(
    "policy",
    [
        lambda: _policy(critic_core="separate"),
        lambda: _policy(critic_core="none"),
        lambda: _policy(num_layers=2),
        lambda: _policy(actions=spaces.Box(-1, 1, (2,))),
        lambda: _policy(actions=spaces.MultiDiscrete([2, 3])),
        lambda: _policy(observations=spaces.Discrete(4)),
        lambda: _policy(observations=spaces.Dict(a=BOX, b=spaces.Discrete(3), c=spaces.Dict(d=spaces.MultiBinary(3)))),
        lambda: _policy(normalize_obs=True),
    ],
    ids=[
        "separate-critic",
        "memoryless-critic",
        "two-layers",
        "box",
        "multi-discrete",
        "discrete-obs",
        "dict",
        "normaliser",
    ],
)
def test_other_heads_and_observations_are_healthy(policy):
    report = doctor.assert_healthy(policy())
    assert not [o for o in report.outcomes if o.status == "not examined"], report.to_text()
    assert report.credit is not None


@pytest.mark.parametrize("actions", [FEW, spaces.MultiDiscrete([2, 3])], ids=["discrete", "multi-discrete"])
def test_action_masks_are_shown_to_both_legs(actions):
    subject = subjects.Holdfast(_policy(actions=actions), action_masks=True)
    report = doctor.assert_healthy(subject)
    assert not [o for o in report.outcomes if o.status == "not examined"], report.to_text()


def test_a_policy_that_uses_masks_in_one_leg_only_is_found():
    class Forgetful(subjects.Holdfast):
        def replay(self, segment):
            return super().replay(segment.with_(action_mask=None))

    report = doctor.examine(Forgetful(_policy(), action_masks=True))
    assert [f.cause for f in report.findings if f.severity == "error"] == ["legs-differ"]


def test_memory_that_goes_on_in_one_leg_only_is_found():
    class Half(subjects.Holdfast):
        def replay(self, segment):
            self.policy.core.reset = "zero"
            try:
                return super().replay(segment)
            finally:
                self.policy.core.reset = "never"

    report = doctor.examine(Half(_policy(reset="never")))
    (found,) = [f for f in report.findings if f.severity == "error"]
    assert found.cause == "legs-differ" and "training clears it" in found.evidence


def test_a_memoryless_policy_is_reported():
    report = doctor.examine(_policy(core=None))
    assert [f.cause for f in report.findings] == ["memoryless"]


def test_memory_shared_with_a_training_run_is_not_touched():
    policy = _policy()
    obs = np.ones((3, 4), np.float32)
    policy.act(obs)
    before = policy.get_memory()
    doctor.examine(policy)
    after = policy.get_memory()
    assert policy.memory.num_envs == 3
    flat = lambda tree: [t for t in torch.utils._pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]  # noqa: E731
    assert all(torch.equal(a, b) for a, b in zip(flat(before), flat(after)))


def test_a_small_custom_policy_is_healthy():
    class Tiny(hf.RecurrentPolicy):
        def __init__(self):
            super().__init__(core=hf.GRU(4, 8))
            self.head = nn.Linear(8, 4)

        def encode(self, obs):
            return obs

        def decode(self, features):
            out = self.head(features)
            return torch.distributions.Categorical(logits=out[:, :3]), out[:, 3]

    doctor.assert_healthy(subjects.Holdfast(Tiny(), (4,)))
