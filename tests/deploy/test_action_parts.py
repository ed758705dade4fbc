"""Policies whose actions have parts, in use: as themselves, as ONNX and as pt2, with masks, fed back and clipped."""

import json
import runpy

import numpy as np
import pytest
import torch

import holdfast as hf
from holdfast.deploy.exported_signature import Signature
from holdfast.rollout.vector_env import input_space
from holdfast.state import leaves
from part_actions import OBS, SPACES, Parts, nested, parts_of

pytest.importorskip("onnxruntime")
INPUTS = ("obs", "prev_action", "prev_reward")
FORMATS = {"dict": "onnx", "tuple": "pt2"}  # writing a file takes longer than everything else


@pytest.fixture(scope="module", params=FORMATS)
def sources(request, tmp_path_factory):
    """(how actions are nested, a policy that sees its previous action, its file)"""
    torch.manual_seed(3)
    kind, space = request.param, SPACES[request.param]
    options = {"squash_actions": True} if kind == "tuple" else {"scale_actions": True, "initial_std": 2.0}
    policy = hf.ActorCritic(input_space(OBS, space, INPUTS), space, "gru", 8, **options)
    for p in policy.parameters():
        torch.nn.init.normal_(p, std=0.7) if p.dim() > 1 else None
    path = tmp_path_factory.mktemp("parts") / f"policy.{FORMATS[kind]}"
    return kind, policy, hf.export_policy(policy, path, masks=True)


def masks(kind, t):
    tool = np.arange(3) != np.array([[t % 3], [(t + 1) % 3]])
    return nested(kind, tool, None, np.array([[True, False], [True, True]]))


def test_policy_and_file_play_the_same_parts_under_the_same_masks(sources):
    kind, policy, exported = sources
    ours, theirs, seen = hf.Runner(policy), hf.Runner(exported.path), set()
    for t in range(40):
        obs = np.random.default_rng(t).normal(size=(2, 3)).astype(np.float32)
        more = {"rewards": np.ones(2), "action_mask": masks(kind, t)}
        a, b = (runner.act(obs, np.array([t % 7 == 0, t % 5 == 0]), **more) for runner in (ours, theirs))
        np.testing.assert_allclose(a.value, b.value, atol=1e-4)
        for want, got in zip(leaves([a.action, a.raw_action]), leaves([b.action, b.raw_action]), strict=True):
            assert want.dtype == got.dtype and want.shape == got.shape
            np.testing.assert_allclose(want, got, atol=1e-4)
        tool, place, bits = parts_of(kind, a.action)
        assert tool[0] != 1 + t % 3 and bits[0, 1] == 0 and abs(place).max() <= 2.0
        seen.add((*tool, *bits.ravel()))
    assert len(seen) > 6, "so that it is worth comparing"


def test_one_environment_plays_an_episode_and_samples(sources):
    kind, _, exported = sources
    runner, env = hf.Runner(exported.path), Parts(kind, "info", 30)  # it refuses forbidden actions, and other forms
    obs, info = env.reset(seed=0)
    first, ended, reward, tools = True, False, 0.0, set()
    torch.manual_seed(0)
    while not ended:
        chosen = runner.act(obs, first, rewards=reward, action_mask=info["action_mask"], deterministic=False)
        tools.add(int(parts_of(kind, chosen.action)[0]))
        obs, reward, ended, _, info = env.step(chosen.action)
        first = False
    assert len(tools) > 1
    as_tensors = runner.act(torch.as_tensor(obs), True, action_mask=info["action_mask"])
    assert all(isinstance(leaf, torch.Tensor) for leaf in leaves(as_tensors.action))


def test_each_part_has_its_own_outputs_and_the_program_next_to_the_file_prints_them(sources, capsys):
    kind, _, exported = sources
    suffixes = ["_bits", "_place", "_tool"] if kind == "dict" else ["_0", "_1_0", "_1_1"]
    assert [name for name in exported.signature.outputs if name.startswith("action")] == [
        f"action{s}" for s in suffixes
    ]
    choices = {part["suffix"]: part["choices"] for part in exported.signature.action["parts"]}
    assert sorted(choices.values()) == [0, 2, 3] and choices[suffixes[1]] == 0
    runpy.run_path(str(exported.usage))
    assert len(capsys.readouterr().out.strip().splitlines()) >= 3


def test_a_mask_of_another_form_is_refused(sources):
    kind, policy, exported = sources
    for source in (policy, exported.path):
        runner = hf.Runner(source)
        obs = np.zeros((2, 3), np.float32)
        for wrong, words in {
            "form": ({"tols": np.ones((2, 3))}, "True = allowed"),
            "empty": (nested(kind, np.zeros((2, 3)), None, None), "forbids every action"),
            "size": (nested(kind, np.ones((2, 4)), None, None), r"has shape \(2, 4\), expected"),
        }.values():
            with pytest.raises(ValueError, match=words):
                runner.act(obs, np.ones(2, bool), action_mask=wrong)


@pytest.mark.parametrize("change, words", [
    (lambda parts: parts.clear(), "action.parts is empty"),
    (lambda parts: parts.append(parts[0]), "two of its parts are at"),
    (lambda parts: parts[0].update(path=[]), "is not a part"),
    (lambda parts: parts[0].update(kind="factored", parts=[dict(parts[0])]), "is not a part"),
    (lambda parts: parts[0].update(choices=-1), "choices"),
    (lambda parts: parts[0].update(choices=77), "expected as many as its mask"),
    (lambda parts: parts[0].update(suffix=3), "suffix"),
    (lambda parts: parts[0].update(kind="beta"), "action.kind is 'beta'"),
])  # fmt: skip
def test_a_forged_description_of_parts_is_refused(sources, change, words):
    data = json.loads(sources[2].signature.to_json())
    assert Signature.from_json(json.dumps(data), "it").action["parts"][0]["path"]
    change(data["action"]["parts"])
    with pytest.raises(ValueError, match=words):
        Signature.from_json(json.dumps(data), "it")
