"""`RNNModel` in place of rsl_rl's: the same outputs from the same weights, states that reset, exports with its names."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("rsl_rl")

from rsl_rl.models import RNNModel as TheirModel
from rsl_rl.utils import split_and_pad_trajectories
from tensordict import TensorDict

from holdfast.integrations.rsl_rl import RNNModel
from integrations.rsl_rl.arm import make_runner

B = 6
CORES = ("lstm", "gru", "mingru", "lru", "ffm", "mlstm", "window")
GROUPS = {"actor": ["policy"], "critic": ["policy", "privileged"]}
GAUSSIAN = {"class_name": "GaussianDistribution", "init_std": 0.7}


def observations(generator, *batch):
    parts = {
        "policy": torch.randn(*batch, 5, generator=generator),
        "privileged": torch.randn(*batch, 2, generator=generator),
    }
    return TensorDict(parts, batch_size=list(batch))


def make(kind=RNNModel, rnn_type="lstm", seed=0, role="actor", **options):
    torch.manual_seed(seed)
    obs = observations(torch.Generator().manual_seed(0), B)
    options = {"hidden_dims": [12, 8], "rnn_hidden_dim": 16, **options}
    distribution = dict(GAUSSIAN) if role == "actor" else None
    return kind(
        obs, GROUPS, role, 3 if role == "actor" else 1, distribution_cfg=distribution, rnn_type=rnn_type, **options
    )


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize(("rnn_type", "layers"), [("lstm", 1), ("lstm", 2), ("gru", 1), ("gru", 2)])
@torch.inference_mode()
def test_equal_weights_give_equal_outputs_over_500_steps_with_resets(rnn_type, layers, role, seed):
    options = {"rnn_num_layers": layers, "obs_normalization": True, "role": role}
    theirs, ours = make(TheirModel, rnn_type, seed, **options), make(RNNModel, rnn_type, seed + 1, **options)
    ours.load_state_dict(theirs.state_dict())
    generator = torch.Generator().manual_seed(seed)
    for model in (theirs, ours):
        model.update_normalization(observations(torch.Generator().manual_seed(9), 50))
    for _ in range(500):
        obs = observations(generator, B)
        torch.testing.assert_close(ours(obs), theirs(obs), atol=1e-5, rtol=0)
        dones = (torch.rand(B, generator=generator) < 0.05).long()
        for model in (theirs, ours):
            model.reset(dones)
    for a, b in zip(
        *(h if isinstance(h, tuple) else (h,) for h in (ours.get_hidden_state(), theirs.get_hidden_state()))
    ):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


@pytest.mark.parametrize("rnn_type", ["lstm", "gru"])
def test_the_same_seed_gives_the_same_weights_under_the_same_names(rnn_type):
    theirs, ours = (make(kind, rnn_type, 3).state_dict() for kind in (TheirModel, RNNModel))
    assert list(theirs) == list(ours)
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)


@pytest.mark.parametrize("rnn_type", ["lstm", "gru"])
def test_padded_trajectories_give_the_outputs_and_gradients_of_rsl_rl(rnn_type):
    theirs, ours = make(TheirModel, rnn_type), make(RNNModel, rnn_type)
    generator = torch.Generator().manual_seed(1)
    obs, dones = observations(generator, 9, B), torch.rand(9, B, 1, generator=generator) < 0.2
    padded, masks = split_and_pad_trajectories(obs, dones.byte())
    rows = torch.randn(1, masks.shape[1], 16, generator=generator)
    hidden = (rows, rows.clone()) if rnn_type == "lstm" else rows
    outputs = []
    for model in (theirs, ours):
        model(padded, masks=masks, hidden_state=hidden, stochastic_output=True)
        outputs.append(model.output_mean)
        model.output_mean.square().sum().backward()
    torch.testing.assert_close(outputs[1], outputs[0], atol=1e-5, rtol=0)
    for (name, p), q in zip(theirs.named_parameters(), ours.parameters()):
        if p.grad is not None:
            torch.testing.assert_close(q.grad, p.grad, atol=1e-4, rtol=1e-4, msg=name)
    with pytest.raises(ValueError, match="pass hidden_state="):
        ours(padded, masks=masks)


@pytest.mark.parametrize("rnn_type", CORES)
@torch.inference_mode()
def test_a_reset_forgets_the_environments_that_are_done_and_no_other(rnn_type):
    model = make(rnn_type=rnn_type)
    generator = torch.Generator().manual_seed(2)
    for _ in range(4):
        model(observations(generator, B))
    kept = model.get_hidden_state()
    last = observations(generator, B)
    want_old = model(last)
    model.reset()
    want_new = model(last)
    model.reset(hidden_state=kept)
    model.reset(torch.tensor([0, 1, 0, 0, 1, 0]))
    out = model(last)
    torch.testing.assert_close(out[[1, 4]], want_new[[1, 4]], atol=1e-6, rtol=0)
    torch.testing.assert_close(out[[0, 2, 3, 5]], want_old[[0, 2, 3, 5]], atol=1e-6, rtol=0)
    assert not torch.allclose(want_old, want_new, atol=1e-4)


@torch.inference_mode()
def test_a_broken_state_does_not_survive_its_reset():
    model = make()
    model(observations(torch.Generator().manual_seed(0), B))
    model.rnn.state = {
        name: leaf.index_fill(0, torch.tensor([2]), float("nan")) for name, leaf in model.rnn.state.items()
    }
    model.reset(torch.arange(B) == 2)
    assert model(observations(torch.Generator().manual_seed(1), B)).isfinite().all()


@torch.inference_mode()
def test_the_hidden_state_has_rsl_rls_form():
    lstm, gru, lru = make(rnn_num_layers=2), make(rnn_type="gru"), make(rnn_type="lru")
    assert lstm.get_hidden_state() is None
    for model in (lstm, gru, lru):
        model(observations(torch.Generator().manual_seed(0), B))
    h, c = lstm.get_hidden_state()
    assert h.shape == c.shape == (2, B, 16) and gru.get_hidden_state().shape == (1, B, 16)
    assert all(part.shape[:2] == (1, B) for part in lru.get_hidden_state())


def test_gradients_flow_through_steps_until_they_are_detached():
    model = make()
    generator = torch.Generator().manual_seed(0)
    first = observations(generator, B).apply(lambda x: x.requires_grad_())
    model(first)
    model.detach_hidden_state(torch.tensor([1, 1, 1, 0, 0, 0]))
    (grad,) = torch.autograd.grad(model(observations(generator, B)).sum(), first["policy"])
    assert not grad[:3].any() and grad[3:].any()
    model.detach_hidden_state()
    assert not any(leaf.requires_grad for leaf in model.rnn.state.values())


@torch.inference_mode()
def test_another_number_of_environments_is_refused_until_a_reset():
    model, generator = make(), torch.Generator().manual_seed(0)
    model(observations(generator, B))
    with pytest.raises(
        ValueError, match=r"got 2 observations, but this model remembers 6 environments; call reset\(\)"
    ):
        model(observations(generator, 2))
    model.reset()
    assert model(observations(generator, 2)).shape == (2, 3)


def test_an_unknown_core_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="unknown core 'lsmt'; one of 'lstm', 'gru'"):
        make(rnn_type="lsmt")
    with pytest.raises(NotImplementedError, match="with all rows"):
        make().reset(torch.ones(B), hidden_state=torch.zeros(1, B, 16))


# --- exports ----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["lstm", "gru", "lru", "window"])
def trained(request):
    runner = make_runner(rnn_type=request.param)
    for part in runner.alg.actor.obs_normalizer._buffers.values():
        part.add_(1)
    return runner, request.param


def steps_of(runner, resets=()):
    """Observations of one robot and the actions of the model; where `resets` says, it begins again."""
    model = runner.get_inference_policy()
    model.reset()
    generator = torch.Generator().manual_seed(5)
    for t in range(8):
        obs = torch.randn(1, 7, generator=generator)
        if t in resets:
            model.reset()
        with torch.inference_mode():
            yield t, obs, model(TensorDict({"policy": obs}, batch_size=[1]))


def test_a_jit_file_acts_and_resets_as_the_model(trained, tmp_path):
    runner, _ = trained
    runner.export_policy_to_jit(str(tmp_path), "policy.pt")
    exported = torch.jit.load(tmp_path / "policy.pt")
    for t, obs, want in steps_of(runner, resets=(4,)):
        if t == 4:
            exported.reset()
        torch.testing.assert_close(exported(obs), want, atol=1e-5, rtol=0)


def test_an_onnx_file_has_rsl_rls_names_and_the_models_actions(trained, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    runner, rnn_type = trained
    runner.export_policy_to_onnx(str(tmp_path), "policy.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "policy.onnx", providers=["CPUExecutionProvider"])
    inputs, outputs = ([port.name for port in ports] for ports in (session.get_inputs(), session.get_outputs()))
    if rnn_type in ("lstm", "gru"):
        leaves = ["h", "c"] if rnn_type == "lstm" else ["h"]
        assert inputs == ["obs", *(f"{leaf}_in" for leaf in leaves)]
    assert outputs == ["actions", *(name.replace("_in", "_out") for name in inputs[1:])]
    dummy = runner.alg.get_policy().as_onnx(verbose=False).get_dummy_inputs()
    state = dict(zip(inputs[1:], (part.numpy() for part in dummy[1:])))
    for _, obs, want in steps_of(runner):
        action, *new = session.run(None, {"obs": obs.numpy(), **state})
        state = dict(zip(state, new))
        torch.testing.assert_close(torch.from_numpy(action), want, atol=1e-5, rtol=0)
