"""skrl's recurrent PPO: as it is, and repaired."""

import pytest
import torch
from torch import nn

from holdfast import doctor
from holdfast.doctor import subjects
from holdfast.doctor.subjects.choose import as_subject

pytest.importorskip("skrl")

from gymnasium import spaces
from skrl.agents.torch.ppo import PPO_CFG, PPO_RNN
from skrl.models.torch import DeterministicMixin, GaussianMixin, Model
from skrl.resources.preprocessors.torch import RunningStandardScaler

SPACE, ACTIONS = spaces.Box(-2.0, 2.0, (4,)), spaces.Box(-1.0, 1.0, (2,))


class Recurrent(Model):
    """A GRU that resets at both kinds of ends. `flags` are the ends that training looks at."""

    flags = ("terminated", "truncated")
    outputs = 1

    def __init__(self, sequence_length=12, envs=5):
        Model.__init__(self, observation_space=SPACE, action_space=ACTIONS, device="cpu")
        self.sequence_length, self.envs = sequence_length, envs
        self.gru, self.head = nn.GRU(4, 16, batch_first=True), nn.Linear(16, self.outputs)

    def get_specification(self):
        return {"rnn": {"sequence_length": self.sequence_length, "sizes": [(1, self.envs, 16)]}}

    def features(self, inputs):
        steps = self.sequence_length if self.training else 1
        x = inputs["observations"].reshape(-1, steps, 4)
        h = inputs["rnn"][0].reshape(1, -1, steps, 16)[:, :, 0].contiguous()
        ends = sum(inputs[key].reshape(-1, steps).int() for key in self.flags) > 0 if self.training else None
        ys = []
        for t in range(steps):
            y, h = self.gru(x[:, t : t + 1], h)
            h = h if ends is None else torch.where(ends[None, :, t, None], 0.0, h)
            ys.append(y)
        return self.head(torch.cat(ys, dim=1).flatten(0, 1)), {"rnn": [h]}


class Policy(GaussianMixin, Recurrent):
    outputs = 2

    def __init__(self, **sizes):
        Recurrent.__init__(self, **sizes)
        GaussianMixin.__init__(self)
        self.log_std = nn.Parameter(torch.zeros(2))

    def compute(self, inputs, role):
        mean, rest = self.features(inputs)
        return mean, {"log_std": self.log_std, **rest}


class Value(DeterministicMixin, Recurrent):
    def __init__(self, **sizes):
        Recurrent.__init__(self, **sizes)
        DeterministicMixin.__init__(self)

    def compute(self, inputs, role):
        return self.features(inputs)


class SeesTerminationOnly(Policy):
    flags = ("terminated",)


class Repaired(PPO_RNN):
    """The states before a step and after it are in two dicts, and the value's states move outside of training, too."""

    def record_transition(self, **transition):
        training, self.training = self.training, True
        super().record_transition(**transition)
        self.training = training
        self._rnn_initial_states = dict(self._rnn_final_states)


def agent(kind=PPO_RNN, policy=Policy, scaler=False, **sizes):
    cfg = PPO_CFG()
    if scaler:
        cfg.observation_preprocessor = RunningStandardScaler
        cfg.observation_preprocessor_kwargs = {"size": SPACE, "device": "cpu"}
    models = {"policy": policy(**sizes), "value": Value(**sizes)}
    return kind(models=models, memory=None, cfg=cfg, observation_space=SPACE, action_space=ACTIONS, device="cpu")


def errors(report):
    return [f.cause for f in report.findings if f.severity == "error"]


@pytest.mark.parametrize(("seed", "length", "envs"), [(0, 12, 5), (1, 4, 3), (2, 32, 5)])
def test_a_repaired_agent_is_healthy(seed, length, envs):
    torch.manual_seed(seed)
    report = doctor.assert_healthy(subjects.Skrl(agent(Repaired, sequence_length=length, envs=envs)), seed=seed)
    passed = {o.check for o in report.outcomes if o.status == "passed"}
    assert passed >= {"rollout-resets", "replay", "gradient-isolation", "evaluation"}, report.to_text()
    # Sequences that are shorter than a segment cut gradients on purpose.
    assert [f.cause for f in report.findings] == (["truncated-bptt"] if length == 4 else [])


def test_states_that_are_stored_one_step_late_are_found_in_the_agent_as_it_is():
    """In skrl 2.1.1 `act` overwrites the states that `record_transition` stores."""
    torch.manual_seed(0)
    report = doctor.examine(subjects.Skrl(agent()))
    assert errors(report) == ["late-by-one"], report.to_text()
    assert "_rnn_initial_states" in report.findings[0].patch


def test_the_memory_of_the_agent_as_it_is_holds_the_states_after_each_step():
    """The same fact without the doctor."""
    torch.manual_seed(0)
    subject = subjects.Skrl(agent())
    subject._start(5, 3)
    none, after = torch.zeros(5, dtype=torch.bool), []
    for _ in range(4):
        subject.step(torch.randn(5, 4), none, none, torch.arange(5))
        after.append(subject.agent._rnn_final_states["policy"][0].clone())
    stored = subject.agent.memory.tensors["rnn_policy_0"].transpose(1, 2)  # [3, L, B, H]
    assert torch.equal(stored[0], torch.zeros_like(stored[0]))
    assert torch.equal(stored[1], after[1]) and torch.equal(stored[2], after[2])


def test_evaluation_of_the_agent_as_it_is_does_not_run_with_separate_models():
    """In skrl 2.1.1 `record_transition` needs the outputs of the value model, which it computes in training only."""
    torch.manual_seed(0)
    (found,) = [f for f in doctor.examine(subjects.Skrl(agent())).findings if f.severity == "warning"]
    assert found.check == "evaluation" and "UnboundLocalError" in found.evidence


def test_training_that_ignores_time_limits_is_found():
    torch.manual_seed(0)
    assert errors(doctor.examine(subjects.Skrl(agent(Repaired, SeesTerminationOnly)))) == ["truncation-ignored"]


def test_both_mistakes_together_are_both_named():
    torch.manual_seed(0)
    report = doctor.examine(subjects.Skrl(agent(PPO_RNN, SeesTerminationOnly)))
    assert errors(report) == ["late-by-one", "truncation-ignored"], report.to_text()


def test_preprocessors_that_learn_while_training_are_found_when_asked_for():
    torch.manual_seed(0)
    learning = agent(Repaired, scaler=True)
    assert doctor.examine(subjects.Skrl(learning)).ok
    assert errors(doctor.examine(subjects.Skrl(learning, preprocessors_learn=True))) == ["normaliser-moved"]


def test_models_without_recurrent_sizes_are_refused_in_one_line():
    class Plain(Policy):
        def get_specification(self):
            return {}

    with pytest.raises(TypeError, match="has no 'rnn' with 'sizes'"):
        subjects.Skrl(agent(policy=Plain))


def test_a_fixed_sequence_length_that_does_not_divide_a_segment_is_refused_in_one_line():
    class Fixed(Policy):
        def get_specification(self):
            return {"rnn": {"sequence_length": 32, "sizes": [(1, 5, 16)]}}

    fixed = agent(policy=Fixed)
    del fixed.policy.sequence_length
    with pytest.raises(TypeError, match="sequences of 32 steps do not divide 12"):
        subjects.Skrl(fixed)


def test_an_agent_without_a_subject_is_recognized():
    assert isinstance(as_subject(agent()), subjects.Skrl)
