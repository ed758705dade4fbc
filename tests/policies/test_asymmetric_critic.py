"""`actor_obs` and `critic_obs`: a critic that sees more than the actor, which nobody needs in use."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from gymnasium import spaces

import holdfast as hf
from cores.all_cores import KINDS
from holdfast import state as state_ops
from holdfast.engines import native
from privileged_env import LuckyRepeat

OBS = spaces.Dict(
    policy=spaces.Box(-1, 1, (3,)), privileged=spaces.Box(-1, 1, (2,)), terrain=spaces.Box(-1, 1, (4,), np.float32)
)
VIEWS = {"actor_obs": ("policy",), "critic_obs": ("policy", "privileged", "terrain")}
ACTIONS = spaces.Discrete(3)
T, B = 7, 4
NAMED = [kind for kind in ("lstm", "gru", "mingru", "lru", "ffm", "mlstm", "window") if kind in KINDS]


def make(core="lstm", action_space=ACTIONS, seed=0, **options):
    torch.manual_seed(seed)
    policy = hf.ActorCritic(OBS, action_space, core, 8, **{**VIEWS, **options})
    with torch.no_grad():
        policy.actor.weight.normal_()
    return policy


def observations(seed, *batch):
    g = torch.Generator().manual_seed(seed)
    return {name: torch.rand(*batch, *space.shape, generator=g) for name, space in OBS.items()}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("core", NAMED)
def test_the_actor_never_sees_what_only_the_critic_sees(core, seed):
    policy = make(core, seed=seed)
    obs = {name: part.requires_grad_() for name, part in observations(seed, T, B).items()}
    resets = torch.rand(T, B) < 0.2
    ev = policy.evaluate(obs, torch.randint(3, (T, B)), policy.initial_state(B), resets)
    for_actor = torch.autograd.grad(
        (ev.log_prob + ev.entropy).sum(), list(obs.values()), retain_graph=True, allow_unused=True
    )
    from_actor = dict(zip(obs, for_actor))
    assert from_actor["policy"].abs().sum() > 0
    for name in ("privileged", "terrain"):
        assert from_actor[name] is None or not from_actor[name].any()
    for_critic = torch.autograd.grad(ev.value.sum(), list(obs.values()))
    assert all(part.abs().sum() > 0 for part in for_critic)


def test_the_loss_of_the_actor_trains_no_part_of_the_critic_and_the_other_way_round():
    policy = make()
    ev = policy.evaluate(observations(0, T, B), torch.randint(3, (T, B)), policy.initial_state(B), None)

    def reached(loss):
        policy.zero_grad()
        loss.backward(retain_graph=True)
        return {name for name, p in policy.named_parameters() if p.grad is not None and p.grad.any()}

    by_actor, by_critic = reached(ev.log_prob.sum()), reached(ev.value.sum())
    assert not by_actor & by_critic and by_actor | by_critic == {name for name, _ in policy.named_parameters()}
    assert {name.split(".")[0] for name in by_critic if not name.startswith("core")} == {"critic_trunk", "critic"}


@pytest.mark.parametrize("core", NAMED)
def test_in_use_nothing_of_the_critic_is_needed(core):
    policy = make(core)
    full, hidden = observations(1, B), {"policy": observations(1, B)["policy"]}
    runner, actor = hf.Runner(policy), policy.actor_only()
    assert list(state_ops.named_leaves(actor.initial_state(1))) == list(
        state_ops.named_leaves(policy.core.cores["actor"].initial_state(1))
    )
    state = None
    for t in range(5):
        full, resets = observations(t, B), torch.rand(B) < 0.3
        hidden = {"policy": full["policy"]}
        want = policy.act(full, resets, deterministic=True)
        alone = actor.act(hidden, resets, deterministic=True)
        torch.testing.assert_close(alone.log_prob, want.log_prob)
        assert torch.equal(runner.act(hidden, resets).action, want.action)
        numpy = {"policy": full["policy"].numpy()}
        action, state = policy.predict(numpy, state, resets.numpy(), deterministic=True)
        assert np.array_equal(action, want.action.numpy())


def test_predict_builds_the_actor_once_and_again_when_a_part_is_replaced(tmp_path):
    policy = make("gru", spaces.Box(-1, 1, (2,), np.float32))
    obs = {name: part.numpy() for name, part in observations(0, 1).items()}
    names = set(policy.state_dict())
    first = policy.deployed()
    policy.predict(obs)
    assert policy.deployed() is first and set(policy.state_dict()) == names
    copied = copy.deepcopy(policy)
    with torch.no_grad():
        copied.actor.bias += 0.5
    assert not np.array_equal(copied.predict(obs, deterministic=True)[0], policy.predict(obs, deterministic=True)[0])
    policy.actor = torch.nn.Linear(policy.actor.in_features, policy.actor.out_features)
    assert policy.deployed() is not first and policy.deployed().actor is policy.actor
    torch.save(policy, tmp_path / "policy.pt")
    loaded = torch.load(tmp_path / "policy.pt", weights_only=False)
    assert loaded.deployed().actor is loaded.actor


def test_predict_takes_the_whole_observation_too_and_one_without_a_batch_dimension():
    policy = make()
    obs = {name: part.numpy() for name, part in observations(0, 1).items()}
    one = {name: part[0] for name, part in obs.items()}
    batch, _ = policy.predict(obs, deterministic=True)
    single, _ = policy.predict(one, deterministic=True)
    assert batch.shape == (1,) and single == batch[0]


@pytest.mark.parametrize("format", ["onnx", "pt2"])
def test_the_export_has_no_privileged_input(tmp_path, format):
    if format == "onnx":
        pytest.importorskip("onnxruntime")
    policy = make("gru", spaces.Box(-1, 1, (2,), np.float32))
    made = hf.export_policy(policy, tmp_path / f"policy.{format}")
    assert [port.name for port in made.signature.observations] == ["obs_policy"]
    assert [port.name for port in made.signature.states] == ["state_h"] and "value" not in made.signature.outputs
    exported, ours = hf.Runner(made.path), hf.Runner(policy)
    for seed in range(5):
        obs = {"policy": observations(seed, B)["policy"].numpy()}
        np.testing.assert_allclose(exported.act(obs).action, ours.act(obs).action, atol=1e-5)


@pytest.mark.parametrize("critic_core", ["shared", "separate", "none"])
def test_the_replay_law_holds_in_a_rollout(critic_core):
    torch.manual_seed(3)
    env = LuckyRepeat(6)
    policy = hf.ActorCritic(
        env.single_observation_space, env.single_action_space, "lstm", 8, critic_core, actor_obs=("policy",)
    )
    assert policy.core.cores["actor"].input_size == 8
    for _, segment in zip(range(3), hf.collect(env, policy, steps=11)):
        with torch.no_grad():
            ev = policy.evaluate(segment.obs, segment.actions, segment.start_state, segment.resets)
        torch.testing.assert_close(ev.log_prob, segment.log_prob, atol=1e-5, rtol=0)
        torch.testing.assert_close(ev.value, segment.value, atol=1e-5, rtol=0)


def test_the_update_says_why_it_does_not_run_in_c():
    assert native.native_obstacle(make()) == "actor and critic see different observations"


def test_statistics_are_kept_for_what_each_sees():
    policy = make(normalize_obs=True)
    policy.update_normalizer({name: part + 3 for name, part in observations(0, T, B).items()})
    state = policy.state_dict()
    seen = {name: tuple(t.shape) for name, t in state.items() if name.endswith(".mean")}
    assert len(seen) == 4 and all(state[name].mean() > 2 for name in seen)
    assert sum("critic_encoder" in name for name in seen) == 3


def test_a_run_trains_saves_resumes_and_loads(tmp_path):
    config = hf.TrainConfig(
        env="own", core="gru", hidden_size=8, num_envs=8, num_steps=16, total_steps=256, epochs=1, minibatches=2,
        run_dir=str(tmp_path / "run"), quiet=True, final_eval_episodes=2, actor_obs=("policy",), device="cpu",
    )  # fmt: skip
    trainer = hf.Trainer(config, env=LuckyRepeat(8))
    trainer.run()
    assert trainer.config.actor_obs == ("policy",)
    policy = hf.load(tmp_path / "run")
    assert set(policy.actor_only().observation_space) == {"policy"}
    for name, weight in trainer.policy.state_dict().items():
        torch.testing.assert_close(policy.state_dict()[name], weight)
    obs = {"policy": np.zeros((2, 3), np.float32)}
    assert hf.Runner(tmp_path / "run").act(obs).action.shape == (2,)


@pytest.mark.parametrize(
    ("space", "options", "said"),
    [
        (OBS, {"actor_obs": ("polcy",)}, "actor_obs names 'polcy', but the observation has 'policy', 'privileged'"),
        (OBS, {"critic_obs": "policy"}, "critic_obs is 'policy', expected the keys"),
        (OBS, {"actor_obs": ()}, "expected the keys"),
        (spaces.Box(-1, 1, (3,)), {"actor_obs": ("policy",)}, "actor_obs needs a Dict observation space"),
        (OBS, {"actor_obs": ("policy",), "core": hf.LSTM(8, 8)}, "give core by name or class"),
        (OBS, {"actor_obs": ("policy",), "critic_core": "both"}, "unknown critic_core 'both'"),
    ],
)
def test_a_wrong_choice_is_refused_with_what_to_do(space, options, said):
    with pytest.raises(ValueError, match=said):
        hf.ActorCritic(space, spaces.Discrete(2), **{"core": "lstm", "hidden_size": 8, **options})


def test_acting_with_the_full_policy_names_the_missing_key():
    with pytest.raises(ValueError, match=r"no 'privileged', 'terrain' .* act with policy.actor_only\(\)"):
        make().act({"policy": torch.zeros(B, 3)})
