"""Every name that 0.1 documented still imports: what users wrote keeps working."""

from __future__ import annotations

import importlib

import pytest

import holdfast as hf

ALL_OF_0_1 = [
    "GRU", "LSTM", "ActorCritic", "Callback", "Collector", "Core", "Evaluation", "Memory", "Memoryless", "Parallel",
    "Profile", "RecurrentPolicy", "Runner", "Segment", "Stack", "Step", "TrainConfig", "Trainer", "collect", "debug",
    "doctor", "evaluate", "export_policy", "gae", "load", "ppo_loss", "resets_from",
]  # fmt: skip
"""`holdfast.__all__` of 0.1, copied."""

DEEP_NAMES_OF_0_1 = {
    "holdfast.heads": ["Bernoulli", "Categorical", "Gaussian", "MultiCategorical"],
    "holdfast.env_failures": ["RebuildingEnv", "EnvFailedError"],
    "holdfast.envs": [
        "EnvRow", "PositionOnlyCartPole", "RepeatFirst", "RepeatPrevious", "TMaze", "TorchVectorEnv", "Transition",
        "UnknownEnvError", "VelocityMask", "list_envs", "make", "register_all",
    ],
    "holdfast.doctor": [
        "CannotExamine", "CreditMap", "Finding", "Replay", "Report", "Segment", "StaleGraphWarning", "Step", "Subject",
        "assert_healthy", "examine", "subjects", "watch",
    ],
    "holdfast.doctor.subjects": [
        "SB3", "CleanRL", "Holdfast", "Module", "NotOffered", "Puffer", "Replay", "Segment", "Stateful", "Step",
        "Subject", "TensorDictPolicy", "TorchRL",
    ],
    "holdfast.integrations.sb3": [
        "CnnLstmPolicy", "CorePolicy", "MlpLstmPolicy", "MultiInputLstmPolicy", "RecurrentPPO",
    ],
    "holdfast.integrations.torchrl": ["RecurrentModule"],
    "holdfast.integrations.tensordict": ["LSTMWrapper", "TensorDictPolicy"],
    "holdfast.cli": ["main"],
}  # fmt: skip
"""Names below the package that 0.1's documentation and examples import, and their neighbors in `__all__`."""

NEEDS_AN_EXTRA = {"holdfast.integrations.sb3": "sb3_contrib", "holdfast.integrations.torchrl": "torchrl"}


@pytest.mark.parametrize("name", ALL_OF_0_1)
def test_a_name_of_0_1_is_still_public(name):
    assert name in hf.__all__
    assert getattr(hf, name) is not None


@pytest.mark.parametrize("module", DEEP_NAMES_OF_0_1)
def test_the_names_of_a_documented_module_still_import(module):
    if module in NEEDS_AN_EXTRA:
        pytest.importorskip(NEEDS_AN_EXTRA[module])
    imported = importlib.import_module(module)
    assert [name for name in DEEP_NAMES_OF_0_1[module] if not hasattr(imported, name)] == []


def test_every_distribution_of_a_policy_is_in_the_documented_module():
    from holdfast import heads
    from holdfast.policies import heads as code

    kinds = [name for name, thing in vars(code).items() if isinstance(thing, type) and hasattr(thing, "log_prob")]
    assert "SquashedGaussian" in kinds and set(kinds) <= set(heads.__all__)


def test_what_step_and_unroll_return_is_public():
    assert "PolicyOutput" in hf.__all__
    assert hf.PolicyOutput._fields == ("dist", "value", "state")


def test_star_imports_bring_exactly_the_public_names():
    names = {}
    exec("from holdfast import *", names)
    assert set(names) - {"__builtins__"} == set(hf.__all__)
