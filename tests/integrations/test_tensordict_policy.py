"""The TensorDict form keeps the laws: replay, isolation, identity, and one graph per leg."""

from __future__ import annotations

import gymnasium as gym
import pytest
import torch
from tensordict import TensorDict

import holdfast as hf
from accumulator import Accumulator
from cores.all_cores import CELLS, core_of
from holdfast.integrations.tensordict import LSTMWrapper, TensorDictPolicy

OBS, ACTIONS, HIDDEN = 5, 3, 8


def make_td_policy(core="lstm", reset="zero"):
    torch.manual_seed(0)
    policy = hf.ActorCritic(
        gym.spaces.Box(-1, 1, (OBS,)),
        gym.spaces.Discrete(ACTIONS),
        core=core_of(core, reset, HIDDEN) if core in CELLS else core,
        hidden_size=HIDDEN,
    )
    return TensorDictPolicy(policy)


class HandWritten(LSTMWrapper):
    """A policy in the style the wrapper is for."""

    def __init__(self, num_layers=2):
        super().__init__(None, None, input_size=HIDDEN, hidden_size=HIDDEN, num_layers=num_layers)
        self.encoder = torch.nn.Linear(OBS, HIDDEN)
        self.actor, self.critic = torch.nn.Linear(HIDDEN, ACTIONS), torch.nn.Linear(HIDDEN, 1)

    def forward(self, td, state=None, action=None):
        B, TT = td.batch_size if td.batch_dims == 2 else (td.batch_size[0], 1)
        hidden = torch.tanh(self.encoder(td["env_obs"])).view(B, TT, -1).transpose(0, 1)
        h, c, env_id = self._manage_lstm_state(td, B, TT, hidden.device)
        hidden, (h, c) = self.lstm(hidden, (h, c))
        self._store_lstm_state(h, c, env_id)
        flat = hidden.transpose(0, 1).reshape(B * TT, -1)
        log_probs, value = self.actor(flat).log_softmax(-1), self.critic(flat).squeeze(-1)
        if action is None:
            actions = log_probs.exp().multinomial(1).squeeze(-1)
            td["actions"], td["values"] = actions, value
            td["act_log_prob"] = log_probs.gather(-1, actions[:, None]).squeeze(-1)
        else:
            chosen = log_probs.gather(-1, action.reshape(-1, 1)).squeeze(-1)
            td["act_log_prob"], td["value"] = chosen.view(B, TT), value.view(B, TT)
        return td


def make_wrapper():
    torch.manual_seed(0)
    return HandWritten()


MAKERS = {
    **{kind: (lambda kind=kind: make_td_policy(kind)) for kind in CELLS},
    "accumulator": lambda: make_td_policy(Accumulator(HIDDEN)),  # leaves of several dtypes
    "wrapper": make_wrapper,
}


@pytest.fixture(params=MAKERS)
def policy(request):
    return MAKERS[request.param]()


def step_td(B, obs=None, dones=None, truncateds=None, ids=None, start=None):
    entries = {"env_obs": torch.randn(B, OBS) if obs is None else obs}
    for name, value in {"dones": dones, "truncateds": truncateds, "training_env_ids": ids}.items():
        if value is not None:
            entries[name] = value
    if start is not None:
        entries["training_env_id_start"] = torch.full((B,), start)
    return TensorDict(entries, batch_size=[B])


def roll(policy, B, T, p=0.2, first=False):
    """T rollout steps with random flags: the batch [B, T] with what the rollout gave, and the start state."""
    steps, start = [], None
    for t in range(T):
        td = step_td(B, dones=torch.rand(B) < p, truncateds=torch.rand(B) < p)
        if first and t == 0:
            td["dones"] = torch.ones(B, dtype=torch.bool)
        start = policy.start_state(td) if t == 0 else start
        steps.append(policy(td).detach())
    batch = torch.stack(steps, 1)  # [B, T]
    return batch, start


def inputs_of(batch):
    return batch.select("env_obs", "dones", "truncateds")


def test_training_replays_the_rollout_over_several_segments(policy):
    for segment in range(3):
        batch, start = roll(policy, B=4, T=7, first=segment == 0)
        with torch.no_grad():
            out = policy(inputs_of(batch), state=start, action=batch["actions"])
        assert out.batch_size == (4, 7)
        torch.testing.assert_close(out["act_log_prob"], batch["act_log_prob"], atol=1e-5, rtol=0)
        torch.testing.assert_close(out["value"], batch["values"], atol=1e-5, rtol=0)


def test_flat_batches_are_batch_major():
    policy = make_td_policy()
    batch, start = roll(policy, B=3, T=6)
    flat = inputs_of(batch).reshape(18)
    for out in (
        policy(flat.clone(), state=start, action=batch["actions"], bptt=6),
        policy(flat.clone(), state=start, action=batch["actions"].reshape(18), bptt=6),
        policy(flat.clone(), state=start, action=batch["actions"].reshape(18)),  # 3 rows of state say it too
    ):
        torch.testing.assert_close(out["act_log_prob"], batch["act_log_prob"].reshape(18), atol=1e-5, rtol=0)
        assert out["bptt"].shape == (18,) and out["bptt"].dtype == torch.long
        assert (out["bptt"] == 6).all() and (out["batch"] == 3).all()


def test_results_of_both_legs_have_their_names_and_shapes():
    policy = make_td_policy()
    td = policy(step_td(4))
    assert td["full_log_probs"].shape == (4, ACTIONS) and td["values"].shape == (4,)
    assert (td["bptt"] == 1).all() and (td["batch"] == 4).all() and td["batch"].shape == (4,)
    picked = td["full_log_probs"].gather(-1, td["actions"][:, None]).squeeze(-1)
    torch.testing.assert_close(picked, td["act_log_prob"])
    batch, start = roll(policy, 4, 5)
    out = policy(inputs_of(batch), state=start, action=batch["actions"])
    assert out["full_log_probs"].shape == (4, 5, ACTIONS) and out["entropy"].shape == (4, 5)


def test_shape_entries_that_are_there_are_kept_and_never_read():
    policy = make_td_policy()
    td = step_td(2)
    td["bptt"] = torch.full((2,), 77)
    assert (policy(td)["bptt"] == 77).all()


@pytest.mark.parametrize("flag", ["dones", "truncateds"])
def test_either_flag_alone_resets_and_no_flag_does_not(policy, flag):
    obs = torch.randn(3, OBS)
    first = policy(step_td(3, obs))["values"].clone()
    policy(step_td(3, torch.randn(3, OBS)))
    carried = policy(step_td(3, obs))["values"].clone()
    assert not torch.allclose(first, carried)
    again = policy(step_td(3, obs, **{flag: torch.ones(3)}))["values"]  # a float flag of 1 counts
    torch.testing.assert_close(again, first)


def test_no_flags_equal_flags_that_are_all_false():
    a, b = make_td_policy(), make_td_policy()
    for _ in range(5):
        obs = torch.randn(2, OBS)
        off = torch.zeros(2, dtype=torch.bool)
        torch.testing.assert_close(a(step_td(2, obs))["values"], b(step_td(2, obs, off, off))["values"])


def test_each_environment_keeps_its_own_row_however_it_is_addressed(policy):
    T, B = 6, 4
    obs = torch.randn(T, B, OBS)
    solo = []
    for b in range(B):
        policy.reset_memory()
        policy.memory.forget(range(policy.memory.num_rows))
        solo.append(torch.stack([policy(step_td(1, obs[t, b : b + 1]))["values"] for t in range(T)]))
    policy.memory.forget(range(policy.memory.num_rows))
    for t in range(T):
        if t % 2:  # two slices, the later one first
            for start in (2, 0):
                values = policy(step_td(2, obs[t, start : start + 2], start=start))["values"]
                for k in range(2):
                    torch.testing.assert_close(values[k], solo[start + k][t, 0])
        else:
            order = torch.randperm(B)
            values = policy(step_td(B, obs[t, order], ids=order))["values"]
            for k, b in enumerate(order.tolist()):
                torch.testing.assert_close(values[k], solo[b][t, 0])


def test_training_leaves_memory_alone(policy):
    batch, start = roll(policy, 3, 4)
    before = policy.get_memory()
    policy(inputs_of(batch), state=start, action=batch["actions"])
    after = policy.get_memory()
    assert all(torch.equal(a, b) for a, b in zip(before["leaves"], after["leaves"]))


def test_a_start_state_is_a_snapshot_that_later_steps_do_not_change(policy):
    policy(step_td(2))
    kept = policy.start_state(step_td(2))
    copy = {k: v.clone() for k, v in kept.items()}
    for _ in range(3):
        policy(step_td(2))
    assert all(torch.equal(kept[k], copy[k]) for k in copy)


def test_memory_goes_through_a_checkpoint_and_weights_hold_none_of_it(policy):
    for _ in range(3):
        policy(step_td(2))
    saved, obs = policy.get_memory(), torch.randn(2, OBS)
    expected = policy(step_td(2, obs))["values"].clone()
    assert not any("memory" in k or "resets" in k for k in policy.state_dict())
    policy.reset_memory()
    assert not torch.allclose(policy(step_td(2, obs))["values"], expected)
    policy.set_memory(saved)
    torch.testing.assert_close(policy(step_td(2, obs))["values"], expected, atol=0, rtol=0)
    policy.reset_env_memory(1)
    assert policy.has_memory()


def test_carried_state_holds_no_graph_and_training_can_repeat(policy):
    batch, start = roll(policy, 3, 5)
    for _ in range(3):
        out = policy(inputs_of(batch), state=start, action=batch["actions"])
        out["act_log_prob"].sum().backward()
    for _ in range(20):
        policy(step_td(3))
    assert all(leaf.grad_fn is None for leaf in policy.start_state(step_td(3)).values())


def test_gradients_flow_inside_an_episode_and_stop_at_its_start(policy):
    obs = torch.randn(2, 6, OBS, requires_grad=True)
    dones = torch.zeros(2, 6, dtype=torch.bool)
    dones[:, [0, 3]] = True
    td = TensorDict({"env_obs": obs, "dones": dones}, batch_size=[2, 6])
    policy(td, action=torch.zeros(2, 6, dtype=torch.long))["value"][0, 4].backward()
    assert obs.grad[0, 3].abs().sum() > 0
    assert obs.grad[0, :3].abs().sum() == 0 and obs.grad[1].abs().sum() == 0


def test_without_a_start_state_every_row_must_begin_with_a_reset(policy):
    td = TensorDict({"env_obs": torch.randn(2, 3, OBS)}, batch_size=[2, 3])
    action = torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(ValueError, match=r"start_state\(td\)"):
        policy(td, action=action)
    td["dones"] = torch.tensor([[True, False, False], [False, False, False]])
    with pytest.raises(ValueError, match="every row"):
        policy(td, action=action)
    td["truncateds"] = torch.tensor([[False, False, False], [True, False, False]])
    policy(td, action=action)


def test_bad_input_is_refused_with_a_reason_and_memory_stays_as_it_was():
    policy = make_td_policy()
    policy(step_td(3))
    before = policy.get_memory()
    with pytest.raises(KeyError, match="obs_key="):
        policy(TensorDict({"pixels": torch.zeros(3, OBS)}, batch_size=[3]))
    with pytest.raises(ValueError, match="one step per environment"):
        policy(TensorDict({"env_obs": torch.zeros(3, 2, OBS)}, batch_size=[3, 2]))
    with pytest.raises(ValueError, match="pass env_ids"):
        policy(step_td(2))
    with pytest.raises(ValueError, match="more than once"):
        policy(step_td(3, ids=torch.tensor([0, 1, 1])))
    with pytest.raises(ValueError, match="pass bptt=TT"):
        policy(step_td(6), action=torch.zeros(6, dtype=torch.long))
    with pytest.raises(ValueError, match="not a multiple of 4"):
        policy(step_td(6), action=torch.zeros(6, dtype=torch.long), bptt=4)
    with pytest.raises(ValueError, match="belong to training"):
        policy(step_td(3), state=policy.start_state(step_td(3)))
    with pytest.raises(ValueError, match="does not fit"):
        policy(step_td(6), state=policy.policy.initial_state(2), action=torch.zeros(6, dtype=torch.long), bptt=2)
    with pytest.raises(ValueError, match="action has shape"):
        batch = TensorDict({"env_obs": torch.zeros(2, 3, OBS), "dones": torch.ones(2, 3)}, batch_size=[2, 3])
        policy(batch, action=torch.zeros(5, dtype=torch.long))
    assert all(torch.equal(a, b) for a, b in zip(before["leaves"], policy.get_memory()["leaves"]))


def test_dict_observations_and_action_masks_go_through():
    space = gym.spaces.Dict({"a": gym.spaces.Box(-1, 1, (2,)), "b": gym.spaces.Discrete(4)})
    policy = TensorDictPolicy(hf.ActorCritic(space, gym.spaces.Discrete(ACTIONS), hidden_size=4), obs_key="sensors")
    mask = torch.tensor([[True, False, False], [False, False, True]])

    def td():
        sensors = {"a": torch.randn(2, 2), "b": torch.tensor([1, 3])}
        return TensorDict({"sensors": sensors, "action_mask": mask}, batch_size=[2])

    for _ in range(10):
        assert policy(td())["actions"].tolist() == [0, 2]


def test_the_same_policy_with_another_observation_key_gives_the_same():
    a, b = make_td_policy(), make_td_policy()
    obs = torch.randn(2, OBS)
    td = TensorDict({"observation": obs}, batch_size=[2])
    torch.testing.assert_close(a(step_td(2, obs))["values"], b(td)["values"])


# --- the wrapper's own behaviours ---------------------------------------------------------------------


def test_an_nn_lstm_assigned_by_the_policy_is_taken_over_with_its_weights():
    class OwnLSTM(HandWritten):
        def __init__(self):
            super().__init__()
            self.lstm = self.original = torch.nn.LSTM(HIDDEN, HIDDEN, num_layers=2)

    policy = OwnLSTM()
    x = torch.randn(5, 3, HIDDEN)
    torch.testing.assert_close(policy.lstm(x)[0], policy.original(x)[0], atol=1e-6, rtol=0)
    assert policy.memory.core is policy.lstm
    with pytest.raises(ValueError, match="dropout"):
        policy.lstm = torch.nn.LSTM(4, 4, num_layers=2, dropout=0.5)


def test_swapped_batch_and_time_is_an_error_in_the_wrapper():
    class Swapped(HandWritten):
        def forward(self, td, state=None, action=None):
            h, c, _ = self._manage_lstm_state(td, *td.batch_size, None)
            return self.lstm(torch.tanh(self.encoder(td["env_obs"])), (h, c))  # [B, TT] as if it were [TT, B]

    td = TensorDict({"env_obs": torch.zeros(2, 3, OBS), "dones": torch.ones(2, 3)}, batch_size=[2, 3])
    with pytest.raises(ValueError, match="time comes first"):
        Swapped()(td, action=torch.zeros(2, 3))


def test_storing_copies_what_the_policy_may_still_change():
    policy = make_wrapper()
    policy(step_td(2))
    h = torch.ones(2, 2, HIDDEN)
    policy._store_lstm_state(h, h, None)
    h.zero_()
    assert (policy.start_state(step_td(2))["h"] == 1).all()


# --- compiled --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("name", ["lstm", "wrapper"])
def test_both_legs_compile_to_one_graph_each_and_flags_do_not_recompile(name, ids):
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    policy, eager = MAKERS[name](), MAKERS[name]()
    for p in (policy, eager):
        p.memory.reserve(4)
    compiled = torch.compile(policy, fullgraph=True, backend="eager")
    torch.manual_seed(1)
    steps, start = [], None
    for t in range(4):
        td = step_td(4, dones=torch.rand(4) < 0.3, truncateds=torch.rand(4) < 0.3)
        if ids:
            td["training_env_ids"] = torch.randperm(4)
        start = policy.start_state(td) if t == 0 else start
        expected = eager(td.clone())["values"]
        out = compiled(td)
        torch.testing.assert_close(out["values"], expected, atol=1e-6, rtol=0)
        steps.append(out.detach())
    assert counters["stats"]["unique_graphs"] == 1
    if ids:
        return
    batch = torch.stack(steps, 1)
    for k in range(3):
        td = inputs_of(batch)
        if k:
            td["dones"] = torch.rand(4, 4) < 0.5
        out = compiled(td, state=start, action=batch["actions"])
        out["act_log_prob"].sum().backward()
        if k == 0:
            torch.testing.assert_close(out["act_log_prob"].detach(), batch["act_log_prob"], atol=1e-5, rtol=0)
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]
