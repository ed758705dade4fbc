"""`hf.LSTM` and `hf.GRU` are drop-ins for torch.nn's: weights go both ways, and the numbers agree."""

from __future__ import annotations

import warnings
from itertools import product

import numpy as np
import pytest
import torch
from gymnasium import spaces

import holdfast as hf

PAIRS = {"lstm": (hf.LSTM, torch.nn.LSTM), "gru": (hf.GRU, torch.nn.GRU)}
OPTIONS = list(product(PAIRS, (1, 2), (True, False)))


def pair(cell, layers, bias, **options):
    ours, theirs = PAIRS[cell]
    torch.manual_seed(0)
    return ours(4, 6, layers, bias=bias, **options), theirs(4, 6, layers, bias=bias)


def their_state(cell, state):
    leaves = [leaf.transpose(0, 1).contiguous() for leaf in state.values()]  # [L, B, H]
    return tuple(leaves) if cell == "lstm" else leaves[0]


def random_state(core, batch):
    generator = torch.Generator().manual_seed(1)
    return {
        leaf: torch.randn(batch, core.num_layers, core.hidden_size, generator=generator) for leaf in core.leaf_names
    }


@pytest.mark.parametrize(("cell", "layers", "bias"), OPTIONS)
@pytest.mark.parametrize("kernel", ["auto", "portable", "reference"])
def test_weights_from_torch_nn_give_its_outputs_and_gradients(cell, layers, bias, kernel):
    core, theirs = pair(cell, layers, bias, kernel=kernel)
    core.load_state_dict(theirs.state_dict())
    x, state = torch.randn(7, 3, 4), random_state(core, 3)
    y, final = core(x, state)
    expected, expected_final = theirs(x, their_state(cell, state))
    torch.testing.assert_close(y, expected, atol=1e-6, rtol=0)
    for mine, other in zip(their_state(cell, final), expected_final if cell == "lstm" else [expected_final]):
        torch.testing.assert_close(mine, other if cell == "lstm" else other[0], atol=1e-6, rtol=0)
    y.square().mean().backward()
    expected.square().mean().backward()
    for (name, p), q in zip(core.named_parameters(), theirs.parameters()):
        torch.testing.assert_close(p.grad, q.grad, atol=1e-6, rtol=0, msg=name)


@pytest.mark.parametrize(("cell", "layers", "bias"), OPTIONS)
def test_weights_go_to_torch_nn_and_back(cell, layers, bias):
    core, theirs = pair(cell, layers, bias)
    theirs.load_state_dict(core.state_dict())
    back, _ = pair(cell, layers, bias)
    back.load_state_dict(theirs.state_dict())
    x = torch.randn(5, 2, 4)
    torch.testing.assert_close(core(x)[0], theirs(x)[0], atol=1e-6, rtol=0)
    assert torch.equal(back(x)[0], core(x)[0])


@pytest.mark.parametrize(("cell", "layers", "bias"), OPTIONS)
def test_a_step_is_the_cell_of_torch_nn(cell, layers, bias):
    core, theirs = pair(cell, layers, bias)
    core.load_state_dict(theirs.state_dict())
    x, state = torch.randn(3, 4), random_state(core, 3)
    expected = theirs(x.unsqueeze(0), their_state(cell, state))[0][0]
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(core(x, state)[0], expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("cell", PAIRS)
def test_the_same_seed_gives_torch_nns_initial_weights(cell):
    ours, theirs = PAIRS[cell]
    torch.manual_seed(3)
    core = ours(4, 6, 2)
    torch.manual_seed(3)
    for (name, p), (other, q) in zip(core.named_parameters(), theirs(4, 6, 2).named_parameters()):
        assert name == other and torch.equal(p, q)


@pytest.mark.parametrize("cell", PAIRS)
def test_a_learned_start_is_optional_when_loading_and_kept(cell):
    core, theirs = pair(cell, 2, True, reset="learned")
    starts = {name: p for name, p in core.named_parameters() if name.startswith("initial_")}
    assert len(starts) == len(core.leaf_names) and all((p == 0).all() for p in starts.values())
    with torch.no_grad():
        for p in starts.values():
            p.fill_(0.5)
    core.load_state_dict(theirs.state_dict())
    assert all((p == 0.5).all() for p in starts.values())
    copy, _ = pair(cell, 2, True, reset="learned")
    copy.load_state_dict(core.state_dict())
    assert all((p == 0.5).all() for name, p in copy.named_parameters() if name.startswith("initial_"))


@pytest.mark.parametrize("cell", PAIRS)
def test_a_missing_weight_is_still_an_error(cell):
    core, theirs = pair(cell, 1, True, reset="learned")
    weights = theirs.state_dict()
    del weights["weight_hh_l0"]
    with pytest.raises(RuntimeError, match="weight_hh_l0"):
        core.load_state_dict(weights)


@pytest.mark.parametrize("cell", PAIRS)
def test_device_and_dtype_are_taken_as_by_torch_nn(cell):
    ours, theirs = PAIRS[cell]
    assert all(p.dtype == torch.float64 for p in ours(4, 6, dtype=torch.float64, reset="learned").parameters())
    assert all(p.is_meta for p in ours(4, 6, 2, device="meta", reset="learned").parameters())
    torch.manual_seed(3)
    core = ours(4, 6, dtype=torch.float64)
    torch.manual_seed(3)
    for p, q in zip(core.parameters(), theirs(4, 6, dtype=torch.float64).parameters()):
        assert torch.equal(p, q)


@pytest.mark.parametrize("cell", PAIRS)
def test_what_torch_nn_takes_and_a_core_does_not_is_said_in_a_sentence(cell):
    ours, _ = PAIRS[cell]
    ours(4, 6, batch_first=False, dropout=0.0, bidirectional=False, proj_size=0)
    refused = {
        "batch_first": "time first",
        "dropout": "other units",
        "bidirectional": "future",
        "proj_size": "nn.Linear",
    }
    for option, said in refused.items():
        with pytest.raises(ValueError, match=rf"hf\.{ours.__name__} takes no {option}=.*{said}"):
            ours(4, 6, **{option: 1})
    with pytest.raises(TypeError, match=rf"hf\.{ours.__name__} takes no rest="):
        ours(4, 6, rest="zero")


@pytest.mark.parametrize(("cell", "layers", "bias"), OPTIONS)
def test_all_weights_are_torch_nns_and_flatten_parameters_changes_nothing(cell, layers, bias):
    core, theirs = pair(cell, layers, bias)
    core.load_state_dict(theirs.state_dict())
    core.flatten_parameters()
    assert len(core.all_weights) == layers
    for mine, other in zip(core.all_weights, theirs.all_weights):
        assert len(mine) == len(other) and all(torch.equal(p, q) for p, q in zip(mine, other))


def test_dynamic_quantization_leaves_a_core_in_float32():
    policy = hf.ActorCritic(spaces.Box(-1, 1, (4,), np.float32), spaces.Discrete(2), "lstm", hidden_size=6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao is deprecated
        quantized = torch.ao.quantization.quantize_dynamic(policy, {torch.nn.Linear, torch.nn.LSTM, hf.LSTM})
    assert type(quantized.core) is hf.LSTM and not isinstance(quantized.actor, torch.nn.Linear)
    assert all(p.dtype == torch.float32 for p in quantized.core.parameters())
