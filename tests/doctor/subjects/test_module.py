"""Bare modules: torch's layers and Holdfast's cores."""

import pytest
from torch import nn

import holdfast as hf
from holdfast import doctor


@pytest.mark.parametrize("layer", [nn.LSTM(4, 16), nn.GRU(4, 16, 2), nn.LSTM(4, 16, batch_first=True), nn.RNN(4, 8)])
def test_torch_layers_are_healthy_when_the_caller_cuts_at_episode_ends(layer):
    report = doctor.assert_healthy(layer)
    assert [(f.cause, f.severity) for f in report.findings] == [("resets-are-the-callers", "note")]


@pytest.mark.parametrize("core", [hf.LSTM(4, 16), hf.GRU(4, 8, 2), hf.Stack([hf.LSTM(4, 4), hf.GRU(4, 4)])])
def test_bare_cores_are_healthy(core):
    doctor.assert_healthy(core)
