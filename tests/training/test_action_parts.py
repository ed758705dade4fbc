"""Dict and Tuple action spaces from the environment to the update and back: vector environments, masks, law 1, resuming."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

import holdfast as hf
from holdfast.algorithms.base import replay_difference
from holdfast.envs.workers import WorkersVectorEnv
from holdfast.rollout.collector import Collector
from holdfast.rollout.vector_env import VectorEnvAdapter, input_space
from holdfast.state import leaves, tree_map
from part_actions import OBS, SPACES, Parts, PartsVectorEnv, nested, parts_of

KINDS = list(SPACES)
INPUTS = ("obs", "prev_action", "prev_reward")


def make_policy(kind, inputs=INPUTS, **options):
    torch.manual_seed(3)
    policy = hf.ActorCritic(input_space(OBS, SPACES[kind], inputs), SPACES[kind], "gru", 8, **options)
    torch.nn.init.normal_(policy.actor.weight)
    return policy


def copies(kind, masks, how, mode, count=3):
    return how([partial(Parts, kind, masks, length) for length in (2, 3, 5)[:count]], autoreset_mode=mode)


@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)
@pytest.mark.parametrize("masks", ["info", "method"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_environment_gets_its_action_and_its_mask_is_obeyed(kind, masks, mode):
    """`Parts` raises at an action of another form, and at a forbidden one."""
    env, policy = copies(kind, masks, SyncVectorEnv, mode), make_policy(kind, scale_actions=True)
    collector = Collector(env, policy, 20, bptt=5, inputs=INPUTS, seed=1)
    segment = collector.rollout()
    tool, place, bits = parts_of(kind, segment.actions)
    assert tool.shape == (20, 3) and place.shape == bits.shape == (20, 3, 2)
    last = [copy.unwrapped.last for copy in env.envs]
    for row in range(3):
        if segment.valid[-1, row] and last[row] is not None:  # as it was played, clipped to its bounds
            mine = tree_map(lambda x, row=row: x[-1, row], segment.actions)
            for got, want in zip(parts_of(kind, last[row]), parts_of(kind, mine)):
                np.testing.assert_array_equal(got, want.clamp(-2, 2) if want.is_floating_point() else want)
    assert float(replay_difference(policy, segment, 5).max()) < 1e-5  # law 1
    before = parts_of(kind, segment.obs["prev_action"])
    for now, then in zip(parts_of(kind, segment.actions), before):
        go_on, begins = ~segment.resets[1:], segment.resets
        assert torch.equal(then[1:][go_on], now[:-1][go_on].to(then.dtype))
        assert (then[begins] == (1 if now is tool else 0)).all(), "the first tool is number 1"
    allowed = segment.action_mask  # the parts side by side; the Box has none
    order = ("bits", "tool") if kind == "dict" else ("tool", "bits")
    sizes = {"tool": 3, "bits": 2}
    of = dict(zip(order, allowed.split([sizes[name] for name in order], -1)))
    rows = segment.valid
    assert of["tool"].gather(-1, (tool - 1).unsqueeze(-1))[rows].all() and not bits[..., 1][rows].any()
    assert not of["tool"][rows].all() and not of["bits"][rows].all(), "something was forbidden"


@pytest.mark.parametrize("how", [AsyncVectorEnv, WorkersVectorEnv])
@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP], ids=lambda mode: mode.name)
def test_other_processes_get_the_actions_that_this_one_gives(how, mode):
    kind, masks = ("dict", "info") if mode is AutoresetMode.SAME_STEP else ("tuple", "method")
    segments = []
    for vectorization in (SyncVectorEnv, how):
        env = copies(kind, masks, vectorization, mode)
        torch.manual_seed(4)
        segments.append(Collector(env, make_policy(kind), 12, inputs=INPUTS, seed=1).rollout())
        env.close()
    for a, b in zip(*(leaves([s.obs, s.actions, s.rewards, s.action_mask]) for s in segments)):
        assert torch.equal(a, b)


def config(tmp_path, name="run", **options):
    values = {
        "core": "gru", "hidden_size": 8, "num_envs": 4, "num_steps": 16, "total_steps": 256, "epochs": 2, "minibatches": 2,
        "seed": 1, "device": "cpu", "threads": 1, "quiet": True, "tensorboard": False, "inputs": INPUTS,
        "noise_correlation": 0.5, "final_eval_episodes": 4, "run_dir": str(tmp_path / name), **options,
    }  # fmt: skip
    return hf.PPOConfig(**values)


@pytest.mark.parametrize("kind", KINDS)
def test_c_and_autograd_train_the_same_weights(kind, tmp_path):
    weights = []
    for accelerators in ("on", "off"):
        made = config(tmp_path, accelerators, accelerators=accelerators, total_steps=128)
        trainer = hf.Trainer(made, env=PartsVectorEnv(kind))
        trainer.run()
        weights.append(torch.cat([p.detach().flatten() for p in trainer.policy.parameters()]))
        assert ("in C" in trainer.engines["rollout"]) == (accelerators == "on")
    torch.testing.assert_close(*weights, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(kind, tmp_path):
    whole = hf.Trainer(config(tmp_path, checkpoint_every=2), env=PartsVectorEnv(kind))
    whole.run()
    resumed = hf.Trainer.resume(tmp_path / "run" / "checkpoints" / "update_00000002.pt", env=PartsVectorEnv(kind))
    assert resumed.update == 2 and resumed.collector.started
    resumed.run()
    assert resumed.update == whole.update == 4
    for a, b in zip(whole.policy.parameters(), resumed.policy.parameters()):
        assert torch.equal(a, b)
    assert resumed.collector.noise.value.shape == (4, 2), "one column for each number of the Box"
    assert torch.equal(whole.collector.noise.value, resumed.collector.noise.value)


def test_an_evaluation_records_parts_and_obeys_masks():
    env, policy = copies("dict", "info", SyncVectorEnv, AutoresetMode.SAME_STEP), make_policy("dict", ("obs",))
    record = hf.evaluate(policy, env, 6, seed=0, record=("action", "dist", "value")).record
    assert record["action.tool"].shape == record["value"].shape and record["action.place"].shape[2:] == (2,)
    assert record["dist.place.mean"].shape == record["action.place"].shape
    hf.evaluate(policy, env, 6, seed=0, deterministic=True)  # `Parts` raises at a forbidden tool


def test_a_saved_policy_comes_back_with_its_spaces(tmp_path):
    policy = make_policy("tuple", ("obs",))
    hf.save_pretrained(policy, tmp_path / "saved")
    loaded = hf.load(tmp_path / "saved")
    assert loaded.action_space == SPACES["tuple"]
    with pytest.raises(ValueError, match="the environment's action_space is"):
        hf.evaluate(loaded, copies("dict", None, SyncVectorEnv, AutoresetMode.SAME_STEP), 1)


def test_actions_of_an_own_policy_that_are_nested_otherwise_are_refused():
    adapter = VectorEnvAdapter(copies("dict", None, SyncVectorEnv, AutoresetMode.SAME_STEP))
    adapter.start(0)
    good = nested("dict", torch.ones(3).long(), torch.zeros(3, 2), torch.zeros(3, 2).char())
    adapter.step(good)
    for part, words in {"tool": "takes integers", "place": "takes numbers of shape"}.items():
        with pytest.raises(ValueError, match=words):
            adapter.step({**good, part: torch.zeros(3, 1)})
    with pytest.raises(ValueError, match="expected a dict with 'bits', 'place', 'tool'"):
        adapter.step({"tool": good["tool"], "place": good["place"]})
