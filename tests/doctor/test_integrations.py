"""Holdfast inside other trainers passes too."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from patients.sb3_policies import _Spaces
from torch import nn

import holdfast as hf
from holdfast import doctor
from holdfast.doctor import subjects

BOX = spaces.Box(-np.inf, np.inf, (4,), np.float32)


@pytest.mark.parametrize(
    ("policy", "space", "arguments"),
    [
        ("MlpLstmPolicy", BOX, {}),
        ("MlpLstmPolicy", BOX, {"core": "gru"}),
        ("MlpLstmPolicy", BOX, {"enable_critic_lstm": False, "shared_lstm": True}),
        ("MultiInputLstmPolicy", spaces.Dict(a=BOX, b=spaces.Discrete(3)), {}),
    ],
    ids=["lstm", "gru", "shared", "dict"],
)
def test_recurrent_ppo_on_holdfast_cores_has_no_finding(policy, space, arguments):
    from holdfast.integrations.sb3 import RecurrentPPO

    torch.manual_seed(0)
    env = _Spaces.env(space, spaces.Discrete(3))
    kwargs = {"lstm_hidden_size": 16, "net_arch": [16], **arguments}
    model = RecurrentPPO(policy, env, n_steps=16, batch_size=16, policy_kwargs=kwargs, device="cpu")
    report = doctor.examine(model)
    assert report.findings == (), report.to_text()
    assert not [o for o in report.outcomes if o.status == "not examined"], report.to_text()


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
