"""`RecurrentModule` behaves as TorchRL's recurrent modules do, and refuses where they are silently wrong."""

from __future__ import annotations

import warnings

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

import holdfast as hf
from accumulator import Accumulator
from cores.all_cores import CELLS, core_of

pytest.importorskip("torchrl")

from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, SliceSampler, TensorDictReplayBuffer
from torchrl.envs import GymEnv, InitTracker, SerialEnv, TransformedEnv
from torchrl.modules import (
    GRUModule,
    LSTMModule,
    ProbabilisticActor,
    ValueOperator,
    canonicalize_rnn_subset,
    set_recurrent_mode,
)
from torchrl.modules.utils import get_primers_from_module
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from holdfast.integrations.torchrl import RecurrentModule

I, H = 3, 5
CORES = {
    **{kind: (lambda kind=kind: core_of(kind, size=I)) for kind in CELLS},
    "lstm2": lambda: hf.LSTM(I, H, 2),
    "learned": lambda: hf.LSTM(I, H, reset="learned"),
    "stack": lambda: hf.Stack([hf.GRU(I, 4), hf.LSTM(4, H)]),
    "accumulator": lambda: hf.Stack([Accumulator(I), hf.GRU(I, H)]),  # leaves of several dtypes
}


@pytest.fixture(params=CORES)
def module(request):
    torch.manual_seed(0)
    core = CORES[request.param]()
    if request.param == "learned":
        nn.init.normal_(core.initial_h)
        nn.init.normal_(core.initial_c)
    return RecurrentModule(core, in_key="x", out_key="y")


def batch_of(module, *shape, init=0.2):
    """A collected batch [*shape] with zero states; is_init at random, and at the first step."""
    td = TensorDict({"x": torch.randn(*shape, I), "is_init": torch.rand(*shape, 1) < init}, batch_size=shape)
    td["is_init"][..., 0, :] = True
    return td.update(fresh(module, *shape))


def fresh(module, *shape):
    spec = module.make_tensordict_primer().primers
    zeros = {k: torch.zeros((*shape, *spec[k].shape), dtype=spec[k].dtype) for k in module.state_keys}
    return TensorDict(zeros, batch_size=shape)


def step_by_step(module, batch):
    """The same batch [..., T] as a rollout: one step at a time. Outputs, and states after each step."""
    outs, states, carried = [], [], fresh(module, *batch.batch_size[:-1])
    for t in range(batch.batch_size[-1]):
        td = module(batch[..., t].select("x", "is_init").update(carried))
        carried = td["next"].select(*module.state_keys)
        outs.append(td["y"])
        states.append(carried)
    return torch.stack(outs, -2), torch.stack(states, -1)


@pytest.mark.parametrize("shape", [(7,), (2, 7), (2, 3, 7)])
def test_t_single_steps_equal_one_sequence_call(module, shape):
    batch = batch_of(module, *shape)
    expected, states = step_by_step(module, batch)
    with set_recurrent_mode(True):
        out = module(batch.clone())
    torch.testing.assert_close(out["y"], expected, atol=1e-6, rtol=0)
    for key in module.state_keys:
        last, expected = (part.select(len(shape) - 1, -1) for part in (out["next", key], states[key]))
        torch.testing.assert_close(last, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("shape", [(), (2,), (2, 3)])
def test_a_single_step_keeps_the_batch_shape(module, shape):
    td = TensorDict({"x": torch.randn(*shape, I), "is_init": torch.ones(*shape, 1, dtype=torch.bool)}, batch_size=shape)
    out = module(td.update(fresh(module, *shape)))
    assert out["y"].shape == (*shape, module.core.output_size)
    for key in module.state_keys:
        assert out["next", key].shape == td[key].shape


def test_states_at_trajectory_ends_are_those_of_the_rollout(module):
    batch = batch_of(module, 4, 12, init=0.3)
    _, states = step_by_step(module, batch)
    with set_recurrent_mode(True):
        out = module(batch.clone())
    init = batch["is_init"].squeeze(-1)
    ends = torch.cat([init[:, 1:], torch.ones(4, 1, dtype=torch.bool)], 1)
    assert ends.sum() > 8
    for key in module.state_keys:
        torch.testing.assert_close(out["next", key][ends], states[key][ends], atol=1e-6, rtol=0)
        assert (out["next", key][~ends] == 0).all()


def test_several_trajectories_in_a_row_equal_each_alone(module):
    batch = batch_of(module, 1, 9, init=0.0)
    batch["is_init"][0, [4, 7]] = True
    with set_recurrent_mode(True):
        whole = module(batch.clone())["y"]
        alone = [module(batch[:, a:b].clone())["y"] for a, b in ((0, 4), (4, 7), (7, 9))]
    torch.testing.assert_close(whole, torch.cat(alone, 1), atol=1e-6, rtol=0)


@pytest.mark.parametrize("theirs, ours", [(LSTMModule, hf.LSTM), (GRUModule, hf.GRU)])
@pytest.mark.parametrize("layers", [1, 2])
def test_numbers_and_gradients_equal_torchrls_module_with_the_same_weights(theirs, ours, layers):
    torch.manual_seed(0)
    mine = RecurrentModule(ours(I, H, layers), in_key="x", out_key="y")
    keys = {"in_keys": ["x", *mine.state_keys], "out_keys": ["y", *(("next", k) for k in mine.state_keys)]}
    other = theirs(input_size=I, hidden_size=H, num_layers=layers, **keys)
    rnn = other.lstm if theirs is LSTMModule else other.gru
    rnn.load_state_dict(mine.core.state_dict())
    batch = batch_of(mine, 4, 10)
    for key in mine.state_keys:  # and from the middle of episodes at the first step
        batch[key][1:, 0] = torch.randn_like(batch[key][1:, 0])
    batch["is_init"][1:, 0] = False
    grads = []
    for module, weights in ((mine, mine.core), (other, rnn)):
        with set_recurrent_mode(True):
            out = module(batch.clone())
        loss = (out["y"] ** 2).sum() + sum(out["next", k][:, -1].sum() for k in mine.state_keys)
        grads.append((out, torch.autograd.grad(loss, list(weights.parameters()))))
    (a, da), (b, db) = grads
    torch.testing.assert_close(a["y"], b["y"], atol=1e-6, rtol=0)
    for key in mine.state_keys:
        torch.testing.assert_close(a["next", key], b["next", key], atol=1e-6, rtol=0)
    for x, y in zip(da, db):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)


def test_non_contiguous_inputs(module):
    batch = batch_of(module, 6, 4).transpose(0, 1)  # [4, 6], strides swapped
    batch["is_init"][:, 0] = True
    assert not batch["x"].is_contiguous()
    with set_recurrent_mode(True):
        a, b = module(batch.clone(recurse=False))["y"], module(batch.contiguous())["y"]
    torch.testing.assert_close(a, b)


def test_a_slice_from_the_middle_of_an_episode_starts_from_its_stored_state(module):
    batch = batch_of(module, 3, 8, init=0.2)
    expected, states = step_by_step(module, batch)
    for key in module.state_keys:  # as a collector stores them: the state before each step, zeros at episode starts
        before = torch.cat([torch.zeros_like(states[key][:, :1]), states[key][:, :-1]], 1)
        batch[key] = before.masked_fill(batch["is_init"].view(3, 8, *(1,) * (before.dim() - 2)), 0)
    whole = batch.clone()
    whole["y"] = expected
    slices = [(0, 2, 5), (2, 0, 3), (1, 3, 8), (0, 5, 8)]
    flat = torch.cat([whole[b, t:u] for b, t, u in slices])  # [14], one slice after another
    marks, at = torch.zeros(14, 1, dtype=torch.bool), 0
    for _, t, u in slices:
        marks[at] = True
        at += u - t
    wanted = flat.pop("y")
    flat["is_init"] = flat["is_init"] | marks
    with set_recurrent_mode(True):
        out = module(flat)
    torch.testing.assert_close(out["y"], wanted, atol=1e-6, rtol=0)
    ends = torch.tensor([2, 5, 10, 13])
    for key in module.state_keys:
        stored = torch.stack([states[key][b, u - 1] for b, _, u in slices])
        torch.testing.assert_close(out["next", key][ends], stored, atol=1e-6, rtol=0)


def test_gradients_stop_at_a_trajectory_start(module):
    batch = batch_of(module, 1, 6, init=0.0)
    batch["is_init"][0, 3] = True
    batch["x"].requires_grad_()
    with set_recurrent_mode(True):
        module(batch)["y"][0, 4].sum().backward()
    assert (batch["x"].grad[0, :3] == 0).all() and batch["x"].grad[0, 3].abs().sum() > 0


# --- errors ------------------------------------------------------------------------------------------------------


def test_what_torchrl_takes_silently_is_an_error_here(module):
    td = batch_of(module, 2, 4)
    with pytest.raises(KeyError, match="InitTracker"):
        module(td.exclude("is_init")[:, 0])
    with pytest.raises(KeyError, match="reads 'x'"):
        module(td.exclude("x")[:, 0])
    wrong = td.clone()
    wrong["is_init"] = wrong["is_init"].long()
    with pytest.raises(TypeError, match=r"flags\.bool\(\)"):
        module(wrong[:, 0])
    with set_recurrent_mode(True), pytest.raises(ValueError, match="time dimension"):
        module(td[0, 0])


def test_a_forgotten_mode_is_an_error(module):
    td = batch_of(module, 2, 4)
    td["next", "done"] = torch.zeros(2, 4, 1, dtype=torch.bool)
    with pytest.raises(RuntimeError, match=r"set_recurrent_mode\(True\)"):
        module(td)
    with set_recurrent_mode(False):
        module(td.clone())
    with set_recurrent_mode(True):
        module(td.clone())


def test_bad_construction_is_refused():
    with pytest.raises(TypeError, match="holdfast core"):
        RecurrentModule(nn.LSTM(3, 4), in_key="x", out_key="y")
    with pytest.raises(ValueError, match="leaves"):
        RecurrentModule(hf.LSTM(3, 4), in_keys=["x", "h"], out_keys=["y", ("next", "h")])
    with pytest.raises(ValueError, match="one of each pair"):
        RecurrentModule(hf.LSTM(3, 4), in_keys=["x", "h", "c"])
    with pytest.raises(ValueError, match="reset modes"):
        RecurrentModule(hf.LSTM(3, 4, reset="never"), in_key="x", out_key="y")
    with pytest.raises(ValueError, match="step to step"):
        RecurrentModule(hf.GRU(3, 4), ["x", "h"], ["y", "h_out"]).make_tensordict_primer()


# --- compiled -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recurrent", [False, True])
def test_both_modes_compile_to_one_graph_and_flags_do_not_recompile(recurrent):
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    module = RecurrentModule(hf.LSTM(I, H), in_key="x", out_key="y", default_recurrent_mode=recurrent)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        td = batch_of(module, 3, 6, init=0.3)
        with set_recurrent_mode(recurrent):
            expected = module(td.clone())["y"]
            got = compiled(td.clone())["y"]
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=0)
        got.sum().backward()
    assert counters["stats"]["unique_graphs"] == 1


def test_compiled_slices_from_the_middle_are_refused_not_reset():
    module = RecurrentModule(hf.LSTM(I, H), in_key="x", out_key="y", default_recurrent_mode=True)
    td = batch_of(module, 1, 6, init=0.0)
    td["is_init"][0, 3], td["recurrent_state_h"][0, 3] = True, 1.0
    with pytest.raises(RuntimeError):
        torch.compile(module, fullgraph=True, backend="aot_eager")(td)


# --- inside TorchRL -----------------------------------------------------------------------------------------------


def make_actor_critic():
    torch.manual_seed(0)
    embed = TensorDictModule(nn.Linear(4, I), ["observation"], ["x"])
    lstm = RecurrentModule(hf.LSTM(I, H), in_key="x", out_key="y")
    head = TensorDictModule(nn.Linear(H, 2), ["y"], ["logits"])
    actor = ProbabilisticActor(
        TensorDictSequential(embed, lstm, head),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    critic = TensorDictSequential(embed, lstm, ValueOperator(nn.Linear(H, 1), in_keys=["y"]))
    return actor, critic, lstm


def cartpole():
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def test_the_collectors_log_probabilities_are_repeated_by_a_sequence_call():
    actor, _, _ = make_actor_critic()
    collector = Collector(
        SerialEnv(2, cartpole), actor, frames_per_batch=160, total_frames=320, auto_register_policy_transforms=True
    )
    starts_inside = 0
    for data in collector:
        assert data["recurrent_state_h"].abs().sum() > 0
        starts_inside += int(data["is_init"][:, 1:].sum())
        with torch.no_grad(), set_recurrent_mode(True):
            dist = actor.get_dist(data.clone())
        again = dist.log_prob(data["action"])
        torch.testing.assert_close(again, data["action_log_prob"], atol=1e-5, rtol=0)
    assert starts_inside > 2
    collector.shutdown()


def test_primers_are_found_and_reset_the_state_with_the_environment():
    actor, _, lstm = make_actor_critic()
    env = TransformedEnv(cartpole(), InitTracker())
    env.append_transform(get_primers_from_module(actor))
    rollout = env.rollout(40, actor, break_when_any_done=False)
    init = rollout["is_init"].squeeze(-1)
    assert init.sum() > 1
    assert all((rollout[key][init] == 0).all() for key in lstm.state_keys)
    assert all((rollout[key][~init] != 0).any(-1).all() for key in lstm.state_keys)


def test_gae_under_vmap_says_what_to_pass():
    _, critic, lstm = make_actor_critic()
    data = fresh(lstm, 6)
    data.update({"observation": torch.randn(6, 4), "is_init": torch.zeros(6, 1, dtype=torch.bool)})
    data["next"] = data.clone().update({"reward": torch.ones(6, 1), "done": torch.zeros(6, 1, dtype=torch.bool)})
    data["next", "terminated"] = data["next", "done"]
    GAE(gamma=0.99, lmbda=0.95, value_network=critic, deactivate_vmap=True)(data.clone())
    with pytest.raises(RuntimeError, match="deactivate_vmap=True"):
        GAE(gamma=0.99, lmbda=0.95, value_network=critic)(data)


def test_slice_sampler_gae_and_clip_ppo_loss_train():
    actor, critic, lstm = make_actor_critic()
    loss_module = ClipPPOLoss(actor, critic)
    gae = GAE(gamma=0.99, lmbda=0.95, value_network=critic, shifted=True)
    collector = Collector(
        SerialEnv(2, cartpole), actor, frames_per_batch=128, total_frames=256, auto_register_policy_transforms=True
    )
    optimizer = torch.optim.Adam(loss_module.parameters(), 1e-3)
    before = {name: p.clone() for name, p in lstm.named_parameters()}
    for data in collector:
        with torch.no_grad():
            gae(data)
        buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(128),
            sampler=SliceSampler(slice_len=8, traj_key=("collector", "traj_ids"), strict_length=False),
            batch_size=64,
        )
        buffer.extend(data.reshape(-1))
        first = True
        for _ in range(2):
            losses = loss_module(buffer.sample())
            loss = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
            if first:
                assert abs(float(losses["kl_approx"])) < 1e-5  # law 1, inside TorchRL
            first = False
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert all(not torch.equal(before[name], p) for name, p in lstm.named_parameters())
    collector.shutdown()


# --- gradients through ("next", state) ------------------------------------------------------------------------------


@pytest.mark.parametrize("theirs, ours", [(LSTMModule, hf.LSTM), (GRUModule, hf.GRU)])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("slices", [False, True], ids=["episodes", "slices from the middle"])
def test_the_gradient_of_every_next_state_is_torchrls(theirs, ours, layers, slices):
    torch.manual_seed(layers)
    mine = RecurrentModule(ours(I, H, layers), in_key="x", out_key="y")
    keys = {"in_keys": ["x", *mine.state_keys], "out_keys": ["y", *(("next", k) for k in mine.state_keys)]}
    other = theirs(input_size=I, hidden_size=H, num_layers=layers, **keys)
    rnn = other.lstm if theirs is LSTMModule else other.gru
    rnn.load_state_dict(mine.core.state_dict())
    batch = batch_of(mine, 4, 10, init=0.3)
    assert batch["is_init"][:, 1:].any()
    if slices:  # a trajectory that begins in the middle of an episode, inside the sequence
        for key in mine.state_keys:
            batch[key][1, 4] = torch.randn_like(batch[key][1, 4])
            batch[key][2, 0] = torch.randn_like(batch[key][2, 0])
        batch["is_init"][1, 4] = True
    weighting = {key: torch.randn_like(batch[key]) for key in mine.state_keys}
    grads = []
    for module, weights in ((mine, mine.core), (other, rnn)):
        given = batch.clone()
        x = batch["x"].clone().requires_grad_()
        given["x"] = x
        with set_recurrent_mode(True):
            out = module(given)
        loss = sum((out["next", k] * weighting[k]).sum() for k in mine.state_keys) + out["y"].square().sum()
        grads.append(torch.autograd.grad(loss, [x, *weights.parameters()]))
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_states_inside_a_sequence_cost_no_backward_if_nobody_asks(module, monkeypatch):
    calls = []
    replay = type(module.core)._states_of_steps
    monkeypatch.setattr(type(module.core), "_states_of_steps", lambda *a: calls.append(1) or replay(*a))
    with set_recurrent_mode(True):
        module(batch_of(module, 3, 8, init=0.4))["y"].sum().backward()
        assert not calls
        out = module(batch_of(module, 3, 8, init=0.4))
        sum(out["next", key].float().sum() for key in module.state_keys).backward()
    assert calls


def test_keys_are_a_list_and_may_be_torchrls():
    for bad in ({"in_keys": "abc", "out_key": "y"}, {"in_key": "x", "out_keys": "abc"}):
        with pytest.raises(
            TypeError, match=r"_keys is the string 'abc', expected a list of keys; or (in|out)_key='abc'"
        ):
            RecurrentModule(hf.LSTM(I, H), **bad)
    for theirs, core in ((LSTMModule, hf.LSTM(I, H)), (GRUModule, hf.GRU(I, H))):
        other = theirs(input_size=I, hidden_size=H, in_key="x", out_key="y")
        mine = RecurrentModule(core, in_key="x", out_key="y", torchrl_keys=True)
        assert mine.in_keys == other.in_keys and mine.out_keys == other.out_keys


def test_methods_that_choose_a_kernel_answer_with_the_module_itself(module):
    assert module.make_python_based() is module and module.make_cudnn_based() is module


@pytest.mark.parametrize("recurrent", [True, False])
def test_a_missing_state_is_zeros_as_in_torchrl(module, recurrent):
    shape = (2, 5) if recurrent else (4,)
    batch = batch_of(module, *shape, init=1.0)
    for key in module.state_keys:
        batch[key] = torch.zeros_like(batch[key])
    without = batch.exclude(*module.state_keys)
    with set_recurrent_mode(recurrent), warnings.catch_warnings():
        warnings.simplefilter("error")
        expected, found = module(batch), module(without)
    for key in module.out_keys:
        assert torch.equal(found[key], expected[key])


@pytest.mark.parametrize("recurrent", [True, False])
def test_a_missing_state_inside_an_episode_is_warned_of(module, recurrent):
    td = batch_of(module, 4, 3).exclude(*module.state_keys)
    td["is_init"][1, 0] = False
    said = r"a step inside an episode starts from a state of zeros\. Append module\.make_tensordict_primer"
    with set_recurrent_mode(recurrent), pytest.warns(UserWarning, match=said):
        module(td if recurrent else td[:, 0])


def test_torchrls_canonicalization_takes_the_module(module):
    batch = batch_of(module, 3, 5)
    transposed = TensorDict(
        {key: batch[key].transpose(0, 1).contiguous().transpose(0, 1) for key in batch.keys()}  # noqa: SIM118, [3, 5]
    )
    reward = torch.zeros(5, 3).t()
    transposed["reward"] = reward
    assert not transposed["x"].is_contiguous()
    for canonical in (module.canonicalize(transposed), canonicalize_rnn_subset(transposed, [module])):
        assert all(canonical[key].is_contiguous() and torch.equal(canonical[key], batch[key]) for key in module.in_keys)
        assert not canonical["reward"].is_contiguous() and not transposed["x"].is_contiguous()
    assert module.canonicalize(transposed, inplace=True) is transposed and transposed["x"].is_contiguous()
