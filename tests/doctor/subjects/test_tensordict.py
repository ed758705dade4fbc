"""Policies on TensorDicts: Holdfast's own form, and a hand-written base class."""

import importlib.util
from pathlib import Path

import numpy as np
import torch
from gymnasium import spaces

import holdfast as hf
from holdfast import doctor
from holdfast.doctor import subjects

EXAMPLES = Path(__file__).parents[3] / "examples" / "migrating"


def test_the_tensordict_form_is_healthy():
    from holdfast.integrations.tensordict import TensorDictPolicy

    torch.manual_seed(3)
    policy = hf.ActorCritic(spaces.Box(-np.inf, np.inf, (4,), np.float32), spaces.Discrete(3), hidden_size=16)
    report = doctor.assert_healthy(TensorDictPolicy(policy))
    assert not [o for o in report.outcomes if o.status == "not examined"], report.to_text()


def _example(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_hand_written_base_class_is_sick_and_ours_in_its_place_is_healthy():
    from holdfast.integrations.tensordict import LSTMWrapper

    example = _example("base_class_wrapper")
    torch.manual_seed(0)
    sick = doctor.examine(subjects.TensorDictPolicy(example.policy_on(example.HandWrapper), (example.OBS,)))
    causes = {f.cause for f in sick.findings if f.severity == "error"}
    assert causes == {"training-moves-memory", "truncation-ignored", "reset-dropped-in-training", "wrong-environment"}
    doctor.assert_healthy(subjects.TensorDictPolicy(example.policy_on(LSTMWrapper), (example.OBS,)))
