"""Bare modules: torch's layers and Holdfast's cores."""

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast import doctor
from holdfast.doctor import subjects


@pytest.mark.parametrize("layer", [nn.LSTM(4, 16), nn.GRU(4, 16, 2), nn.LSTM(4, 16, batch_first=True), nn.RNN(4, 8)])
def test_torch_layers_are_healthy_when_the_caller_cuts_at_episode_ends(layer):
    report = doctor.assert_healthy(layer)
    assert [(f.cause, f.severity) for f in report.findings] == [("resets-are-the-callers", "note")]


@pytest.mark.parametrize("core", [hf.LSTM(4, 16), hf.GRU(4, 8, 2), hf.Stack([hf.LSTM(4, 4), hf.GRU(4, 4)])])
def test_bare_cores_are_healthy(core):
    doctor.assert_healthy(core)


class FlagsInTheState(nn.Module):
    """A GRU that reads the signs of the last numbers, kept in another dtype. `kept` `[1, K]`: how many, of which dtype."""

    input_size = 4

    def __init__(self, kept):
        super().__init__()
        self.kept, self.cell = kept, nn.GRUCell(4 + kept.shape[1], 8)

    def forward(self, x, state, resets):
        h, flags = (x.new_zeros(x.shape[1], 8), self.kept.repeat(x.shape[1], 1)) if state is None else state
        outputs = []
        for x_t, first in zip(x, resets):
            h, flags = (torch.where(first[:, None], torch.zeros_like(part), part) for part in (h, flags))
            flags = torch.cat([(x_t[:, :1] > 0).to(flags.dtype), flags], 1)[:, : flags.shape[1]]
            h = self.cell(torch.cat([x_t, flags.to(x.dtype)], 1), h)
            outputs.append(h)
        return torch.stack(outputs), (h, flags)


@pytest.mark.parametrize(
    "kept",
    [torch.zeros(1, 3, dtype=torch.bool), torch.zeros(1, 3, dtype=torch.uint8), torch.zeros(1, 0)],
    ids=["bool", "uint8", "empty"],
)
def test_a_state_may_hold_flags_and_tensors_without_numbers(kept):
    report = doctor.examine(subjects.Module(FlagsInTheState(kept)))
    assert [f.cause for f in report.findings] == []


class Counter(hf.Core):
    """One number for each environment, the steps of its episode, is its whole state."""

    input_size, output_size = 4, 5

    def row_shapes(self):
        return {"steps": hf.RowShape(())}

    def step(self, x, state):
        after = {"steps": state["steps"] + 1}
        return torch.cat([x, torch.sin(after["steps"])[:, None]], 1), after


def test_a_state_of_one_number_for_each_environment_is_examined():
    assert doctor.examine(subjects.Module(Counter())).ok
