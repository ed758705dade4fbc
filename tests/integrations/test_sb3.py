"""Inside Stable-Baselines3: scripts written for sb3-contrib run unchanged, and the laws hold."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

import holdfast as hf
from cores.all_cores import cells_side_by_side
from holdfast.integrations import sequences

sb3_contrib = pytest.importorskip("sb3_contrib")

from stable_baselines3.common.callbacks import BaseCallback, CheckpointCallback, EvalCallback  # noqa: E402
from stable_baselines3.common.evaluation import evaluate_policy  # noqa: E402
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecMonitor, VecNormalize  # noqa: E402

from holdfast.integrations.sb3 import MlpLstmPolicy, RecurrentPPO  # noqa: E402

_spec = importlib.util.spec_from_file_location("sb3_environments", Path(__file__).with_name("sb3_environments.py"))
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
Recall, MaskedRecall = _module.Recall, _module.MaskedRecall

SMALL = {"lstm_hidden_size": 8, "net_arch": [8]}


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def vec(envs=3, kind="vector", make=Recall, **kwargs):
    return VecMonitor(DummyVecEnv([lambda: make(kind=kind, **kwargs) for _ in range(envs)]))


def model(policy="MlpLstmPolicy", env=None, algorithm=RecurrentPPO, policy_kwargs=None, **kwargs):
    arguments = {"n_steps": 16, "batch_size": 16, "n_epochs": 2, "seed": 0, "device": "cpu", **kwargs}
    env = vec() if env is None else env
    return algorithm(policy, env, policy_kwargs={**SMALL, **(policy_kwargs or {})}, **arguments)


class Count(BaseCallback):
    def _on_step(self):
        assert {"infos", "actions", "values", "dones"} <= set(self.locals)
        return True


ALIASES = [("MlpLstmPolicy", "vector"), ("CnnLstmPolicy", "image"), ("MultiInputLstmPolicy", "dict")]


@pytest.mark.parametrize("policy, kind", ALIASES)
def test_a_script_for_sb3_contrib_runs_with_the_import_replaced(policy, kind, tmp_path):
    callbacks = [
        Count(),
        CheckpointCallback(save_freq=16, save_path=str(tmp_path)),
        EvalCallback(vec(1, kind), n_eval_episodes=2, eval_freq=16, verbose=0),
    ]
    m = model(policy, vec(kind=kind), n_epochs=1)
    m.learn(96, callback=callbacks)
    m.save(tmp_path / "model")
    again = RecurrentPPO.load(tmp_path / "model", env=vec(kind=kind))
    mean, _ = evaluate_policy(again, vec(1, kind), n_eval_episodes=3)
    assert 0 <= mean <= 8
    again.learn(48)
    assert m.num_timesteps == 96 and list(tmp_path.glob("rl_model_*"))


def test_vec_normalize_and_subprocess_environments_work():
    env = VecNormalize(VecMonitor(SubprocVecEnv([Recall, Recall], start_method="fork")))
    m = model(env=env)
    m.learn(64)
    assert env.obs_rms.count > 32
    env.close()


@pytest.mark.parametrize(
    "options", [{}, {"shared_lstm": True, "enable_critic_lstm": False}, {"enable_critic_lstm": False}]
)
@pytest.mark.parametrize("layers", [1, 2])
def test_an_sb3_contrib_checkpoint_loads_and_predicts_the_same(options, layers, tmp_path):
    theirs = model(algorithm=sb3_contrib.RecurrentPPO, policy_kwargs={"n_lstm_layers": layers, **options})
    theirs.learn(48)
    theirs.save(tmp_path / "theirs")
    ours = RecurrentPPO.load(tmp_path / "theirs", env=vec())
    assert isinstance(ours.policy, MlpLstmPolicy)
    state_a = state_b = None
    for t in range(12):
        obs, start = np.random.default_rng(t).random((3, 5)).astype(np.float32), np.array([t == 0, t == 5, False])
        a, state_a = theirs.predict(obs, state_a, start, deterministic=True)
        b, state_b = ours.predict(obs, state_b, start, deterministic=True)
        assert (a == b).all()
        for x, y in zip(state_a, state_b):
            np.testing.assert_allclose(x, y, atol=1e-6)
    ours.learn(48)  # its optimizer state fits too


SAME = {
    "as it is": {},
    "batch that does not divide": {"batch_size": 10},
    "batch of several environments": {"batch_size": 40},
    "no batch size": {"batch_size": None},
    "two layers": {"policy_kwargs": {"n_lstm_layers": 2}},
    "shared": {"policy_kwargs": {"shared_lstm": True, "enable_critic_lstm": False}},
    "memoryless critic": {"policy_kwargs": {"enable_critic_lstm": False}},
    "entropy, value clipping, schedule": {
        "ent_coef": 0.01,
        "clip_range_vf": 0.2,
        "learning_rate": lambda left: 1e-3 * left,
    },
    "dict": {"policy": "MultiInputLstmPolicy", "env": "dict"},
    "Box actions": {"env": "Pendulum-v1"},
    "gSDE": {"env": "Pendulum-v1", "use_sde": True, "sde_sample_freq": 4},
    "no advantage normalization, early stop": {"normalize_advantage": False, "target_kl": 1e-4, "learning_rate": 1e-2},
}


@pytest.mark.parametrize("case", SAME)
def test_from_the_same_seed_training_is_sb3_contribs(case):
    """Weights at the start, actions of every rollout, and weights after four updates."""
    runs = []
    for algorithm in (sb3_contrib.RecurrentPPO, RecurrentPPO):
        arguments = dict(SAME[case])
        kind = arguments.pop("env", "vector")
        env = VecMonitor(DummyVecEnv([lambda kind=kind: gym.make(kind)] * 3)) if "-v" in kind else vec(kind=kind)
        m = model(env=env, algorithm=algorithm, **arguments)
        history = [{name: w.clone() for name, w in m.policy.state_dict().items()}]
        for update in range(4):
            m.learn(48, reset_num_timesteps=update == 0)
            buffer = m.rollout_buffer
            taken = buffer.actions.reshape(-1) if buffer.generator_ready else buffer.swap_and_flatten(buffer.actions)
            history.append({"actions": torch.as_tensor(taken).flatten(), **m.policy.state_dict()})
            history[-1] = {name: w.clone() for name, w in history[-1].items()}
        runs.append(history)
    for theirs, ours in zip(*runs):
        assert list(theirs) == list(ours)
        for name, weight in theirs.items():
            torch.testing.assert_close(ours[name], weight, atol=2e-6, rtol=0)


def ratio_gap(m):
    """PPO's ratio minus 1 over every step of a fresh rollout, and how many steps there were."""
    m.learn(m.n_steps * m.n_envs * 3)
    _, callback = m._setup_learn(10**6, None, False)
    m.collect_rollouts(m.env, callback, m.rollout_buffer, m.n_steps)
    gap, steps = 0.0, 0
    for sample in m.rollout_buffer.get(m.batch_size):
        valid = sample.mask > 0
        actions = sample.actions.long().flatten() if isinstance(m.action_space, gym.spaces.Discrete) else sample.actions
        values, log_prob, _ = m.policy.evaluate_actions(
            sample.observations, actions, sample.lstm_states, sample.episode_starts
        )
        gap = max(gap, float(((log_prob.detach() - sample.old_log_prob).exp() - 1)[valid].abs().max()))
        assert float((values.detach().flatten() - sample.old_values)[valid].abs().max()) < 1e-4
        steps += int(valid.sum())
    return gap, steps


CASES = {
    "lstm": {},
    "gru": {"policy_kwargs": {"core": "gru"}},
    "two layers": {"policy_kwargs": {"n_lstm_layers": 2}},
    "shared": {"policy_kwargs": {"shared_lstm": True, "enable_critic_lstm": False}},
    "memoryless critic": {"policy_kwargs": {"enable_critic_lstm": False}},
    "learned reset": {"policy_kwargs": {"lstm_kwargs": {"reset": "learned"}}},
    "never reset": {"policy_kwargs": {"core": "gru", "lstm_kwargs": {"reset": "never"}}},
    "detach": {"policy_kwargs": {"lstm_kwargs": {"reset": "detach"}}},
    "all cells": {"policy_kwargs": {"core": cells_side_by_side(5)}},
    "batch that does not divide": {"batch_size": 10},
    "batch of several environments": {"batch_size": 40},
    "no batch size": {"batch_size": None},
    "images": {"policy": "CnnLstmPolicy", "env": ("image", Recall)},
    "dict": {"policy": "MultiInputLstmPolicy", "env": ("dict", Recall)},
    "masks": {"env": ("vector", MaskedRecall)},
}


@pytest.mark.parametrize("case", CASES)
def test_the_ratio_at_epoch_0_is_one(case):
    arguments = dict(CASES[case])
    kind, make = arguments.pop("env", ("vector", Recall))
    m = model(env=vec(kind=kind, make=make), **arguments)
    gap, steps = ratio_gap(m)
    assert gap < 1e-5
    assert steps == 48  # every step once


def test_minibatches_hold_the_steps_asked_for():
    m = model(batch_size=16)
    ratio_gap(m)
    assert [int(s.mask.sum()) for s in m.rollout_buffer.get(16)] == [16, 16, 16]
    assert [int(s.mask.sum()) for s in m.rollout_buffer.get(32)] == [32, 16]
    assert [int(s.mask.sum()) for s in m.rollout_buffer.get(None)] == [48]


def test_episodes_side_by_side_give_the_gradient_of_episodes_in_a_row(monkeypatch):
    m = model(batch_size=48)
    ratio_gap(m)

    def gradient():
        np.random.seed(0)
        (sample,) = m.rollout_buffer.get(None)
        valid = sample.mask > 0
        values, log_prob, entropy = m.policy.evaluate_actions(
            sample.observations, sample.actions.long().flatten(), sample.lstm_states, sample.episode_starts
        )
        loss = (log_prob * sample.advantages + entropy + values.flatten() ** 2)[valid].sum()
        return sample.mask.numel() // sample.lstm_states.pi[0].shape[1], torch.autograd.grad(
            loss, m.policy.lstm_actor.parameters()
        )

    short, packed = gradient()
    monkeypatch.setattr(sequences, "ENOUGH_ROWS", 0)
    whole, rows = gradient()
    assert short < whole == 16
    for a, b in zip(packed, rows):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_minibatches_are_cut_where_sb3_contrib_cuts_them():
    drawn = []
    for algorithm in (sb3_contrib.RecurrentPPO, RecurrentPPO):
        m = model(algorithm=algorithm, batch_size=20)
        ratio_gap(m)
        np.random.seed(3)
        # Which steps a minibatch holds: every step has a return of its own.
        drawn.append([sorted(s.returns[s.mask > 0].tolist()) for _ in range(5) for s in m.rollout_buffer.get(20)])
    assert len({tuple(batch) for batch in drawn[0]}) == len(drawn[0]) == 15
    for a, b in zip(*drawn):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_pieces_are_laid_out_as_in_the_picture():
    starts = np.zeros(11, dtype=bool)
    starts[[6, 9]] = True
    chunks = sequences.cut(np.arange(11), 11, starts, at_episodes=True)
    assert chunks == [[(0, 6, 0), (6, 3, None), (9, 2, None)]]
    layout = sequences.lay_out(chunks)
    assert layout.step[0].tolist() == [0, 1, 2, 3, 4, 5]
    assert layout.step[1, :5].tolist() == [6, 7, 8, 9, 10] and layout.valid.sum() == 11


def test_a_chunk_begins_where_the_minibatch_and_where_an_environment_begins():
    rows = np.array(
        [9, 10, 11, 0, 1, 2, 3, 4]
    )  # 3 environments of 4 steps: the last three steps, then from the first on
    starts = np.zeros(12, dtype=bool)
    starts[[2, 4]] = True
    assert sequences.cut(rows, 4, starts, at_episodes=True) == [
        [(9, 3, 9)],
        [(0, 2, 0), (2, 2, None)],
        [(4, 1, None)],
    ]
    assert sequences.cut(rows, 4, starts, at_episodes=False) == [[(9, 3, 9)], [(0, 4, 0)], [(4, 1, 4)]]


# --- masks --------------------------------------------------------------------------------------------------------


def test_a_masked_action_is_never_taken_in_100k_steps_of_training():
    m = model(env=vec(100, make=MaskedRecall, actions=20), n_steps=50, batch_size=1000, n_epochs=1, learning_rate=3e-3)
    before = {name: weight.clone() for name, weight in m.policy.named_parameters()}
    m.learn(100_000)  # the environment raises on a forbidden action, and 90% are forbidden
    assert m.num_timesteps == 100_000
    assert not any(torch.equal(before[name], weight) for name, weight in m.policy.named_parameters())


def test_predict_takes_masks_as_maskable_ppo_does():
    m = model(env=vec(2, make=MaskedRecall))
    obs, masks = np.zeros((2, 5), np.float32), np.array([[False, False, True, False], [True, False, False, False]])
    for _ in range(20):
        action, _ = m.predict(obs, action_masks=masks)
        assert action.tolist() == [2, 0]
    action, _ = m.predict(obs[0], action_masks=masks[0])
    assert int(action) == 2


@pytest.mark.parametrize(
    "space, forbid",
    [
        (gym.spaces.MultiDiscrete([3, 2]), lambda a: (a[:, 0] == 1).any() or (a[:, 1] == 0).any()),
        (gym.spaces.MultiBinary(2), lambda a: (a[:, 0] == 1).any() or (a[:, 1] == 0).any()),
    ],
)
def test_masks_of_other_action_spaces(space, forbid):
    policy = MlpLstmPolicy(gym.spaces.Box(-1, 1, (3,)), space, lambda _: 1e-3, **SMALL)
    multi = isinstance(space, gym.spaces.MultiDiscrete)
    mask = [True, False, True, False, True] if multi else [True, False, False, True]
    for _ in range(20):
        actions, _ = policy.predict(np.zeros((5, 3), np.float32), action_masks=np.array([mask] * 5))
        assert not forbid(actions)
    states = policy_states(policy, 5)
    obs, starts = torch.zeros(5, 3), torch.ones(5)
    _, log_prob, entropy = policy.evaluate_actions(
        obs, torch.as_tensor(actions), states, starts, torch.tensor([mask] * 5)
    )
    assert torch.isfinite(log_prob).all() and torch.isfinite(entropy).all()
    (log_prob.sum() + entropy.sum()).backward()
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in policy.parameters())


def policy_states(policy, n):
    from sb3_contrib.common.recurrent.type_aliases import RNNStates

    from holdfast.integrations.sb3 import state_pairs

    return RNNStates(state_pairs.initial(policy.lstm_actor, n), state_pairs.initial(policy.lstm_critic, n))


# --- memory in checkpoints ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("core", ["lstm", "gru"])
def test_a_checkpoint_goes_on_with_its_memory(core, tmp_path):
    env = vec(end=0.0, length=1000)  # nobody's episode ends at the moment of saving
    m = model(env=env, policy_kwargs={"core": core})
    m.learn(96)
    m.save(tmp_path / "m")
    again = RecurrentPPO.load(tmp_path / "m", env=env, force_reset=False)
    for pair, other in zip(m._last_lstm_states, again._last_lstm_states):
        assert all(torch.equal(a, b) for a, b in zip(pair, other))
        assert float(pair[0].abs().sum()) > 0
    assert (m._last_obs == again._last_obs).all() and not again._last_episode_starts.any()
    more = RecurrentPPO.load(tmp_path / "m", env=vec(5))  # another number of environments starts afresh
    assert more._last_lstm_states.pi[0].shape[1] == 5
    more.learn(80)


# --- bad input ----------------------------------------------------------------------------------------------------


def test_bad_input_says_what_to_change():
    m = model()
    obs = np.zeros((3, 5), np.float32)
    _, state = m.predict(obs)
    with pytest.raises(ValueError, match="for 2 environments"):
        m.predict(obs[:2], state)
    with pytest.raises(ValueError, match="tuple of 2"):
        m.predict(obs, state[0])
    with pytest.raises(ValueError, match="unknown core 'mamba'"):
        model(policy_kwargs={"core": "mamba"})
    with pytest.raises(ValueError, match="dropout"):
        model(policy_kwargs={"lstm_kwargs": {"dropout": 0.1}, "n_lstm_layers": 2})
    with pytest.raises(ValueError, match="the core takes 9 features"):
        model(policy_kwargs={"core": hf.GRU(9, 4)})
    with pytest.raises(ValueError, match="no state"):
        model(policy_kwargs={"core": hf.Memoryless(5)})
    with pytest.raises(ValueError, match="forbids every action"):
        m.predict(obs, action_masks=np.zeros((3, 4), bool))
    with pytest.raises(ValueError, match="5 entries per environment, expected 4"):
        m.predict(obs, action_masks=np.ones((3, 5), bool))
    with pytest.raises(ValueError, match="not a recurrent policy"):
        from stable_baselines3.common.policies import ActorCriticPolicy

        model(ActorCriticPolicy)


def test_an_environment_that_never_ends_is_noticed():
    m = model(env=vec(1, end=0.0, length=10**9), n_steps=2, batch_size=2, n_epochs=1)
    with pytest.warns(UserWarning, match="no episode has ended"):
        m.learn(220)


def test_a_policy_written_for_sb3_contrib_is_moved_onto_our_cores():
    from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy

    class Mine(RecurrentActorCriticPolicy):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **{**kwargs, "activation_fn": torch.nn.ReLU})

    m = model(Mine)
    m.learn(48)
    assert isinstance(m.policy, Mine) and isinstance(m.policy.lstm_actor, hf.LSTM)
