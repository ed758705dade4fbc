"""A loop written by hand, as two functions; rollouts that start with an empty memory; training on whole episodes."""

from __future__ import annotations

import functools
import importlib.util
import inspect
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from broken.puffer_policies import NeverResets
from holdfast import doctor
from holdfast.doctor import Replay, SubjectStep, subjects

OBS, HIDDEN = 4, 8
EXAMPLES = Path(__file__).parents[3] / "examples" / "migrating"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRUCell(OBS, HIDDEN), nn.Linear(HIDDEN, 3)

    def forward(self, obs, h):
        h = self.cell(obs, h)
        return self.head(h), h


def start(net, num_envs):
    return torch.zeros(num_envs, HIDDEN)


def step(net, obs, h, first):
    y, h = net(obs, h * ~first[:, None])
    return y, h.detach()


def train(net, obs, h, first):
    ys = []
    for x, new in zip(obs, first):
        y, h = net(x, h * ~new[:, None])
        ys.append(y)
    return torch.stack(ys)


def without_resets(net, obs, h, first):
    return train(net, obs, h, torch.zeros_like(first))


def from_zeros(net, obs, h, first):
    return train(net, obs, torch.zeros_like(h), first)


def detached(net, obs, h, first):
    ys = []
    for x, new in zip(obs, first):
        y, h = net(x, (h * ~new[:, None]).detach())
        ys.append(y)
    return torch.stack(ys)


def never_resets(net, obs, h, first):
    return step(net, obs, h, torch.zeros_like(first))


def zeros(net, h):
    return torch.zeros_like(h)


def causes(seed=0, step=step, train=train, severity="error", **options):
    torch.manual_seed(seed)
    report = doctor.examine(subjects.Loop(Net(), (OBS,), start=start, step=step, train=train, **options), seed=seed)
    assert not [o for o in report.outcomes if o.status == "not examined"], report.to_text()
    return [f.cause for f in report.findings if f.severity == severity]


SEEDS = range(3)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_healthy_loop_of_two_functions_has_no_error(seed):
    assert causes(seed) == []


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"train": without_resets}, "reset-dropped-in-training"),
        ({"train": from_zeros}, "starts-from-zeros"),
        ({"train": detached}, "over-detached"),
        ({"step": never_resets, "train": without_resets}, "never-resets"),
    ],
)
def test_a_mistake_in_a_loop_is_named(changes, cause, seed):
    assert causes(seed, **changes)[:1] == [cause]


# --- a rollout starts here --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("training", [train, from_zeros])
def test_rollouts_that_start_with_an_empty_memory_are_noted_if_the_subject_says_so(training, seed):
    assert causes(seed, train=training, new_rollout=zeros) == []
    assert "rollouts-start-fresh" in causes(seed, train=training, new_rollout=zeros, severity="note")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"train": without_resets}, "reset-dropped-in-training"),
        ({"train": detached}, "over-detached"),
        ({"step": never_resets, "train": without_resets}, "never-resets"),
    ],
)
def test_mistakes_are_still_named_where_rollouts_start_with_an_empty_memory(changes, cause, seed):
    assert causes(seed, new_rollout=zeros, **changes)[:1] == [cause]


def test_a_rollout_start_that_changes_nothing_is_no_finding():
    assert causes(new_rollout=lambda net, h: h) == []
    assert "rollouts-start-fresh" not in causes(new_rollout=lambda net, h: h, severity="note")


@pytest.mark.parametrize("seed", SEEDS)
def test_pufferlibs_trainer_that_clears_states_does_not_start_from_wrong_ones(seed):
    torch.manual_seed(seed)
    report = doctor.examine(subjects.Puffer(NeverResets(), (OBS,), start="nothing", fresh_rollouts=True), seed=seed)
    assert [f.cause for f in report.findings if f.severity == "error"] == ["never-resets"]


# --- training sees whole episodes only --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_training_on_whole_episodes_may_start_from_zeros(seed):
    assert causes(seed, train=from_zeros, whole_episodes=True) == []
    assert causes(seed, train=from_zeros) == ["starts-from-zeros"]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"train": detached}, "over-detached"),
        ({"step": never_resets}, "never-resets"),
        ({"train": lambda net, obs, h, first: train(net, obs, h + 0.5, torch.zeros_like(first))}, "legs-differ"),
    ],
)
def test_mistakes_are_still_named_where_training_sees_whole_episodes(changes, cause, seed):
    assert causes(seed, **{"train": from_zeros, "whole_episodes": True, **changes})[:1] == [cause]


# --- the training loops of examples/migrating, as a user writes them down ---------------------------------------------


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def functional_hidden(module):
    """The caller carries the state, and training starts from an initial one."""

    def step(net, obs, h, first):
        y, h = net.gru(torch.tanh(net.encoder(obs)).unsqueeze(0), h * ~first.view(1, -1, 1))
        return (net.verb(y[0]), net.critic(y[0])), net.detach_hidden(h)

    def train(net, obs, h, first):
        y, _ = net.gru(torch.tanh(net.encoder(obs)), net.get_initial_hidden(first.shape[1]))
        return net.verb(y), net.critic(y)

    first = module.Before.get_initial_hidden
    return subjects.Loop(module.Before(), (module.OBS,), start=first, step=step, train=train, state_batch_dim=1)


def hidden_as_attribute(module):
    """The module keeps its state; training computes log-probabilities of the actions."""

    def step(net, obs, h, first):
        net.lstm_hidden = h
        action, log_prob = net.act(obs, first)
        return SubjectStep(net.actor(net.lstm_hidden[0][0]), action, log_prob), net.lstm_hidden

    def train(net, obs, h, first, actions):
        return Replay(net.actor(net.lstm(torch.tanh(net.encoder(obs)))[0]), net.evaluate(obs, actions))

    return subjects.Loop(module.Before(), (module.OBS,), start=lambda net, n: None, step=step, train=train)


def dictionary_of_states(module):
    """States in a dictionary of the module, which training also writes."""

    def step(net, obs, state, first):
        td = net(TensorDict({"env_obs": obs, "dones": first}, [len(obs)]))
        return SubjectStep(td["values"][:, None], td["actions"], td["act_log_prob"]), dict(net.states)

    def train(net, obs, state, first, actions):
        td = TensorDict({"env_obs": obs.transpose(0, 1), "dones": first.T}, first.T.shape)
        td = net(td, action=actions.T)
        return Replay(td["value"].T.unsqueeze(-1), td["act_log_prob"].T)

    return subjects.Loop(
        module.Before(), (module.OBS,), start=lambda net, n: net.states.clear(), step=step, train=train
    )


def base_class_wrapper(module):
    """The same, with the states in a base class."""

    def step(net, obs, state, first):
        td = net(TensorDict({"env_obs": obs, "dones": first}, [len(obs)]))
        return SubjectStep(td["values"][:, None], td["actions"], td["act_log_prob"]), dict(net.states)

    def train(net, obs, state, first, actions):
        td = TensorDict({"env_obs": obs.transpose(0, 1), "dones": first.T}, first.T.shape)
        td = net(td, action=actions.T)
        return Replay(td["value"].T.unsqueeze(-1), td["act_log_prob"].T)

    net = module.policy_on(module.HandWrapper)
    return subjects.Loop(net, (module.OBS,), start=lambda net, n: net.states.clear(), step=step, train=train)


@pytest.mark.parametrize(
    ("adapter", "found"),
    [
        (functional_hidden, {"starts-from-zeros", "reset-dropped-in-training"}),
        (hidden_as_attribute, {"starts-from-zeros", "reset-dropped-in-training"}),
        (dictionary_of_states, {"training-moves-memory"}),
        (base_class_wrapper, {"training-moves-memory"}),
    ],
)
def test_a_loop_written_by_hand_takes_fifteen_lines_to_examine(adapter, found):
    lines = [line for line in inspect.getsource(adapter).splitlines()[1:] if line.strip() and '"""' not in line]
    assert len(lines) <= 15, len(lines)
    torch.manual_seed(0)
    report = doctor.examine(adapter(example(adapter.__name__)))
    assert found <= {f.cause for f in report.findings if f.severity == "error"}, report.to_text()


def with_options(net, obs, h, first, scale=1.0, *, shift=0.0):
    return train(net, obs, h, first) * scale + shift


@pytest.mark.parametrize("trained", [with_options, functools.partial(with_options, scale=1.0)])
def test_options_of_a_training_function_are_not_taken_for_the_actions(trained):
    report = doctor.examine(subjects.Loop(Net(), (OBS,), start=start, step=step, train=trained))
    assert report.ok, report.to_text()


def test_a_step_that_returns_no_state_is_told_so():
    def forgets(net, obs, h, first):
        return step(net, obs, h, first)[0]

    with pytest.raises(doctor.CannotExamine, match=r"step returned .*, expected outputs and the next state"):
        doctor.examine(subjects.Loop(Net(), (OBS,), start=start, step=forgets, train=train))
