"""Exported files compute what the policy computes, and say what they are; what cannot be exported gets a reason."""

import json
import operator
import re
import runpy
import sys
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

import holdfast as hf
from cores.all_cores import CELLS, cells_side_by_side
from holdfast.cli import commands as cli
from holdfast.deploy.export import ExportError
from holdfast.deploy.exported_policy import ExportedPolicy
from holdfast.deploy.exported_signature import Signature, sample_observations
from holdfast.state import named_leaves, tree_map
from tables import MaskedTable, Tables

onnxruntime = pytest.importorskip("onnxruntime")

OBS = spaces.Dict(position=spaces.Box(-1, 1, (3,)), card=spaces.Discrete(4, start=1))
ACTIONS = {
    "discrete": spaces.Discrete(5, start=2),
    "multi_discrete": spaces.MultiDiscrete([3, 4]),
    "box": spaces.Box(-0.5, np.array([0.5, np.inf], dtype=np.float32)),
}


def make_policy(action_space, core="lstm", obs=OBS, **options):
    """A policy with large weights, so that actions differ, and a normalizer that has seen something."""
    torch.manual_seed(1)
    policy = hf.ActorCritic(obs, action_space, core, 12, normalize_obs=True, **options)
    with torch.no_grad():
        for p in policy.parameters():
            p.normal_(0, 2 / p.shape[-1] ** 0.5 if p.dim() > 1 else 0.1)
    policy.update_normalizer(tree_map(lambda x: torch.as_tensor(x) * 3 + 1, sample_observations(obs, 50)))
    return policy


class BareFile:
    """A file as somebody without Holdfast runs it: arrays by name, the state carried by hand."""

    def __init__(self, path, batch):
        if path.suffix == ".onnx":
            session = onnxruntime.InferenceSession(path)
            names = [o.name for o in session.get_outputs()]
            shapes = {i.name: i.shape for i in session.get_inputs()}
            dtypes = {i.name: np.int32 if i.type == "tensor(int32)" else np.float32 for i in session.get_inputs()}
            self.run = lambda feed: dict(zip(names, session.run(names, feed)))
        else:
            program = torch.export.load(path)
            module = program.module()
            nodes = [n for n in program.graph.nodes if n.name in program.graph_signature.user_inputs]
            shapes = {n.name: list(n.meta["val"].shape) for n in nodes}
            dtypes = {n.name: np.int32 if n.meta["val"].dtype == torch.int32 else np.float32 for n in nodes}
            self.run = lambda feed: {
                k: v.numpy() for k, v in module(**{k: torch.as_tensor(v) for k, v in feed.items()}).items()
            }
        states = [name for name in shapes if name.startswith("state_")]
        self.state = {name: np.zeros([batch, *shapes[name][1:]], dtypes[name]) for name in states}

    def step(self, obs, resets):
        named = {f"obs_{path.replace('.', '_')}": leaf for path, leaf in named_leaves(obs).items()}
        out = self.run({**named, "resets": resets, **self.state})
        self.state = {name: out[f"{name}_next"] for name in self.state}
        return out


def log_prob(out, action_space):
    """Of the action in the outputs, from the distribution in the outputs."""
    tensors = {name: torch.as_tensor(array) for name, array in out.items()}
    if "mean" in out:
        normal = torch.distributions.Normal(tensors["mean"], tensors["std"])
        return normal.log_prob(tensors["mean"]).sum(-1)
    if isinstance(action_space, spaces.Discrete):
        return torch.distributions.Categorical(logits=tensors["logits"]).log_prob(tensors["action"] - 2)
    parts = zip(tensors["logits"].split(action_space.nvec.tolist(), -1), tensors["action"].unbind(-1))
    return sum(torch.distributions.Categorical(logits=logits).log_prob(action) for logits, action in parts)


@pytest.fixture(scope="module", params=ACTIONS)
def rollout(request):
    """500 steps of a policy that remembers with every cell, side by side: what each file must repeat.

    All cells in one policy, because writing a file takes longer than everything else: an error in any would show in
    every number below.
    """
    policy, B = make_policy(ACTIONS[request.param], cells_side_by_side(12)), 4
    random = np.random.default_rng(0)
    pool = sample_observations(OBS, 200, seed=3)
    inputs, wanted = [], []
    for t in range(500):
        rows, resets = random.integers(0, 200, B), (random.random(B) < 0.05) | (t == 0)
        inputs.append((tree_map(operator.itemgetter(rows), pool), resets))
        wanted.append(policy.act(*inputs[-1], deterministic=True))
    return request.param, policy, inputs, hf.Step(*map(np.concatenate, zip(*wanted)))


@pytest.mark.parametrize("suffix", ["onnx", "pt2"])
def test_a_file_agrees_with_its_policy_over_500_steps_with_random_resets(rollout, suffix, tmp_path):
    kind, policy, inputs, want = rollout
    file = BareFile(hf.export_policy(policy, tmp_path / f"policy.{suffix}").path, 4)
    came = [file.step(obs, resets) for obs, resets in inputs]
    got = {name: np.concatenate([out[name] for out in came]) for name in came[0]}
    action = np.clip(want.action, ACTIONS[kind].low, ACTIONS[kind].high) if kind == "box" else want.action
    assert len(np.unique(action, axis=0)) >= 4  # so that it is worth comparing
    np.testing.assert_allclose(got["action"], action, atol=1e-4, rtol=0)
    np.testing.assert_allclose(got["value"], want.value, atol=1e-4, rtol=0)
    np.testing.assert_allclose(log_prob(got, ACTIONS[kind]), want.log_prob, atol=1e-4, rtol=0)
    memory = named_leaves(policy.memory.read())
    assert {name.split(".")[0] for name in memory} == set(CELLS)
    for name, leaf in memory.items():
        np.testing.assert_allclose(file.state[f"state_{name.replace('.', '_')}"], leaf.numpy(), atol=1e-4, rtol=0)


STATES = {
    "separate, learned": (
        dict(critic_core="separate", num_layers=2, reset="learned"),
        ["state_actor_h", "state_actor_c", "state_critic_h", "state_critic_c"],
    ),
    "one, detach": (dict(critic_core="none", reset="detach"), ["state_actor_h", "state_actor_c"]),
    "none": (dict(core=None), []),
    "one gru": (dict(core="gru"), ["state_h"]),
}


@pytest.mark.parametrize("name", STATES)
def test_every_kind_of_memory_is_exported_under_its_names(name, tmp_path):
    options, states = STATES[name]
    made = hf.export_policy(make_policy(spaces.MultiBinary(3), **options), tmp_path / "policy.pt2")
    assert [port.name for port in made.signature.states] == states
    outputs = ["action", "value", *[f"{state}_next" for state in states], "logits"]
    assert made.signature.outputs == outputs and made.difference < 1e-5


def test_an_onnx_file_says_what_it_is(tmp_path):
    """Images, nested observations, half precision, a policy that ignores resets: all in one."""
    obs = spaces.Dict({"a": spaces.Dict(b=spaces.Box(0, 255, (12, 12, 3), np.uint8)), "c": spaces.Tuple([OBS])})
    policy = make_policy(ACTIONS["box"], "gru", obs, reset="never").bfloat16()
    made = hf.export_policy(policy, tmp_path / "policy.onnx", about={"env": "Mine-v0"})
    assert next(policy.parameters()).dtype == torch.bfloat16  # the policy itself is left as it was
    session = onnxruntime.InferenceSession(made.path)
    assert {i.name: (i.shape, i.type) for i in session.get_inputs()} == {
        "obs_a_b": (["batch", 12, 12, 3], "tensor(uint8)"),
        "obs_c_0_card": (["batch"], "tensor(int64)"),
        "obs_c_0_position": (["batch", 3], "tensor(float)"),
        "resets": (["batch"], "tensor(bool)"),
        "state_h": (["batch", 1, 12], "tensor(float)"),
    }
    said = json.loads(session.get_modelmeta().custom_metadata_map["holdfast"])
    assert said["about"]["core"].startswith("GRU(12, 12") and said["about"]["env"] == "Mine-v0"
    assert said["action"]["high"] == [0.5, None] and said["action"]["kind"] == "gaussian"
    assert Signature.from_json(json.dumps(said), "f") == made.signature
    assert b"holdfast/encoders.py" not in made.path.read_bytes()  # it says nothing of the machine it was made on


def runs_without_holdfast(program, capsys):
    """In this process, because a new one would import torch first."""
    text = program.read_text()
    assert "import holdfast" not in text and len(text.splitlines()) < 20
    runpy.run_path(str(program))
    return len(capsys.readouterr().out.splitlines()) >= 3


def test_an_actor_alone_is_exported_without_value_and_without_the_critics_state(tmp_path, capsys):
    policy = make_policy(ACTIONS["box"], "gru", critic_core="separate")
    made = hf.export_policy(policy.actor_only(), tmp_path / "policy.onnx")
    assert [port.name for port in made.signature.states] == ["state_h"]
    assert made.signature.outputs == ["action", "state_h_next", "mean", "std"]
    assert runs_without_holdfast(made.usage, capsys)
    runner, full = hf.Runner(made.path), hf.Runner(policy)
    for seed in range(20):
        obs, resets = sample_observations(OBS, 4, seed), np.random.default_rng(seed).random(4) < 0.2
        alone, want = runner.act(obs, resets), full.act(obs, resets)
        assert alone.value is None
        np.testing.assert_allclose(alone.action, want.action, atol=1e-4)


@pytest.mark.parametrize("suffix", ["onnx", "pt2"])
def test_a_file_samples_squashed_actions_as_its_policy_does(tmp_path, suffix):
    space = spaces.Box(np.array([[-0.2, 1.0]], np.float32), np.array([[1.0, 3.0]], np.float32))
    policy = make_policy(space, squash_actions=True)
    made = hf.export_policy(policy, tmp_path / f"policy.{suffix}")
    obs = sample_observations(OBS, 6, seed=1)
    for deterministic in True, False:
        steps = []
        for source in made.path, policy:
            torch.manual_seed(3)
            steps.append(hf.Runner(source).act(obs, np.ones(6, bool), deterministic=deterministic))
        for file, own in zip(*steps):
            np.testing.assert_allclose(file, own, atol=1e-4, rtol=0)
    assert made.signature.action["half_range"] == pytest.approx([0.6, 1.0]) and "mean" in made.signature.outputs


# --- action masks ---------------------------------------------------------------------------------------------------


def test_masks_are_an_input_if_asked_for_and_forbid(tmp_path, capsys):
    policy = make_policy(spaces.Discrete(4), "gru", obs=spaces.Box(-1, 1, (3,)))
    made = hf.export_policy(policy, tmp_path / "policy.onnx", masks=True)
    assert runs_without_holdfast(made.usage, capsys)
    runner, theirs = hf.Runner(made.path), hf.Runner(policy)
    random = np.random.default_rng(0)
    for deterministic in (True, False):
        for _ in range(50):
            obs, mask = random.normal(size=(6, 3)).astype(np.float32), random.random((6, 4)) < 0.4
            mask[np.arange(6), random.integers(0, 4, 6)] = True
            step = runner.act(obs, deterministic=deterministic, action_mask=mask)
            want = theirs.act(obs, action_mask=mask)
            assert mask[np.arange(6), step.action].all()
            if deterministic:
                np.testing.assert_array_equal(step.action, want.action)
    with pytest.raises(ValueError, match="forbids every action in row 2"):
        runner.act(obs, action_mask=np.arange(6)[:, None].repeat(4, 1) != 2)
    with pytest.raises(ValueError, match=r"has shape \(6, 3\), expected \(6, 4\)"):
        runner.act(obs, action_mask=np.ones((6, 3), bool))


@pytest.mark.parametrize("format", ["onnx", "pt2"])
def test_a_file_takes_masks_in_every_form_that_a_policy_takes(tmp_path, format):
    policy = make_policy(spaces.MultiDiscrete([2, 3]), obs=spaces.Box(-1, 1, (3,)))
    made = hf.export_policy(policy, tmp_path / f"policy.{format}", masks=True)
    obs, mask = np.zeros(3, np.float32), np.array([1, 0, 0, 1, 0], np.int8)
    forms = [mask, mask.astype(float), mask.tolist(), list(mask), (mask[:2], mask[2:]), [mask[:2], mask[2:].tolist()]]
    for source in made.path, policy:
        for form in forms:
            for deterministic in True, False:
                step = hf.Runner(source).act(obs, True, action_mask=form, deterministic=deterministic)
                assert step.action.tolist() == [0, 1], form
        together = [np.stack([mask[:2]] * 4), np.stack([mask[2:]] * 4)]
        assert hf.Runner(source).act(np.zeros((4, 3), np.float32), action_mask=together).action.tolist() == [[0, 1]] * 4
        free = hf.Runner(source).act(np.zeros((4, 3), np.float32), action_mask=[None, together[1]]).action
        assert (free[:, 1] == 1).all()
    with pytest.raises(ValueError, match="a tuple of 3, expected"):
        hf.Runner(made.path).act(obs, True, action_mask=[mask, mask, mask])


def test_the_program_next_to_a_file_runs_with_any_numpy(tmp_path):
    made = hf.export_policy(make_policy(ACTIONS["multi_discrete"]), tmp_path / "policy.onnx", masks=True)
    program = made.usage.read_text()
    assert "np.bool_" in program and "np.bool)" not in program, "numpy 1.24 to 1.26 have no np.bool"


def test_a_mask_that_depends_on_another_heads_choice_is_exported(tmp_path, capsys):
    policy = make_policy(ACTIONS["multi_discrete"], obs=spaces.Box(-1, 1, (3,)), mask_parents={1: 0})
    made = hf.export_policy(policy, tmp_path / "policy.pt2", masks=True)
    assert runs_without_holdfast(made.usage, capsys)
    assert [(p.name, p.shape) for p in made.signature.masks] == [("action_mask_0", (3,)), ("action_mask_1", (3, 4))]
    runner, theirs = hf.Runner(made.path), hf.Runner(policy)
    late = np.zeros((5, 3, 4), bool)
    late[:, [0, 1, 2], [3, 0, 1]] = True  # one choice of head 1 for each of head 0
    masks = [np.ones((5, 3), bool), late]
    for _ in range(20):
        obs = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
        step, want = runner.act(obs, action_mask=masks), theirs.act(obs, action_mask=masks)
        np.testing.assert_array_equal(step.action, want.action)
        sampled = runner.act(obs, action_mask=masks, deterministic=False).action
        theirs.act(obs, action_mask=masks)
        np.testing.assert_array_equal(sampled[:, 1], np.array([3, 0, 1])[sampled[:, 0]])


@pytest.mark.parametrize("suffix", ["onnx", "pt2"])
def test_a_dependent_mask_may_forbid_everything_where_its_parent_cannot_go(tmp_path, suffix):
    policy = make_policy(spaces.MultiDiscrete([2, 3]), mask_parents={1: 0})
    file = hf.export_policy(policy, tmp_path / f"policy.{suffix}", masks=True).path
    obs = sample_observations(OBS, 50)
    first = np.tile([True, False], (50, 1))  # head 0 may not choose 1
    second = np.tile([[True, True, False], [False, False, False]], (50, 1, 1))
    for deterministic in (True, False):
        for source in (policy, file):
            action = hf.Runner(source).act(obs, action_mask=[first, second], deterministic=deterministic).action
            assert (action[:, 0] == 0).all() and (action[:, 1] < 2).all()


def test_masks_of_a_file_without_them_and_of_a_box_are_refused(tmp_path):
    made = hf.export_policy(make_policy(spaces.Discrete(4), obs=spaces.Box(-1, 1, (3,))), tmp_path / "policy.pt2")
    with pytest.raises(ValueError, match=r"exported without action masks.*--masks"):
        hf.Runner(made.path).act(np.zeros((2, 3), np.float32), action_mask=np.ones((2, 4), bool))
    with pytest.raises(ExportError, match="no action masks for the action space Box"):
        hf.export_policy(make_policy(ACTIONS["box"]), tmp_path / "policy.pt2", masks=True)


# --- what cannot be exported ----------------------------------------------------------------------------------------


@torch.library.custom_op("holdfast_tests::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@double.register_fake
def _(x):
    return torch.empty_like(x)


class OwnPolicy(hf.RecurrentPolicy):
    """With torch's distributions, no spaces, and something of the test's choice in its encoder."""

    def __init__(self, strange=None):
        super().__init__(core=hf.GRU(4, 8))
        self.linear, self.actor, self.critic = nn.Linear(3, 4), nn.Linear(8, 2), nn.Linear(8, 1)
        self.strange = strange

    def encode(self, obs):
        x = self.linear(obs)
        return x if self.strange is None else STRANGE[self.strange](x)

    def decode(self, features):
        mean = self.actor(features)
        return torch.distributions.Independent(torch.distributions.Normal(mean, 0.3), 1), self.critic(features)


STRANGE = {
    "custom": lambda x: double(x),
    "gamma": torch.lgamma,
    "if": lambda x: x if x.sum() > 0 else -x,
    "fixed batch": lambda x: x.reshape(3, 4),
    "random": lambda x: x + torch.randn_like(x),
    "mean": lambda x: x - x.mean(-1, keepdim=True),
}
EXAMPLES = np.random.default_rng(0).normal(size=(8, 3))


def test_a_policy_of_your_own_is_exported_with_example_observations(tmp_path):
    checks = torch.distributions.Distribution._validate_args
    with pytest.raises(ExportError, match="OwnPolicy has no observation_space; pass example_obs="):
        hf.export_policy(OwnPolicy(), tmp_path / "policy.pt2")
    box = spaces.Box(-0.1, 0.1, (2,))
    made = hf.export_policy(OwnPolicy(), tmp_path / "policy.pt2", example_obs=EXAMPLES, action_space=box)
    step = hf.Runner(made.path).act(EXAMPLES.astype(np.float32) * 20)
    assert np.abs(step.action).max() <= 0.1 < np.abs(step.raw_action).max()
    assert torch.distributions.Distribution._validate_args is checks  # of torch's distributions: as they were


def test_an_operator_may_be_called_like_an_output(tmp_path):
    policy, box = OwnPolicy("mean"), spaces.Box(-9, 9, (2,))
    made = hf.export_policy(policy, tmp_path / "policy.onnx", example_obs=EXAMPLES, action_space=box)
    obs = EXAMPLES.astype(np.float32)
    expected, _ = policy.predict(obs, deterministic=True)
    np.testing.assert_allclose(hf.Runner(made.path).act(obs, deterministic=True).action, expected, atol=1e-6)


@pytest.mark.parametrize(
    "strange, suffix, message",
    [
        ("custom", "pt2", r"uses the custom operator holdfast_tests::double.*plain torch operations"),
        ("gamma", "onnx", r"uses the operator \w+\.lgamma, which ONNX lacks.*or export to \.pt2"),
        ("if", "onnx", r"cannot be traced into a graph.*no \.item\(\)"),
        ("fixed batch", "pt2", r"cannot be traced into a graph.*no fixed batch size"),
        ("random", "pt2", r"differ by .* look for randomness"),
    ],
)
def test_what_a_format_cannot_hold_is_said_and_nothing_is_written(strange, suffix, message, tmp_path, capfd):
    with pytest.raises(ExportError, match=message):
        hf.export_policy(OwnPolicy(strange), tmp_path / f"policy.{suffix}", example_obs=EXAMPLES)
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("suffix", ["onnx", "pt2"])
@pytest.mark.parametrize(("where", "bad"), [("actor", np.nan), ("critic", np.nan), ("actor", np.inf)])
def test_a_policy_that_gives_no_numbers_is_not_written(tmp_path, suffix, where, bad):
    policy = make_policy(spaces.Discrete(3))
    with torch.no_grad():
        getattr(policy, where).bias[0] = bad
    message = rf"{where}.bias of this ActorCritic holds NaN" if np.isnan(bad) else "gives NaN or infinity for finite"
    with pytest.raises(ExportError, match=message):
        hf.export_policy(policy, tmp_path / f"policy.{suffix}")
    assert not list(tmp_path.iterdir())


def test_what_onnx_lacks_goes_to_pt2(tmp_path):
    assert hf.export_policy(OwnPolicy("gamma"), tmp_path / "p.pt2", example_obs=EXAMPLES).difference < 1e-4


def test_a_missing_package_is_named_with_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ImportError, match=r"ONNX needs onnxscript: pip install 'holdfast\[onnx\]'"):
        hf.export_policy(OwnPolicy(), tmp_path / "policy.onnx", example_obs=EXAMPLES)


def test_wrong_names_and_objects_are_refused(tmp_path):
    with pytest.raises(ValueError, match="unknown format 'tflite'"):
        hf.export_policy(OwnPolicy(), tmp_path / "policy.tflite")
    with pytest.raises(ValueError, match=r"a file of format pt2 ends in \.pt2"):
        hf.export_policy(OwnPolicy(), tmp_path / "policy.onnx", "pt2")
    with pytest.raises(TypeError, match=r"export takes a policy .* got a Linear"):
        hf.export_policy(nn.Linear(2, 2), tmp_path / "policy.onnx")


# --- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    run = tmp_path_factory.mktemp("run") / "lstm"
    config = hf.TrainConfig(
        env="holdfast/RepeatPreviousEasy-v0", hidden_size=8, num_envs=8, num_steps=16, total_steps=256,
        normalize_obs=True, run_dir=str(run), quiet=True, threads=1, inputs=("obs", "prev_action"),
    )  # fmt: skip
    hf.Trainer(config).run()
    return run


def test_the_command_exports_a_run(run_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["export", str(run_dir)]) == 0
    said = capsys.readouterr().out
    assert "obs_prev_action [B] int64" in said and "checked against the policy" in said
    assert cli.main(["export", str(run_dir), "-o", "out/mine.pt2"]) == 0
    runner, policy = hf.Runner("policy.onnx"), hf.load(run_dir)
    assert ExportedPolicy(Path("policy.onnx")).signature.about["env"] == "holdfast/RepeatPreviousEasy-v0"
    obs = sample_observations(policy.observation_space, 8)
    want = policy.act(obs, deterministic=True)
    for step in (runner.act(obs), hf.Runner("out/mine.pt2").act(obs), hf.Runner(run_dir).act(obs)):
        np.testing.assert_allclose(step.value, want.value, atol=1e-4)


@pytest.fixture(scope="module")
def masked_run(tmp_path_factory):
    table = partial(MaskedTable, spaces.Box(-1, 1, (3,)), spaces.MultiDiscrete([2, 3]), 1, masks=True)
    config = hf.TrainConfig(
        env="tables", core="window", hidden_size=8, memory_span=4, num_envs=2, num_steps=8, total_steps=32,
        run_dir=str(tmp_path_factory.mktemp("masked") / "run"), quiet=True, threads=1, tensorboard=False,
    )  # fmt: skip
    hf.Trainer(config, env=Tables([partial(table, number) for number in range(2)], "SAME_STEP")).run()
    return Path(config.run_dir)


def test_the_command_says_that_a_file_leaves_out_the_masks_of_its_run(masked_run, tmp_path, capsys):
    for flags, left_out in ([], True), (["--masks"], False):
        assert cli.main(["export", str(masked_run), "-o", str(tmp_path / "policy.pt2"), *flags]) == 0
        said = capsys.readouterr().out
        assert ("may choose actions that the run forbade; add --masks" in said) == left_out
        assert "Block of WindowAttention(8, 8, window=4" in said.splitlines()[0]


@pytest.mark.parametrize("kind", ["run", "checkpoint", "exported"])
@pytest.mark.parametrize("single", [True, False])
def test_a_runner_asks_once_for_the_masks_that_its_policy_was_trained_with(masked_run, run_dir, tmp_path, kind, single):
    obs, mask = np.zeros((2, 3), np.float32), np.ones((2, 5), bool)
    obs, mask = (obs[0], mask[0]) if single else (obs, mask)
    source = masked_run if kind == "run" else next((masked_run / "checkpoints").glob("*.pt"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if kind == "exported":
            source = hf.export_policy(hf.load(masked_run), tmp_path / "policy.pt2", masks=True).path
        runner = hf.Runner(source)
        runner.act(obs, action_mask=mask)
        unmasked = hf.Runner(run_dir)
        unmasked.act(sample_observations(hf.load(run_dir).observation_space, 2))
    with pytest.warns(
        UserWarning, match=r"with action masks and none came: it may choose forbidden .*action_mask="
    ) as said:
        runner.act(obs)
        runner.act(obs)
    assert len(said) == 1 and said[0].filename == __file__


def test_the_command_says_what_is_wrong_in_one_line(run_dir, tmp_path, capsys):
    for argv, message in [
        ([tmp_path / "nothing"], "there is no such file or run folder"),
        ([run_dir, "-o", tmp_path / "policy.bin"], "unknown format 'bin'"),
        ([run_dir, "--format", "jit"], "jit"),
    ]:
        assert cli.main(["export", *map(str, argv)]) == 2
        said = capsys.readouterr().err
        assert message in said and len(said.splitlines()) == 1


def test_the_deployment_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "deployment.md").read_text()
    torch.manual_seed(0)
    policy = hf.ActorCritic(spaces.Box(-1, 1, (4,)), spaces.Discrete(3), "gru", 8)
    monkeypatch.setattr(hf, "load", lambda run: policy)
    names = {}
    for block in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL):
        block = block.replace("policy.onnx", "policy.pt2")  # several times faster
        exec(block.replace('hf.Runner("runs/TMaze-v0/gru-seed1")', 'hf.Runner(hf.load("a run"))'), names)
    assert Path("policy.pt2").exists() and names["made"].path == Path("own.pt2")
