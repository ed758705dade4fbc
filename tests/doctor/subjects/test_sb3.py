"""sb3-contrib's RecurrentPPO: as shipped, and on Holdfast's cores."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from broken.sb3_models import env_of, shipped
from holdfast import doctor

pytest.importorskip("sb3_contrib")

BOX = spaces.Box(-np.inf, np.inf, (4,), np.float32)


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
    assert "nan-survives" in [f.cause for f in report.findings if f.severity == "warning"]
    assert not [o for o in report.outcomes if o.status == "not examined"], report.to_text()


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
    env = env_of(space, spaces.Discrete(3))
    kwargs = {"lstm_hidden_size": 16, "net_arch": [16], **arguments}
    model = RecurrentPPO(policy, env, n_steps=16, batch_size=16, policy_kwargs=kwargs, device="cpu")
    report = doctor.examine(model)
    assert report.findings == (), report.to_text()
    assert not [o for o in report.outcomes if o.status == "not examined"], report.to_text()
