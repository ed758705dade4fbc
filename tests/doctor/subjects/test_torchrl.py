"""TorchRL's modules: wired as documented, wired wrongly, and on Holdfast's cores."""

import pytest
import torch
from torch import nn

import holdfast as hf
from broken.torchrl_policies import gru_policy, lstm_policy
from holdfast import doctor
from holdfast.doctor import subjects

pytest.importorskip("torchrl")


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
    """The same four mistakes with an LSTM are in `broken.torchrl_policies`."""
    torch.manual_seed(0)
    report = doctor.examine(subjects.TorchRL(gru_policy(), (4,), **wiring))
    assert [f.cause for f in report.findings if f.severity == "error"] == [cause]


def test_the_primer_of_a_real_torchrl_env_zeroes_states_at_resets():
    """The subject wires states as TorchRL does: they are carried, and zero where `is_init` is True."""
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


@pytest.mark.parametrize("kind", [hf.LSTM, hf.GRU])
def test_torchrl_module_on_holdfast_cores_has_no_finding(kind):
    from tensordict.nn import TensorDictModule, TensorDictSequential

    from holdfast.integrations.torchrl import RecurrentModule

    torch.manual_seed(0)
    keys = ["h", "c"] if kind is hf.LSTM else ["h"]
    out_keys = ["features", *[("next", key) for key in keys]]
    cell = RecurrentModule(kind(4, 16), in_keys=["observation", *keys], out_keys=out_keys)
    head = TensorDictModule(nn.Linear(16, 3), in_keys=["features"], out_keys=["logits"])
    report = doctor.examine(subjects.TorchRL(TensorDictSequential(cell, head), (4,)))
    assert report.findings == (), report.to_text()
