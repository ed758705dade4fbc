"""Sequence layers on packed documents: nothing crosses a boundary, however the layer is told where it is."""

import time

import pytest
import torch
from torch import nn

from holdfast import doctor
from holdfast.doctor import subjects


class Layer(nn.Module):
    """A short causal convolution and a decaying sum, the two memories of a linear-attention layer.

    `conv_told`, `sum_told`: whether they are told where documents begin. `cut`: whether gradients stop there, too.
    """

    def __init__(self, boundaries="cu_seqlens", conv_told=True, sum_told=True, leaks_gradients=False):
        super().__init__()
        self.boundaries, self.conv_told, self.sum_told = boundaries, conv_told, sum_told
        self.leaks_gradients = leaks_gradients
        self.enter, self.leave = nn.Linear(4, 8), nn.Linear(8, 3)
        self.taps, self.decay = nn.Parameter(torch.randn(2, 8)), nn.Parameter(torch.randn(8))

    def first(self, x, told):
        """`[B, N]` where documents begin."""
        first = torch.zeros(x.shape[:2], dtype=torch.bool)
        first[:, 0] = True
        if self.boundaries in told and self.boundaries == "cu_seqlens":
            first[0, told["cu_seqlens"][:-1].long()] = True
        elif self.boundaries in told and self.boundaries == "segment_ids":
            first[0, 1:] = told["segment_ids"][0].diff() != 0
        elif self.boundaries in told:
            first = told["position_ids"] == 0
        return first

    def forward(self, x, **told):
        u, first = self.enter(x), self.first(x, told)
        window, total, outputs = torch.zeros_like(u[:, 0]), torch.zeros_like(u[:, 0]), []
        for t in range(x.shape[1]):
            if self.conv_told:
                window = self.clear(window, first[:, t])
            if self.sum_told:
                total = self.clear(total, first[:, t])
            total = self.decay.sigmoid() * total + (self.taps[0] * window + self.taps[1] * u[:, t]).tanh()
            window = u[:, t]
            outputs.append(self.leave(total))
        return torch.stack(outputs, dim=1)

    def clear(self, state, first):
        zero = state - state.detach() if self.leaks_gradients else torch.zeros_like(state)
        return torch.where(first[:, None], zero, state)


FORMS = ["cu_seqlens", "segment_ids", "position_ids"]


@pytest.mark.parametrize(("seed", "boundaries"), enumerate(FORMS))
def test_a_layer_that_keeps_documents_apart_is_healthy(seed, boundaries):
    torch.manual_seed(seed)
    started = time.process_time()
    layer = subjects.Packed(Layer(boundaries), (4,), boundaries=boundaries)
    report = doctor.assert_healthy(layer, seed=seed, warnings=True)
    assert time.process_time() - started < 5.0
    assert not [o for o in report.outcomes if o.status == "not examined"], report.to_text()


@pytest.mark.parametrize(
    ("mistake", "cause"),
    [
        ({"conv_told": False, "sum_told": False}, "reset-dropped-in-training"),
        ({"sum_told": False}, "partial-reset"),
        ({"conv_told": False}, "partial-reset"),
        ({"leaks_gradients": True}, "gradient-crosses-reset"),
    ],
    ids=["neither-told", "sum-not-told", "conv-not-told", "backward-only"],
)
def test_a_leak_across_a_document_boundary_is_named(mistake, cause):
    torch.manual_seed(3)
    report = doctor.examine(subjects.Packed(Layer(**mistake), (4,)))
    assert [f.cause for f in report.findings if f.severity == "error"] == [cause], report.to_text()


def test_the_fix_is_shown_in_the_words_of_packed_rows():
    torch.manual_seed(4)
    report = doctor.examine(subjects.Packed(Layer(conv_told=False, sum_told=False), (4,)))
    assert "cu_seqlens=" in report.findings[0].patch


def test_the_forms_of_boundaries_say_the_same_documents():
    """Documents of 2, 1 and 3 tokens."""
    seen = {}

    class Spy(nn.Module):
        def forward(self, x, **told):
            seen.update(told)
            return x

    for form in FORMS:
        subjects.Packed(Spy(), (4,), boundaries=form)._run(torch.zeros(1, 6, 4), [2, 1, 3])
    assert seen["cu_seqlens"].tolist() == [0, 2, 3, 6]
    assert seen["segment_ids"].tolist() == [[1, 1, 2, 3, 3, 3]]
    assert seen["position_ids"].tolist() == [[0, 1, 0, 0, 1, 2]]


def test_another_form_of_boundaries_is_refused_in_one_line():
    with pytest.raises(ValueError, match="one of cu_seqlens, segment_ids, position_ids"):
        subjects.Packed(Layer(), (4,), boundaries="starts")
