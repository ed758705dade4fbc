"""The description in an exported file is checked before it is used."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import holdfast as hf
from holdfast.deploy import checksum
from holdfast.deploy.exported_signature import FORM, KEY, Signature

PORT = {"name": "obs", "shape": [3], "dtype": "float32", "path": [], "example": None}
STATE = {"name": "state_h", "shape": [1, 2], "dtype": "float32", "path": ["h"], "example": [[0.5, 1.0]]}
ACTION = {"kind": "gaussian", "dtype": "float32", "low": [-1.0, None], "high": [1.0, None]}
GOOD: dict[str, Any] = {
    "form": FORM, "observations": [PORT], "states": [STATE], "masks": [], "outputs": ["action", "mean", "std"],
    "action": ACTION, "about": {"checksum": "sha256"},
}  # fmt: skip
HEADS = {"kind": "multi_categorical", "nvec": [2, 3], "parents": [[1, 0]], "dtype": "int64"}


def without(data: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in data.items() if key != name}


FORGED: dict[str, Any] = {
    "a list": [],
    "a number": 3,
    "no states": without(GOOD, "states"),
    "an unknown part": {**GOOD, "more": 1},
    "ports are a dict": {**GOOD, "observations": {"obs": PORT}},
    "no observations": {**GOOD, "observations": []},
    "a port is a string": {**GOOD, "states": ["state_h"]},
    "a port without a shape": {**GOOD, "observations": [without(PORT, "shape")]},
    "an unknown part of a port": {**GOOD, "observations": [{**PORT, "units": "m"}]},
    "a name that is a number": {**GOOD, "observations": [{**PORT, "name": 7}]},
    "a path of lists": {**GOOD, "observations": [{**PORT, "path": [[]]}]},
    "two parts in one place": {**GOOD, "observations": [PORT, {**PORT, "name": "obs_"}]},
    "two inputs of one name": {**GOOD, "states": [{**STATE, "name": "obs"}]},
    "an input called resets": {**GOOD, "states": [{**STATE, "name": "resets"}]},
    "a dtype of strings": {**GOOD, "observations": [{**PORT, "dtype": "S"}]},
    "a dtype that is a function of torch": {**GOOD, "states": [{**STATE, "dtype": "load"}]},
    "a dtype that is a list": {**GOOD, "states": [{**STATE, "dtype": ["float32"]}]},
    "a negative shape": {**GOOD, "states": [{**STATE, "shape": [-1]}]},
    "a shape of floats": {**GOOD, "states": [{**STATE, "shape": [1.0, 2.0]}]},
    "a huge shape": {**GOOD, "states": [{**STATE, "shape": [2**40], "example": None}]},
    "many large shapes": {**GOOD, "states": [{**STATE, "name": f"s{i}", "shape": [2**24], "example": None} for i in range(9)]},
    "an example of another shape": {**GOOD, "states": [{**STATE, "example": [1.0]}]},
    "an example of strings": {**GOOD, "states": [{**STATE, "example": [["a", "b"]]}]},
    "a ragged example": {**GOOD, "states": [{**STATE, "example": [[1.0], 2.0]}]},
    "a mask of floats": {**GOOD, "masks": [{**PORT, "name": "action_mask"}]},
    "an action that is None": {**GOOD, "action": None},
    "an action without a kind": {**GOOD, "action": {}},
    "a kind that is a list": {**GOOD, "action": {"kind": []}},
    "an unknown kind": {**GOOD, "action": {"kind": "beta"}},
    "an action dtype": {**GOOD, "action": {**ACTION, "dtype": "S"}},
    "low above high": {**GOOD, "action": {**ACTION, "low": [2.0, None]}},
    "low without high": {**GOOD, "action": without(ACTION, "high")},
    "bounds without a dtype": {**GOOD, "action": without(ACTION, "dtype")},
    "bounds of strings": {**GOOD, "action": {**ACTION, "low": ["a", "b"]}},
    "a start that is a string": {**GOOD, "action": {"kind": "categorical", "start": "0"}},
    "no start": {**GOOD, "action": {"kind": "categorical"}},
    "no nvec": {**GOOD, "action": without(HEADS, "nvec")},
    "an nvec of 0": {**GOOD, "action": {**HEADS, "nvec": [2, 0]}},
    "a parent that comes later": {**GOOD, "action": {**HEADS, "parents": [[0, 1]]}},
    "parents that are no pairs": {**GOOD, "action": {**HEADS, "parents": [1, 0]}},
    "no center": {**GOOD, "action": {"kind": "squashed_gaussian", "half_range": [1.0]}},
    "outputs that are no list": {**GOOD, "outputs": "action"},
    "about is a list": {**GOOD, "about": []},
}  # fmt: skip
TEXTS = {
    **{name: json.dumps(data) for name, data in FORGED.items()},
    "no JSON": "{",
    "nested 10,000 deep": '{"form": 1, "observations": ' + "[" * 10_000 + "]" * 10_000 + "}",
    "an example nested deep": json.dumps(GOOD).replace("[[0.5, 1.0]]", "[" * 500 + "]" * 500),
    "an example that is NaN": json.dumps(GOOD).replace("0.5", "NaN"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_forged_description_is_refused_in_one_line(name: str):
    with pytest.raises(ValueError, match=r"^forged\.onnx: its description cannot be used \(.+\); export") as refusal:
        Signature.from_json(TEXTS[name], "forged.onnx")
    assert type(refusal.value) is ValueError and "\n" not in str(refusal.value) and len(str(refusal.value)) < 400


@pytest.mark.parametrize(
    "action", [ACTION, HEADS, {"kind": None, "name": "Beta"}, {"kind": "categorical", "start": -2}]
)
def test_a_description_comes_back_from_its_json(action: dict[str, Any]):
    data = copy.deepcopy({**GOOD, "action": action})
    signature = Signature.from_json(json.dumps(data), "policy.onnx")
    assert json.loads(signature.to_json()) == data
    assert Signature.from_json(signature.to_json(), "policy.onnx") == signature


def test_a_state_may_start_at_infinity():
    text = json.dumps(GOOD).replace("0.5", "-Infinity")
    assert Signature.from_json(text, "policy.pt2").states[0].example == [[-np.inf, 1.0]]


def test_a_file_of_another_form_and_without_a_description_is_refused_as_such():
    with pytest.raises(ValueError, match="another version of Holdfast wrote this file"):
        Signature.from_json(json.dumps({**GOOD, "form": 99}), "policy.onnx")
    with pytest.raises(ValueError, match="did not write this file"):
        Signature.from_json("", "policy.onnx")


def test_a_runner_refuses_a_sealed_file_whose_description_was_forged(tmp_path: Path):
    onnx = pytest.importorskip("onnx")
    policy = hf.ActorCritic(spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(2), "gru", 4)
    file = hf.export_policy(policy, tmp_path / "policy.onnx").path
    original = file.read_bytes()

    def forge(change: Any) -> None:
        model = onnx.load_from_string(original)
        properties = {entry.key: entry for entry in model.metadata_props}
        properties[KEY].value = change(properties[KEY].value)
        properties[f"{KEY}_checksum"].value = checksum.UNSEALED
        onnx.save(model, str(file))
        checksum.seal(file)

    forge(lambda text: text)
    assert hf.Runner(file).act(np.zeros((2, 3), np.float32)).action.shape == (2,)
    for old, new in (('"float32"', '"S"'), ('"state_h"', '"state_x"'), ('"kind": "categorical"', '"kind": "gaussian"')):
        forge(lambda text, old=old, new=new: text.replace(old, new))
        with pytest.raises(ValueError, match=r"policy\.onnx: .*; export the policy again") as refusal:
            hf.Runner(file)
        assert "\n" not in str(refusal.value)
