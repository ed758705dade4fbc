"""`PPO` in place of rsl_rl's: what is computed is rsl_rl's, from the states that the rollout had, with resets inside."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("rsl_rl")

from holdfast import doctor
from holdfast.doctor import subjects
from holdfast.integrations.rsl_rl.acting import GraphActing
from holdfast.state import tree_map
from integrations.rsl_rl.arm import EXAMPLE, Arm, learn, make_runner, play

CORES = ("lstm", "gru", "mingru", "lru", "ffm", "mlstm", "window")
STEPS = 12


class Falling(Arm):
    """Episodes end at random, also in the first and the last step of a rollout; half of the ends are timeouts."""

    def step(self, actions):
        _obs, rewards, dones, extras = super().step(actions)
        chance = torch.rand(self.num_envs, generator=self.generator)
        ends, self.target = chance < 0.3, torch.where((chance < 0.3).unsqueeze(1), self._random(), self.target)
        self.episode_length_buf = self.episode_length_buf.masked_fill(ends, 0)
        extras["time_outs"] = extras["time_outs"] | (chance < 0.15)
        return self.get_observations(), rewards, dones | ends, extras


# --- law 1 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("rnn_type", CORES)
def test_training_replays_the_rollout(rnn_type, seed):
    """Also in the second and third rollout, which start inside episodes."""
    env = Falling(8, seed=seed)
    alg = make_runner(rnn_type=rnn_type, env=env, seed=seed).alg
    for _ in range(3):
        play(alg, env, STEPS)
        segment = alg._segment()
        with torch.no_grad():
            new = alg._models(segment.obs["groups"], segment.actions, segment.start_state, segment.resets)
        torch.testing.assert_close(new.log_prob, segment.log_prob, atol=1e-5, rtol=0)
        torch.testing.assert_close(new.value, segment.value, atol=1e-5, rtol=0)
        for now, then in zip(new.params, segment.obs["old"]):
            torch.testing.assert_close(now, then, atol=1e-5, rtol=0)
        alg.update()


@pytest.mark.parametrize("rnn_type", ["lstm", "gru", "lru"])
def test_the_doctor_has_no_finding(rnn_type):
    alg = make_runner(rnn_type=rnn_type, num_envs=5, num_steps=8).alg
    report = doctor.examine(subjects.RslRl(alg), seed=0)
    assert not [f for f in report.findings if f.severity == "error"], report.to_text()


def test_nothing_that_stays_holds_a_graph():
    runner = learn(make_runner(), 2)
    alg = runner.alg
    kept = [*alg.actor.rnn.state.values(), *alg.critic.rnn.state.values(), *alg.actor.output_distribution_params]
    assert not any(tensor.requires_grad for tensor in kept)


# --- the same numbers as rsl_rl -----------------------------------------------------------------------------------------


def both(rnn_type, seed, kind=Falling, **changes):
    """The same rollout in both algorithms, with the same weights: (theirs, ours) up to the returns."""
    env = kind(8, seed=seed, final_obs=False)
    theirs, ours = (make_runner(o, rnn_type, seed=seed, env=env, **copy.deepcopy(changes)).alg for o in (False, True))
    for mine, other in ((ours.actor, theirs.actor), (ours.critic, theirs.critic)):
        mine.load_state_dict(other.state_dict())
    with torch.inference_mode():
        obs = env.get_observations()
        for _ in range(STEPS):
            actions = ours.act(obs)
            theirs.act(obs)
            theirs.transition.actions = actions
            theirs.transition.actions_log_prob = theirs.actor.get_output_log_prob(actions)
            obs, rewards, dones, extras = env.step(actions)
            for alg in (theirs, ours):
                alg.process_env_step(obs, rewards, dones, dict(extras))
        for alg in (theirs, ours):
            alg.compute_returns(obs)
    return theirs, ours


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rnn_type", ["lstm", "gru"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"schedule": "fixed", "use_clipped_value_loss": False, "max_grad_norm": 0.05},
        {"normalize_advantage_per_mini_batch": True, "desired_kl": 1e-9, "optimizer": "adamw"},
        {"optimizer": "sgd", "learning_rate": 0.01, "num_learning_epochs": 3},
    ],
)
def test_an_update_moves_the_weights_as_rsl_rls_does(rnn_type, changes, seed):
    theirs, ours = both(rnn_type, seed, **changes)
    for name in ("returns", "advantages", "values", "actions_log_prob", "rewards"):
        torch.testing.assert_close(
            getattr(ours.storage, name), getattr(theirs.storage, name), atol=2e-5, rtol=1e-5, msg=name
        )
    start = {name: p.clone() for name, p in theirs.actor.named_parameters()}
    want, got = theirs.update(), ours.update()
    assert got == pytest.approx(want, rel=1e-3, abs=1e-4)
    assert ours.learning_rate == pytest.approx(theirs.learning_rate)
    moved = max((p - start[name]).abs().max() for name, p in theirs.actor.named_parameters())
    for mine, other in ((ours.actor, theirs.actor), (ours.critic, theirs.critic)):
        for (name, p), q in zip(other.named_parameters(), mine.parameters()):
            torch.testing.assert_close(q, p, atol=float(0.02 * moved), rtol=0, msg=name)
        for (name, b), c in zip(other.named_buffers(), mine.named_buffers()):
            torch.testing.assert_close(c[1], b, msg=name)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rnn_type", ["lstm", "gru"])
def test_iterations_of_the_runner_end_with_rsl_rls_weights(rnn_type, seed):
    """rsl_rl also draws actions in its update, which it does not use; so both draw from the same seed in every iteration."""
    runners = [make_runner(o, rnn_type, seed=seed, env=Arm(8, seed=seed, final_obs=False)) for o in (False, True)]
    start = {name: p.clone() for name, p in runners[0].alg.actor.named_parameters()}
    for iteration in range(4):
        for runner in runners:
            torch.manual_seed(iteration)
            learn(runner, 1)
    theirs, ours = (runner.alg for runner in runners)
    assert ours.learning_rate == pytest.approx(theirs.learning_rate)
    assert max((p - start[name]).abs().max() for name, p in theirs.actor.named_parameters()) > 0.01
    for mine, other in ((ours.actor, theirs.actor), (ours.critic, theirs.critic)):
        own = dict(mine.named_parameters())
        for name, p in other.named_parameters():
            torch.testing.assert_close(own[name], p, atol=1e-4, rtol=0, msg=name)


def test_the_learning_rate_follows_the_kl_divergence_within_rsl_rls_bounds():
    for desired, expected in ((1e-9, 1e-5), (1e9, 1e-2)):
        runner = learn(make_runner(desired_kl=desired, learning_rate=1e-3, num_learning_epochs=10), 1)
        assert runner.alg.learning_rate == pytest.approx(expected)
        assert float(runner.alg.optimizer.param_groups[0]["lr"]) == pytest.approx(expected)


def test_statistics_move_once_per_update_and_stay_in_place():
    runner = make_runner()
    alg, normalizer = runner.alg, runner.alg.actor.obs_normalizer
    addresses = {name: b.data_ptr() for name, b in normalizer.named_buffers()}
    play(alg, runner.env, STEPS)
    assert not normalizer.mean.any()
    alg.update()
    seen = alg.storage.observations["policy"].flatten(0, 1)
    torch.testing.assert_close(normalizer.mean, seen.mean(0), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(normalizer.std, seen.std(0, unbiased=False), atol=1e-4, rtol=1e-3)
    assert {name: b.data_ptr() for name, b in normalizer.named_buffers()} == addresses


# --- timeouts -----------------------------------------------------------------------------------------------------------


class Clock(Arm):
    """Every episode is one step, ended by a timeout; rewards are 0."""

    def step(self, actions):
        obs, rewards, _, extras = super().step(actions)
        everybody = torch.ones(self.num_envs, dtype=torch.bool)
        return obs, torch.zeros_like(rewards), everybody, extras | {"time_outs": everybody}


@pytest.mark.parametrize("final_obs", [True, False])
def test_a_timeout_is_bootstrapped_with_the_final_observation_where_there_is_one(final_obs, capsys):
    env = Clock(4, final_obs=final_obs)
    alg = make_runner(env=env, num_steps=1).alg
    obs = env.get_observations()
    with torch.inference_mode():
        actions = alg.act(obs)
        value, critic = alg.transition.values.clone().reshape(-1), copy.deepcopy(alg.critic)
        following, rewards, dones, extras = env.step(actions)
        want = critic(extras["final_obs"]).reshape(-1) if final_obs else value  # a step from the state before the reset
        alg.process_env_step(following, rewards, dones, extras)
    torch.testing.assert_close(alg.storage.rewards[0].reshape(-1), alg.gamma * want, atol=1e-6, rtol=1e-5)
    said = "V(final observation)" if final_obs else "V(s_t)"
    assert alg.timeout_bootstrap == said and f"bootstrapped with {said}" in capsys.readouterr().out


def test_looking_at_values_leaves_the_states_as_they_were():
    runner = make_runner()
    obs = play(runner.alg, runner.env, STEPS)
    before = {name: leaf.clone() for name, leaf in runner.alg.critic.rnn.state.items()}
    with torch.inference_mode():
        runner.alg.compute_returns(obs)
    for name, leaf in runner.alg.critic.rnn.state.items():
        assert torch.equal(leaf, before[name])


# --- OnPolicyRunner -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rnn_type", ["lstm", "gru", "lru"])
def test_learn_save_load_and_act(rnn_type, tmp_path):
    runner = learn(make_runner(rnn_type=rnn_type, log_dir=str(tmp_path)), 3)
    start = make_runner(rnn_type=rnn_type).alg.actor.state_dict()
    assert any(not torch.equal(weight, start[name]) for name, weight in runner.alg.actor.state_dict().items())
    other = make_runner(rnn_type=rnn_type, seed=5)
    other.load(str(tmp_path / "model_2.pt"))
    assert other.current_learning_iteration == 2 and other.alg.learning_rate == runner.alg.learning_rate
    rewards = [EXAMPLE.mean_reward(r.get_inference_policy(), Arm(8, seed=9), 20) for r in (runner, other)]
    assert rewards[0] == rewards[1]
    learn(other, 1)  # and goes on training


@pytest.mark.parametrize("rnn_type", ["lstm", "gru"])
def test_checkpoints_go_from_rsl_rls_classes_to_ours_and_back(rnn_type, tmp_path):
    for first, second in ((False, True), (True, False)):
        path = str(tmp_path / f"{first}.pt")
        made = learn(make_runner(first, rnn_type), 2)
        made.logger.writer = made.logger.logger_type = None
        torch.save({**made.alg.save(), "iter": 2, "infos": None}, path)
        continued = make_runner(second, rnn_type, seed=3)
        continued.load(path)
        for name, weight in made.alg.critic.state_dict().items():
            torch.testing.assert_close(continued.alg.critic.state_dict()[name], weight)
        assert isinstance(continued.alg.learning_rate, float)
        learn(continued, 1)


@pytest.mark.parametrize("which", ["actor", "critic"])
def test_a_model_without_memory_may_stand_next_to_one_with(which):
    plain = {"class_name": "MLPModel"}
    runner = make_runner()
    cfg = copy.deepcopy(runner.cfg)
    cfg[which] = {k: v for k, v in cfg[which].items() if not k.startswith("rnn")} | plain
    from rsl_rl.runners import OnPolicyRunner

    learn(OnPolicyRunner(Arm(8), cfg), 2)


def test_mixed_precision_trains():
    assert learn(make_runner(use_mixed_precision=True), 2).alg.actor.mlp[0].weight.isfinite().all()


def test_a_beta_distribution_trains():
    runner = make_runner(actor={"distribution_cfg": {"class_name": "BetaDistribution"}})
    assert learn(runner, 2).alg.actor.mlp[0].weight.isfinite().all()


def test_random_network_distillation_trains_its_predictor():
    env = Arm(8)
    env.unwrapped, env.step_dt = env, 0.02
    rnd = {"num_outputs": 2, "predictor_hidden_dims": [8], "target_hidden_dims": [8], "weight": 1.0}
    runner = make_runner(env=env, rnd_cfg=rnd, obs_groups={"rnd_state": ["policy"]})
    before = copy.deepcopy(runner.alg.rnd.predictor.state_dict())
    play(runner.alg, env, STEPS)
    assert runner.alg.update()["rnd"] > 0
    assert any(not torch.equal(w, before[n]) for n, w in runner.alg.rnd.predictor.state_dict().items())


def test_a_minibatch_that_is_not_finite_is_skipped_and_counted():
    runner = make_runner(num_mini_batches=1, num_learning_epochs=1)
    play(runner.alg, runner.env, STEPS)
    before = copy.deepcopy(runner.alg.actor.state_dict())
    runner.alg.storage.advantages[3, 2] = float("nan")
    assert runner.alg.update()["skipped_steps"] == 1
    weights = {name: w for name, w in runner.alg.actor.state_dict().items() if "normalizer" not in name}
    assert all(torch.equal(w, before[name]) for name, w in weights.items())


# --- refusals -----------------------------------------------------------------------------------------------------------


def test_what_is_not_supported_is_refused_in_one_line():
    with pytest.raises(ValueError, match=r"algorithm.symmetry_cfg: .* set it to None"):
        alg = make_runner().alg
        type(alg)(alg.actor, alg.critic, alg.storage, symmetry_cfg={"use_mirror_loss": True})
    for count in (0, 10_000):
        with pytest.raises(ValueError, match=rf"num_mini_batches is {count}; a minibatch holds whole environments"):
            make_runner(num_mini_batches=count)
    with pytest.raises(ValueError, match="torch_compile_mode='default' is not needed"):
        make_runner(torch_compile_mode="default")
    with pytest.raises(
        ValueError, match=r"actor.class_name is rsl_rl's RNNModel, .* use holdfast.integrations.rsl_rl:RNNModel"
    ):
        make_runner(actor={"class_name": "RNNModel"})


# --- what is captured on a GPU, without the capture -------------------------------------------------------------------


class Uncaptured(GraphActing):
    """Does everything again where a graph would be replayed."""

    def __init__(self, models, gamma):
        super().__init__(models, gamma)
        self._captured = self._eager

    def _recorded(self, function):
        random = torch.get_rng_state()
        result = tree_map(torch.clone, function() or ())
        torch.set_rng_state(random)

        def replay():
            tree_map(lambda fixed, new: fixed.copy_(new), result, function() or ())

        return replay, result


class WithoutFinalObs(Falling):
    def step(self, actions):
        obs, rewards, dones, extras = super().step(actions)
        return obs, rewards, dones, {"time_outs": extras["time_outs"]}


@pytest.mark.parametrize(
    ("env", "rnn_type", "seed"), [(Falling, "lstm", 1), (WithoutFinalObs, "gru", 2), (Arm, "window", 3)]
)
def test_steps_that_store_themselves_leave_in_the_storage_what_rsl_rl_puts_there(env, rnn_type, seed):
    def played(captured):
        arm = env(8, seed=seed)
        alg = make_runner(rnn_type=rnn_type, env=arm, seed=seed).alg
        if captured:
            alg._acting = Uncaptured(alg._models, alg.gamma)
        torch.manual_seed(seed)
        for _ in range(3):
            play(alg, arm, STEPS)
            st = alg.storage
            assert st.step == STEPS
            kept = [
                st.actions,
                st.values,
                st.actions_log_prob,
                st.rewards,
                st.dones,
                st.returns,
                *st.distribution_params,
            ]
            yield [part.clone() for part in (*kept, *st.observations.values(), alg._segment().resets)]
            alg.update()

    for mine, theirs in zip(list(played(True)), list(played(False))):
        assert len(mine) == len(theirs) == 11
        for one, other in zip(mine, theirs):
            torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


def test_acting_after_a_rollout_that_is_not_trained_on_yet_leaves_it_alone():
    arm = Falling(8, seed=4)
    alg = make_runner(env=arm, seed=4).alg
    alg._acting = Uncaptured(alg._models, alg.gamma)
    obs = play(alg, arm, STEPS)
    before = alg.storage.actions.clone()
    with torch.inference_mode():
        alg.act(obs)
        with pytest.raises(OverflowError, match="the storage is full"):
            alg.process_env_step(obs, torch.zeros(8), torch.zeros(8), {})
    assert torch.equal(alg.storage.actions, before)


# --- images -----------------------------------------------------------------------------------------------------------


class Seen(Falling):
    """With an image of what the robot feels, in a group of its own."""

    def get_observations(self):
        found = super().get_observations()
        return found.set("image", found["policy"][:, :1, None, None].expand(-1, 1, 8, 8).contiguous())


CNN = {
    "class_name": "CNNModel",
    "cnn_cfg": {"output_channels": [4], "kernel_size": 3, "stride": 2, "activation": "elu"},
    "rnn_type": None, "rnn_hidden_dim": None, "rnn_num_layers": None,
}  # fmt: skip


@pytest.mark.parametrize("roles", [("critic",), ("actor",), ("actor", "critic")])
def test_models_that_see_images_learn_what_they_learn_in_rsl_rl(roles):
    """rsl_rl's CNNModel lists images apart from its other observation groups."""
    groups = {"actor": ["policy"], "critic": ["policy", "privileged"]}
    seeing = {role: [*groups[role], "image"] for role in roles}
    plain = {**dict.fromkeys(CNN), "class_name": "MLPModel"}
    models = {name: CNN if name in roles else plain for name in groups}
    theirs, ours = both(None, 0, Seen, obs_groups=seeing, num_mini_batches=1, **models)
    start = {name: [p.clone() for p in getattr(ours, name).parameters()] for name in groups}
    assert ours.update() == pytest.approx(theirs.update(), rel=1e-3, abs=1e-4)
    for name in groups:
        for was, p, q in zip(start[name], getattr(ours, name).parameters(), getattr(theirs, name).parameters()):
            assert not torch.equal(p, was)
            torch.testing.assert_close(p, q, atol=1e-5, rtol=0)
