"""What is known of the installed peers, found by the doctor."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from patients.puffer_policies import NeverResets
from patients.sb3_policies import shipped
from patients.torchrl_policies import gru_policy, lstm_policy
from torch import nn

from holdfast import doctor
from holdfast.doctor import subjects

BOX = spaces.Box(-np.inf, np.inf, (4,), np.float32)


def _causes(report, severity="error"):
    return [f.cause for f in report.findings if f.severity == severity]


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"action_space": spaces.Box(-1, 1, (2,))},
        {"enable_critic_lstm": False, "shared_lstm": True},
        {"enable_critic_lstm": False},
        {"n_lstm_layers": 2},
        {"observation_space": spaces.Dict(a=BOX, b=spaces.Discrete(3)), "policy": "MultiInputLstmPolicy"},
    ],
    ids=["discrete", "box", "shared", "no-critic-lstm", "two-layers", "dict"],
)
def test_sb3_as_shipped_has_no_error(arguments):
    torch.manual_seed(0)
    report = doctor.assert_healthy(shipped(**arguments))
    assert "nan-survives" in _causes(report, "warning")
    assert not [o for o in report.outcomes if o.status == "not examined"], report.to_text()


@pytest.mark.parametrize("policy", [lstm_policy, gru_policy])
def test_torchrl_as_documented_has_no_error(policy):
    torch.manual_seed(0)
    report = doctor.assert_healthy(subjects.TorchRL(policy(), (4,)))
    assert not [o for o in report.outcomes if o.status == "not examined"], report.to_text()


@pytest.mark.parametrize(
    ("wiring", "cause"),
    [
        ({"primed": False}, "memoryless"),
        ({"init_tracker": False}, "reset-dropped-in-training"),
        ({"is_init_dtype": torch.int64}, "flags-not-bool"),
        ({"recurrent_mode": False}, "over-detached"),
    ],
    ids=["no-state-keys", "all-false-init", "int-init", "no-recurrent-mode"],
)
def test_a_torchrl_gru_wired_wrongly_is_found(wiring, cause):
    """The same four of an LSTM are among the patients."""
    torch.manual_seed(0)
    assert _causes(doctor.examine(subjects.TorchRL(gru_policy(), (4,), **wiring))) == [cause]


def test_the_primer_of_a_real_torchrl_env_zeroes_states_at_resets():
    """The subject's picture of TorchRL's wiring is TorchRL's: states are carried, and zero where `is_init` is True."""
    from tensordict import TensorDict
    from torchrl.data import Binary, Composite, Unbounded
    from torchrl.envs import Compose, EnvBase, InitTracker, TransformedEnv
    from torchrl.modules import LSTMModule

    class Env(EnvBase):
        def __init__(self):
            super().__init__(batch_size=[2])
            self.observation_spec = Composite(observation=Unbounded((2, 4)), shape=(2,))
            self.action_spec, self.reward_spec = Unbounded((2, 1)), Unbounded((2, 1))
            flags = {key: Binary(1, shape=(2, 1), dtype=torch.bool) for key in ("done", "terminated", "truncated")}
            self.done_spec = Composite(flags, shape=(2,))
            self.count = 0

        def _data(self, done):
            flags = {"done": done, "terminated": done, "truncated": torch.zeros_like(done)}
            return TensorDict({"observation": torch.randn(2, 4), **flags}, [2])

        def _reset(self, td=None, **kwargs):
            return self._data(torch.zeros(2, 1, dtype=torch.bool))

        def _step(self, td):
            self.count += 1
            data = self._data(torch.tensor([[self.count == 2], [self.count == 3]]))
            return data.set("reward", torch.zeros(2, 1))

        def _set_seed(self, seed):
            pass

    lstm = LSTMModule(4, 6, in_keys=["observation", "h", "c"], out_keys=["action_in", ("next", "h"), ("next", "c")])
    head = torch.nn.Linear(6, 1)
    from tensordict.nn import TensorDictModule, TensorDictSequential

    policy = TensorDictSequential(lstm, TensorDictModule(head, in_keys=["action_in"], out_keys=["action"]))
    env = TransformedEnv(Env(), Compose(InitTracker(), lstm.make_tensordict_primer()))
    with torch.no_grad():
        data = env.rollout(5, policy, break_when_any_done=False)
    zero = (data["h"] == 0).flatten(2).all(-1)
    assert torch.equal(zero, data["is_init"][..., 0])
    assert zero[:, 0].all() and zero.sum() == 4


@pytest.mark.parametrize("layer", [nn.LSTM(4, 16), nn.GRU(4, 16, 2), nn.LSTM(4, 16, batch_first=True), nn.RNN(4, 8)])
def test_torch_layers_are_healthy_when_the_caller_cuts_at_episode_ends(layer):
    report = doctor.assert_healthy(layer)
    assert [(f.cause, f.severity) for f in report.findings] == [("resets-are-the-callers", "note")]


def test_pufferlibs_trainer_has_two_bugs():
    """Nothing is reset anywhere, and training starts from nothing: two errors, and what follows beneath them."""
    torch.manual_seed(0)
    report = doctor.examine(subjects.Puffer(NeverResets(), (4,), start="nothing"))
    assert sorted(_causes(report)) == ["never-resets", "starts-from-zeros"]
