"""rsl_rl's recurrent PPO, as it is and with mistakes that its users have met."""

import pytest
import torch

from holdfast import doctor
from holdfast.doctor import subjects
from holdfast.doctor.subjects.choose import as_subject

pytest.importorskip("rsl_rl")

from rsl_rl.algorithms import PPO
from rsl_rl.models import RNNModel
from rsl_rl.storage import RolloutStorage
from tensordict import TensorDict


def ppo(rnn_type="lstm", rnn_num_layers=1, model=RNNModel, algorithm=PPO):
    """Actor and critic with a memory each; the critic sees one group of observations more."""
    obs = TensorDict({"policy": torch.zeros(5, 6), "privileged": torch.zeros(5, 3)}, [5])
    groups = {"actor": ["policy"], "critic": ["policy", "privileged"]}
    sizes = {"hidden_dims": [16], "rnn_hidden_dim": 16, "rnn_type": rnn_type, "rnn_num_layers": rnn_num_layers}
    gaussian = {"class_name": "GaussianDistribution", "init_std": 1.0}
    actor = model(obs, groups, "actor", 2, distribution_cfg=gaussian, **sizes)
    return algorithm(actor, model(obs, groups, "critic", 1, **sizes), RolloutStorage("rl", 5, 8, obs, [2]))


def errors(report):
    return [f.cause for f in report.findings if f.severity == "error"]


@pytest.mark.parametrize(("seed", "rnn_type", "layers"), [(0, "lstm", 1), (1, "gru", 1), (2, "lstm", 2)])
def test_rsl_rl_as_it_is_has_no_finding(seed, rnn_type, layers):
    torch.manual_seed(seed)
    report = doctor.examine(subjects.RslRl(ppo(rnn_type, layers)), seed=seed)
    assert report.findings == (), report.to_text()
    assert {o.check for o in report.outcomes if o.status == "passed"} >= {
        "replay",
        "gradient-isolation",
        "bootstrap",
        "reset-call",
    }


class NeverResets(RNNModel):
    def reset(self, dones=None, hidden_state=None):
        if dones is None:
            super().reset(dones, hidden_state)


class ForgetsHalf(RNNModel):
    def reset(self, dones=None, hidden_state=None):
        if dones is None or self.rnn.hidden_state is None:
            super().reset(dones, hidden_state)
        else:
            self.rnn.hidden_state[0][..., dones == 1, :] = 0.0


class ResetsByIndex(RNNModel):
    def reset(self, dones=None, hidden_state=None):
        if dones is None or self.rnn.hidden_state is None:
            super().reset(dones, hidden_state)
        else:
            for state in self.rnn.hidden_state:
                state[..., dones, :] = 0.0


@pytest.mark.parametrize(
    ("model", "cause"),
    [(NeverResets, "never-resets"), (ForgetsHalf, "partial-reset"), (ResetsByIndex, "index-not-mask")],
)
def test_a_model_that_resets_wrongly_is_found(model, cause):
    torch.manual_seed(0)
    report = doctor.examine(subjects.RslRl(ppo(model=model)))
    assert errors(report)[0] == cause, report.to_text()
    assert "dones" in report.findings[0].patch


def test_computing_returns_that_moves_the_critic_is_found():
    class Moves(PPO):
        def compute_returns(self, obs):
            super().compute_returns(obs)
            self.critic(obs)

    torch.manual_seed(0)
    assert errors(doctor.examine(subjects.RslRl(ppo(algorithm=Moves)))) == ["bootstrap-moves-memory"]


def test_the_algorithm_is_left_as_it_was():
    torch.manual_seed(0)
    algorithm = ppo()
    algorithm.act(TensorDict({"policy": torch.randn(5, 6), "privileged": torch.randn(5, 3)}, [5]))
    before = [x.clone() for x in algorithm.actor.get_hidden_state()]
    doctor.examine(subjects.RslRl(algorithm))
    assert all(torch.equal(x, y) for x, y in zip(before, algorithm.actor.get_hidden_state()))


def test_an_algorithm_without_a_subject_is_recognized():
    assert isinstance(as_subject(ppo()), subjects.RslRl)
