"""How an examination behaves: no side effects, deterministic, fast, and clear about what it could not examine."""

import random
import time

import numpy as np
import pytest
import torch
from torch import nn

import holdfast as hf
from broken.base import OBS
from broken.cleanrl_agents import Agent, NeverResets, RunsTheSegmentAsOneEpisode
from broken.stateful_modules import LivePolicy, Policy
from holdfast import doctor
from holdfast.causes import CAUSES
from holdfast.doctor import subjects
from holdfast.doctor.checks import REGISTRY
from holdfast.doctor.report.consequences import FOLLOWS
from holdfast.doctor.report.findings import DOCS


def _agent(kind=Agent):
    torch.manual_seed(1)
    return kind()


def test_the_policy_and_the_generators_are_left_as_they_were():
    agent = _agent(NeverResets)
    agent.register_buffer("count", torch.zeros(()))
    agent.train(False)
    before = {key: value.clone() for key, value in agent.state_dict().items()}
    torch.set_num_threads(2)
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    doctor.examine(subjects.CleanRL(agent, (OBS,)))
    assert all(torch.equal(before[key], value) for key, value in agent.state_dict().items())
    assert not agent.training and all(p.grad is None for p in agent.parameters())
    assert torch.equal(states[0], torch.get_rng_state()) and torch.get_num_threads() == 2
    assert np.array_equal(states[1], np.random.get_state()[1]) and states[2] == random.getstate()


def test_a_live_state_that_holds_a_graph_is_left_as_it_was():
    policy = LivePolicy()
    policy(torch.randn(5, OBS), torch.zeros(5, dtype=torch.bool))
    held = policy.lstm_hidden
    assert held[0].grad_fn is not None
    arguments = {"reset": "done", "train": None, "no_grad": False, "detach": "cut"}
    doctor.examine(subjects.Stateful(policy, observation_space=(OBS,), **arguments))
    assert policy.lstm_hidden is held and held[0].grad_fn is not None


def test_a_subject_that_cannot_be_copied_is_examined_and_put_back():
    class Uncopyable(subjects.CleanRL):
        def isolated(self):
            raise TypeError("holds a socket")

    agent = _agent()
    agent.eval()
    before = {key: value.clone() for key, value in agent.state_dict().items()}
    report = doctor.assert_healthy(Uncopyable(agent, (OBS,)))
    assert [(f.cause, f.severity) for f in report.findings] == [("examined-in-place", "note")]
    assert all(torch.equal(before[key], value) for key, value in agent.state_dict().items())
    assert not agent.training


def test_the_same_seed_gives_the_same_report():
    subject = subjects.CleanRL(_agent(RunsTheSegmentAsOneEpisode), (OBS,))
    first, second, other = (doctor.examine(subject, seed=seed).to_dict() for seed in (4, 4, 5))
    for report in (first, second, other):
        report.pop("seconds")
    assert first == second
    assert first["findings"][0]["evidence"] != other["findings"][0]["evidence"]
    assert [f["cause"] for f in first["findings"]] == [f["cause"] for f in other["findings"]]


def test_sixteen_units_take_at_most_three_seconds_of_cpu():
    subject = subjects.CleanRL(_agent(), (OBS,))
    doctor.examine(subject)
    started = time.process_time()
    doctor.examine(subject)
    assert time.process_time() - started < 3.0


def test_one_environment_is_enough():
    report = doctor.assert_healthy(subjects.CleanRL(_agent(), (OBS,), num_envs=1))
    status = {o.check: o.status for o in report.outcomes}
    assert status["environments-apart"] == status["batch-size"] == "not applicable"
    assert status["rollout-resets"] == status["replay"] == "passed"
    sick = doctor.examine(subjects.CleanRL(_agent(NeverResets), (OBS,), num_envs=1))
    assert [f.cause for f in sick.findings if f.severity == "error"] == ["never-resets"]


@pytest.mark.parametrize("num_envs", [2, 3, 9])
def test_any_number_of_environments_works(num_envs):
    doctor.assert_healthy(subjects.CleanRL(_agent(), (OBS,), num_envs=num_envs))


def test_a_reset_method_without_arguments_is_examined_with_one_environment():
    class Single(Policy):
        def forward(self, obs):
            return super().forward(obs, torch.zeros(len(obs), dtype=torch.bool))

        def clear(self):
            self.lstm_hidden = None

    arguments = {"reset": "clear", "forget": "clear"}
    subject = subjects.Stateful(Single(), observation_space=(OBS,), **arguments)
    assert subject.num_envs == 1
    report = doctor.examine(subject)
    # It detaches at each step and trains through steps.
    assert [f.cause for f in report.findings if f.severity == "error"] == ["over-detached"]


def test_findings_that_follow_are_listed_under_their_cause():
    report = doctor.examine(subjects.CleanRL(_agent(NeverResets), (OBS,)))
    (found,) = [f for f in report.findings if f.severity == "error"]
    assert {f.cause for f in found.consequences} >= {"gradient-crosses-reset", "nan-survives"}
    failed = {o.check for o in report.outcomes if o.status == "failed"}
    assert "gradient-isolation" in failed


def test_every_check_is_accounted_for():
    report = doctor.examine(subjects.CleanRL(_agent(), (OBS,)))
    assert [o.check for o in report.outcomes] == [c.name for c in REGISTRY if not c.extra]
    assert all(o.said.strip() for o in report.outcomes if o.status != "failed")


def test_compile_check_runs_when_asked_for():
    report = doctor.examine(hf.LSTM(4, 8), compile=True)
    (outcome,) = [o for o in report.outcomes if o.check == "compile"]
    assert outcome.status == "passed", outcome


def test_a_policy_that_does_not_run_is_said_so():
    class Broken(Agent):
        def get_action_and_value(self, *args):
            raise ZeroDivisionError("no idea")

    with pytest.raises(doctor.CannotExamine, match="ZeroDivisionError: no idea"):
        doctor.examine(subjects.CleanRL(Broken(), (OBS,)))


def test_an_unknown_thing_is_refused_with_what_to_do():
    with pytest.raises(TypeError, match="four methods"):
        doctor.examine(nn.Linear(2, 2))


def test_assert_healthy_shows_the_findings():
    with pytest.raises(AssertionError, match="never-resets"):
        doctor.assert_healthy(subjects.CleanRL(_agent(NeverResets), (OBS,)))


def test_a_larger_policy_reports_progress():
    seen = []
    doctor.examine(hf.GRU(4, 8), progress=lambda done, total, name: seen.append((done, total, name)))
    assert seen[0][0] == 0 and seen[-1][0] == seen[-1][1] == len(seen) - 1


def test_every_cause_that_follows_is_a_known_cause():
    assert set(FOLLOWS) <= set(CAUSES)
    assert all(causes <= set(CAUSES) for causes in FOLLOWS.values())


def test_every_finding_links_to_a_section_of_the_docs():
    from pathlib import Path

    text = (Path(__file__).parents[2] / DOCS).read_text()
    headings = {line.lstrip("# ").strip() for line in text.splitlines() if line.startswith("#")}
    assert {c.name for c in REGISTRY} <= headings
    missing = [cause for cause in CAUSES if f"`{cause}`" not in text]
    assert missing == []


@pytest.mark.parametrize(("old", "new"), [("Segment", "RecordedSegment"), ("Step", "SubjectStep")])
@pytest.mark.parametrize("module", [doctor, subjects])
def test_names_of_0_1_are_aliases_that_warn(module, old, new):
    with pytest.warns(DeprecationWarning, match=f"{old} is now called {new}"):
        assert getattr(module, old) is getattr(module, new)


def test_other_names_are_not_found():
    with pytest.raises(AttributeError, match=r"holdfast\.doctor.*nothing_here"):
        doctor.nothing_here  # noqa: B018


def test_a_subject_whose_attribute_hides_a_method_is_told_so():
    with pytest.raises(AttributeError, match="`state` is a method of a subject"):
        doctor.Subject((4,)).state = torch.zeros(3)


def test_a_reset_method_is_called_if_training_steps_through_the_same_method():
    class Masked(Policy):
        def forward(self, obs):
            return super().forward(obs, torch.zeros(len(obs), dtype=torch.bool))

        def keep(self, state):
            self.lstm_hidden = state

        def clear(self, mask):
            if self.lstm_hidden is not None:
                self.lstm_hidden = self.reset(self.lstm_hidden, mask)

    torch.manual_seed(0)
    doctor.assert_healthy(
        subjects.Stateful(Masked(), train="forward", reset="clear", observation_space=(OBS,), no_grad=True)
    )


def test_dropped_resets_are_named_with_one_environment():
    torch.manual_seed(0)
    report = doctor.examine(subjects.Module(nn.GRU(OBS, 8), resets="nobody", num_envs=1))
    assert [f.cause for f in report.findings if f.severity == "error"] == ["reset-dropped-in-training"]


class Trained(Policy):
    """Has a training method of its own, whose second parameter is about something else."""

    def forward(self, obs):
        return super().forward(obs, torch.zeros(len(obs), dtype=torch.bool))

    def clear(self, mask):
        if self.lstm_hidden is not None:
            self.lstm_hidden = self.reset(self.lstm_hidden, mask)

    def evaluate(self, obs, scale=None, dones=None):
        assert scale is None
        outputs = []
        for x, done in zip(obs, dones):
            self.clear(done)
            outputs.append(self(x))
        return torch.stack(outputs)

    def needs_more(self, obs, actions):
        return self.evaluate(obs)


def _trained(train):
    torch.manual_seed(0)
    arguments = {"reset": "clear", "observation_space": (OBS,), "no_grad": True}
    return subjects.Stateful(Trained(), train=train, **arguments)


def test_resets_go_to_the_parameter_of_training_that_is_named_for_them():
    errors = {f.cause for f in doctor.examine(_trained("evaluate")).findings if f.severity == "error"}
    assert not errors & {"reset-dropped-in-training", "never-resets", "check-failed-to-run"}


def test_training_that_needs_something_else_is_said_to_need_another_subject():
    with pytest.raises(doctor.CannotExamine, match=r"needs `actions`.*use subjects\.Loop"):
        doctor.examine(_trained("needs_more"))
