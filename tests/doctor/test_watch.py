"""`doctor.watch` around a training loop."""

import warnings

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast import doctor

LAYERS = {"lstm": lambda: nn.LSTM(3, 5), "gru": lambda: nn.GRU(3, 5), "core": lambda: hf.LSTM(3, 5)}


def _loop(layer, optimizer, detach, updates=3, steps=4, masked=False):
    state = None
    for _ in range(updates):
        loss = 0.0
        for _ in range(steps):
            if state is not None and masked:
                state = tuple(s * torch.ones(1, 2, 1) for s in state)
            y, state = layer(torch.randn(1, 2, 3), state)
            loss = loss + y.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if detach:
            state = _detached(state)


def _detached(state):
    if isinstance(state, torch.Tensor):
        return state.detach()
    if isinstance(state, dict):
        return {key: value.detach() for key, value in state.items()}
    return tuple(s.detach() for s in state)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_state_that_outlives_an_update_is_reported_before_backward_fails(kind):
    layer = LAYERS[kind]()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    with (
        pytest.warns(doctor.StaleGraphWarning, match="before update 1"),
        pytest.raises(RuntimeError, match=r"second time|inplace"),
        doctor.watch(layer, optimizer) as watching,
    ):
        _loop(layer, optimizer, detach=False)
    assert [f.cause for f in watching.findings] == ["graph-kept"]


def test_a_mask_between_the_steps_does_not_hide_it():
    layer = nn.LSTM(3, 5)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    with pytest.warns(doctor.StaleGraphWarning), pytest.raises(RuntimeError), doctor.watch(layer, optimizer):
        _loop(layer, optimizer, detach=False, masked=True)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_loop_that_detaches_between_segments_is_left_alone(kind):
    layer = LAYERS[kind]()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with doctor.watch(layer, optimizer) as watching:
            _loop(layer, optimizer, detach=True)
    assert watching.findings == []


def test_error_mode_stops_at_the_layer():
    layer = nn.GRU(3, 5)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    with pytest.raises(RuntimeError, match=r"state.detach\(\)"), doctor.watch(layer, optimizer, error=True):
        _loop(layer, optimizer, detach=False)


def test_hooks_are_gone_afterwards():
    layer = nn.GRU(3, 5)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    with doctor.watch(layer, optimizer):
        pass
    assert not layer._forward_pre_hooks and not optimizer._optimizer_step_post_hooks


def test_a_module_without_recurrence_is_refused():
    with pytest.raises(TypeError, match="no recurrent layer"), doctor.watch(nn.Linear(2, 2), None):
        pass
