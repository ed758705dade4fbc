"""Policies as people write them, given to the doctor without a subject: their form is found, and so are their mistakes."""

import pytest
import torch
from gymnasium import spaces
from torch import nn
from torch.distributions import Categorical

from broken.base import OBS
from broken.cleanrl_agents import Agent, NeverResets
from broken.puffer_policies import BROKEN as PUFFER
from holdfast import doctor
from holdfast.doctor.examine import CannotExamine
from holdfast.doctor.subjects.choose import as_subject


class BatchFirst(nn.Module):
    """`[B, T, ...]`, a tuple as state, logits and a value."""

    def __init__(self):
        super().__init__()
        self.encoder, self.lstm = nn.Linear(6, 16), nn.LSTM(16, 12, batch_first=True)
        self.actor, self.critic = nn.Linear(12, 3), nn.Linear(12, 1)

    def forward(self, x, hidden=None):
        y, hidden = self.lstm(self.encoder(x).relu(), hidden)
        return self.actor(y), self.critic(y).squeeze(-1), hidden


class Cell(nn.Module):
    """One step `[B, ...]`."""

    def __init__(self):
        super().__init__()
        self.encoder, self.cell = nn.Linear(6, 8), nn.GRUCell(8, 12)
        self.actor, self.critic = nn.Linear(12, 3), nn.Linear(12, 1)

    def forward(self, obs, h):
        h = self.cell(self.encoder(obs).tanh(), h)
        return self.actor(h), self.critic(h).squeeze(-1), h


class DetachingCell(Cell):
    def forward(self, obs, h):
        return super().forward(obs, h if h is None else h.detach())


class ForgetfulCell(Cell):
    def forward(self, obs, h):
        return super().forward(obs, None)


class StateFirst(Cell):
    def forward(self, obs, h):
        logits, value, h = super().forward(obs, h)
        return h, (logits, value)


class ReturnsADistribution(Cell):
    def forward(self, obs, h):
        logits, value, h = super().forward(obs, h)
        return Categorical(logits=logits), value, h


class Samples(Cell):
    """Only the value is the same from call to call."""

    def forward(self, obs, h):
        logits, value, h = super().forward(obs, h)
        action = Categorical(logits=logits).sample()
        return action, Categorical(logits=logits).log_prob(action), value, h


class Masks(Cell):
    """A mask that is 0 at the first step of an episode."""

    def keep(self, h, masks):
        return torch.where(masks.bool().unsqueeze(-1), h, torch.zeros_like(h))

    def forward(self, inputs, rnn_hxs, masks):
        return super().forward(inputs, None if rnn_hxs is None else self.keep(rnn_hxs, masks))


class IgnoresMasks(Masks):
    def keep(self, h, masks):
        return h


class Flattened(Masks):
    """The form of pytorch-a2c-ppo-acktr: `[T*B, ...]` and masks `[T*B, 1]` with a state `[B, H]`, which says what B is."""

    def rows(self, flat, count):
        return flat.view(-1, count, flat.shape[-1])

    def keep(self, h, masks):
        return torch.where(masks > 0, h, torch.zeros_like(h))

    def forward(self, x, hxs, masks):
        count, outputs = len(hxs), []
        for x_t, masks_t in zip(self.rows(self.encoder(x).tanh(), count), self.rows(masks, count)):
            hxs = self.cell(x_t, self.keep(hxs, masks_t))
            outputs.append(hxs)
        y = torch.cat(outputs)
        return self.critic(y), self.actor(y), hxs


class IgnoresMasksInTraining(Flattened):
    """Sequences go to the layer whole."""

    def forward(self, x, hxs, masks):
        return super().forward(x, hxs, masks if len(x) == len(hxs) else torch.ones_like(masks))


class DonesForMasks(Flattened):
    def keep(self, h, masks):
        return super().keep(h, 1 - masks)


class EnvironmentsFirst(Flattened):
    """Takes `[B*T, ...]`, and gets `[T*B, ...]`."""

    def rows(self, flat, count):
        return flat.view(count, -1, flat.shape[-1]).transpose(0, 1)


class StateDict(nn.Module):
    """A dict as state, made by the policy, and `done` as 0.0 and 1.0."""

    def __init__(self):
        super().__init__()
        self.actor, self.critic, self.head = nn.GRUCell(6, 8), nn.GRUCell(6, 5), nn.Linear(8, 3)

    def initial_state(self, num_envs):
        return {key: self.head.weight.new_zeros(num_envs, size) for key, size in (("actor", 8), ("critic", 5))}

    def clear(self, h, done):
        return torch.where((1.0 - done.unsqueeze(-1)) > 0, h, torch.zeros_like(h))

    def forward(self, obs, state, done):
        actor = self.actor(obs, self.clear(state["actor"], done))
        critic = self.critic(obs, self.clear(state["critic"], done))
        return self.head(actor), critic, {"actor": actor, "critic": critic}


class ClearsTheCriticOnly(StateDict):
    def clear(self, h, done):
        return h if h.shape[-1] == 8 else super().clear(h, done)


class Pictures(nn.Module):
    """`[T, B, 3, 20, 20]` through convolutions."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(3, 4, 5, 5), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8))
        self.gru, self.head = nn.GRU(8, 8), nn.Linear(8, 3)

    def forward(self, obs, h=None):
        x = self.conv(obs.flatten(0, 1)).unflatten(0, obs.shape[:2])
        y, h = self.gru(x, h)
        return self.head(y), h


class StateSpace(nn.Module):
    """A diagonal state-space layer that takes resets."""

    def __init__(self):
        super().__init__()
        self.enter, self.decay, self.leave = nn.Linear(6, 8), nn.Parameter(torch.zeros(8)), nn.Linear(8, 3)

    def forward(self, x, state, resets):
        u, h, outputs = self.enter(x), state, []
        h = u.new_zeros(u.shape[1:]) if h is None else h
        for u_t, first in zip(u, resets):
            h = self.decay.sigmoid() * torch.where(first.unsqueeze(-1), torch.zeros_like(h), h) + u_t
            outputs.append(h)
        return self.leave(torch.stack(outputs)), h


class StateSpaceWithDropout(StateSpace):
    def __init__(self):
        super().__init__()
        self.enter = nn.Sequential(nn.Dropout(0.3), nn.Linear(6, 8))


class Keeps(nn.Module):
    """Its own state, as two attributes."""

    def __init__(self):
        super().__init__()
        self.cell, self.head, self.hx, self.cx = nn.LSTMCell(6, 8), nn.Linear(8, 3), None, None

    def reset(self, done):
        clear = lambda x: torch.where(done.unsqueeze(-1), torch.zeros_like(x), x)  # noqa: E731
        self.hx, self.cx = clear(self.hx), clear(self.cx)

    def forward(self, obs, done):
        if self.hx is None or len(self.hx) != len(obs):
            self.hx = self.cx = self.head.weight.new_zeros(len(obs), 8)
        self.reset(done)
        self.hx, self.cx = self.cell(obs, (self.hx.detach(), self.cx.detach()))
        return self.head(self.hx)


class KeepsItsCell(Keeps):
    def reset(self, done):
        kept = self.cx
        super().reset(done)
        self.cx = kept


def _errors(policy, **options):
    torch.manual_seed(3)
    report = doctor.examine(policy(), **options)
    return report, [f.cause for f in report.findings if f.severity == "error"]


HEALTHY = {
    BatchFirst: "Module(batch_first=True, state_batch_dim=1)",
    Cell: "Module(one_step=True, state_batch_dim=0)",
    StateFirst: "Module(returns='state first', one_step=True, state_batch_dim=0)",
    ReturnsADistribution: "Module(one_step=True, state_batch_dim=0)",
    Samples: "Module(one_step=True, state_batch_dim=0)",
    Masks: "Module(one_step=True, flags=goes_on, state_batch_dim=0)",
    Flattened: "Module(flattened=True, initial_state=zeros of size 12, flags=goes_on, state_batch_dim=0)",
    StateDict: "Module(one_step=True, initial_state=initial_state, flags=as_numbers, state_batch_dim=0)",
    Pictures: "Module(state_batch_dim=1)",
    StateSpace: "Module(state_batch_dim=0)",
}


@pytest.mark.parametrize("policy", HEALTHY, ids=lambda kind: kind.__name__)
def test_a_policy_without_a_subject_is_examined_as_it_is_used(policy):
    report, errors = _errors(policy)
    assert (report.subject, report.examined_as) == (policy.__name__, f"subjects.{HEALTHY[policy]}")
    assert f"examined as subjects.{HEALTHY[policy]}" in " ".join(report.to_text().split())
    assert errors == [], report.to_text()


BROKEN = {
    DetachingCell: ["over-detached"],
    ForgetfulCell: ["memoryless"],
    IgnoresMasks: ["never-resets"],
    ClearsTheCriticOnly: ["partial-reset"],
    IgnoresMasksInTraining: ["reset-dropped-in-training"],
    DonesForMasks: ["memoryless"],
    EnvironmentsFirst: ["layout-swapped"],
    StateSpaceWithDropout: ["random-training-leg"],
}


@pytest.mark.parametrize("policy", BROKEN, ids=lambda kind: kind.__name__)
def test_its_mistake_is_named(policy):
    assert _errors(policy)[1] == BROKEN[policy]


def test_an_agent_of_cleanrl_is_known_by_its_methods():
    report, errors = _errors(Agent)
    assert (report.examined_as, errors) == ("subjects.CleanRL(agent)", [])
    assert _errors(NeverResets)[1] == ["never-resets"]


def test_a_policy_of_pufferlib_is_known_by_its_methods():
    torch.manual_seed(0)
    given = PUFFER[0].healthy()
    policy, space = given.policy, given.space.space
    assert as_subject(policy, space).recognized_as == "subjects.Puffer(policy)"


def test_a_state_of_its_own_is_found_by_what_a_step_changes():
    report, errors = _errors(Keeps, bptt=1)
    assert report.examined_as == "subjects.Stateful(hidden=('hx', 'cx'), reset='done')"
    assert errors == [], report.to_text()
    assert _errors(KeepsItsCell, bptt=1)[1] == ["partial-reset"]


def test_outputs_that_are_sampled_are_left_out_and_the_report_says_so():
    report, _ = _errors(Samples)
    (note,) = [f for f in report.findings if f.cause == "outputs-left-out"]
    assert note.evidence == "compared: 1 of 3 items (number 3) of what Samples returns next to its state"


def test_observations_of_several_parts_are_read_from_the_policys_space():
    class TwoInputs(Cell):
        observation_space = spaces.Dict({"a": spaces.Box(-1, 1, (2,)), "b": spaces.Box(-1, 1, (4,))})

        def forward(self, obs, h):
            return super().forward(torch.cat([obs["a"], obs["b"]], dim=-1), h)

    assert _errors(TwoInputs)[1] == []


def test_what_is_not_recognized_is_refused_with_what_to_write():
    class Feedforward(nn.Linear):
        pass

    with pytest.raises(TypeError, match=r"how Feedforward, forward\(input: .*subjects.Module\(policy, \(4,\)\)"):
        doctor.examine(Feedforward(OBS, 3))

    class Acts(nn.Module):
        def act(self, obs):
            return obs

    with pytest.raises(TypeError, match=r"how Acts, which has no forward \(act\), is used"):
        doctor.examine(Acts())


def test_outputs_that_no_observation_changes_are_refused():
    class ZeroHeads(Cell):
        """As heads often start."""

        def __init__(self):
            super().__init__()
            for head in (self.actor, self.critic):
                nn.init.zeros_(head.weight)

    with pytest.raises(CannotExamine, match="do not depend on what it observes; if its last layers start at zero"):
        doctor.examine(ZeroHeads())


@pytest.mark.parametrize("kind", [Keeps, Samples, StateDict])
def test_looking_for_its_form_leaves_a_policy_as_it_was(kind):
    torch.manual_seed(0)
    policy, before = kind(), torch.random.get_rng_state()
    weights = {key: value.clone() for key, value in policy.state_dict().items()}
    as_subject(policy)
    assert getattr(policy, "hx", None) is None and policy.training
    assert all(torch.equal(value, weights[key]) for key, value in policy.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), before)
