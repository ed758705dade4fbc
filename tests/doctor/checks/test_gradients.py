"""Gradients flow inside an episode: truncation is an error unless it is declared, and no check passes without a gradient."""

import pytest
import torch
from torch import nn

from broken.base import OBS
from broken.cleanrl_agents import Agent, DetachesEveryStep
from broken.sparse_memories import HEALTHY as SPARSE
from holdfast import doctor
from holdfast.doctor.subjects import CleanRL, Module


class CutsEvery(Agent):
    """Training detaches the state after every `k` steps."""

    def __init__(self, k):
        super().__init__()
        self.k = k

    def sequence(self, x, state, done):
        outputs = []
        for t, (x_t, done_t) in enumerate(zip(x, done)):
            state = tuple(s.detach() for s in state) if t % self.k == 0 else state
            y, state = self.lstm(x_t.unsqueeze(0), self.reset(state, done_t))
            outputs.append(y)
        return torch.cat(outputs), state


def _causes(agent, **options):
    report = doctor.examine(CleanRL(agent, (OBS,)), **options)
    return report.ok, [f.cause for f in report.findings if f.severity != "warning"]


def test_a_cut_is_an_error_unless_it_is_declared():
    assert _causes(CutsEvery(4)) == (False, ["over-detached"])
    assert _causes(CutsEvery(4), bptt=4) == (True, ["truncated-bptt"])
    assert _causes(CutsEvery(1), bptt=1) == (True, ["truncated-bptt"])


def test_a_cut_before_the_declared_length_is_an_error():
    assert _causes(CutsEvery(4), bptt=8) == (False, ["over-detached"])
    assert _causes(DetachesEveryStep(), bptt=2) == (False, ["over-detached"])


@pytest.mark.parametrize("bptt", [4, 100])
def test_a_declaration_changes_nothing_for_a_policy_that_does_not_cut(bptt):
    assert _causes(Agent(), bptt=bptt) == (True, [])


def test_the_declaration_of_a_subject_counts_and_stays():
    subject = CleanRL(CutsEvery(4), (OBS,))
    subject.bptt = 4
    assert doctor.examine(subject).ok
    assert not doctor.examine(subject, bptt=8).ok
    assert subject.bptt == 4


class RoundsObservations(Agent):
    """Healthy: observations are read as symbols, so that no gradient can reach them."""

    def get_states(self, x, state, done):
        return super().get_states((3 * x).round(), state, done)


class FrozenEncoder(Agent):
    """Healthy: a pretrained encoder runs without a graph."""

    def rows(self, hidden, batch):
        return super().rows(hidden, batch).detach()


class RoundsAndDetaches(RoundsObservations, DetachesEveryStep):
    """The state is detached at every step, behind rounded observations."""


class FreezesAndDetaches(FrozenEncoder, DetachesEveryStep):
    """The state is detached at every step, behind a frozen encoder."""


class CoreWithoutGraph(Agent):
    """The recurrent layer runs without a graph; the heads are trained."""

    def sequence(self, x, state, done):
        with torch.no_grad():
            return super().sequence(x, state, done)


class CoreWithoutGraphAndSkip(CoreWithoutGraph):
    """The same, with a way around the recurrent layer."""

    def sequence(self, x, state, done):
        y, state = super().sequence(x, state, done)
        return x + y, state


class Cell(nn.Module):
    """`(x, state, resets)`: a cell of its own over symbols. `late`: the output is read before the state moves.

    `cut`: the state is detached "before" it is used, or "after" each step.
    """

    input_size = OBS

    def __init__(self, cut="", late=False):
        super().__init__()
        self.symbols, self.mix, self.head = nn.Embedding(64, 8), nn.Linear(16, 8), nn.Linear(8, 3)
        self.cut, self.late = cut, late

    def forward(self, x, state, resets):
        h = x.new_zeros(x.shape[1], 8) if state is None else state
        outputs = []
        for x_t, resets_t in zip(x, resets):
            h = torch.where(resets_t[:, None], torch.zeros_like(h), h.detach() if self.cut == "before" else h)
            before = h
            symbol = self.symbols(((x_t.clamp(-1.9, 1.9) + 2) * 16).long()).sum(1)
            h = torch.tanh(self.mix(torch.cat([symbol, h], -1)))
            outputs.append(self.head(before if self.late else h))
            h = h.detach() if self.cut == "after" else h
        return torch.stack(outputs), h


class WithoutLayers(Cell):
    """The same cell, written without layers."""

    def __init__(self, cut=""):
        super().__init__(cut)
        self._modules.clear()
        self.weights = nn.ParameterList([torch.randn(64, 8), torch.randn(8, 16) / 4, torch.randn(3, 8)])

    def symbols(self, indices):
        return self.weights[0][indices]

    def mix(self, x):
        return x @ self.weights[1].T

    def head(self, x):
        return x @ self.weights[2].T


SEEDS = range(8)


def _flow(subject, seed):
    report = doctor.examine(subject, seed=seed)
    outcome = next(o for o in report.outcomes if o.check == "gradient-flow")
    return [f.cause for f in report.findings if f.severity == "error"], outcome


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        (RoundsAndDetaches, "over-detached"),
        (FreezesAndDetaches, "over-detached"),
        (CoreWithoutGraph, "gradients-severed"),
        (CoreWithoutGraphAndSkip, "gradients-severed"),
    ],
)
def test_a_cut_is_seen_where_no_gradient_reaches_the_observations(kind, cause, seed):
    torch.manual_seed(seed)
    assert _flow(CleanRL(kind(), (OBS,)), seed)[0] == [cause]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", [RoundsObservations, FrozenEncoder])
def test_credit_is_measured_at_the_recurrent_layer_where_observations_get_none(kind, seed):
    torch.manual_seed(seed)
    errors, outcome = _flow(CleanRL(kind(), (OBS,)), seed)
    assert (errors, outcome.status) == ([], "passed")
    assert outcome.said == "credit reaches 11 steps back in a segment of 12, measured at the inputs of its LSTM"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("cut", ["", "before"])
def test_a_cell_of_your_own_over_symbols_is_measured_at_its_embedding(cut, late, seed):
    torch.manual_seed(seed)
    errors, outcome = _flow(Module(Cell(cut, late)), seed)
    assert errors == (["over-detached"] if cut else [])
    assert outcome.said.endswith("measured at the outputs of its first layers")
    assert ("credit reaches 11 steps" in outcome.said) is (not cut)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("cut", ["", "after"])
def test_without_layers_credit_is_measured_at_the_state_that_a_segment_starts_from(cut, seed):
    torch.manual_seed(seed)
    errors, outcome = _flow(Module(WithoutLayers(cut)), seed)
    assert errors == (["over-detached"] if cut else [])
    if not cut:
        where = "measured at the state that it starts from"
        assert outcome.said == f"credit reaches 11 steps back in a segment of 12, {where}"


def test_without_a_place_to_measure_at_the_check_does_not_pass():
    class CutsItsStart(WithoutLayers):
        def forward(self, x, state, resets):
            return super().forward(x, None if state is None else state.detach(), resets)

    errors, outcome = _flow(Module(CutsItsStart()), 0)
    assert (errors, outcome.status) == ([], "not applicable")
    assert "no gradient reaches the observations" in outcome.said


@pytest.mark.parametrize("seed", SEEDS)
def test_dead_units_of_a_relu_network_are_no_cut(seed):
    torch.manual_seed(seed)
    assert _flow(nn.RNN(OBS, 8, nonlinearity="relu"), seed)[0] == []


@pytest.mark.parametrize("make", SPARSE.values(), ids=SPARSE)
def test_a_memory_that_sees_only_some_of_the_past_is_healthy(make):
    torch.manual_seed(3)
    report = doctor.assert_healthy(make(), seed=3)
    assert not [o for o in report.outcomes if o.status == "not examined"], report.to_text()


class DetachesTheCell(Agent):
    """Training detaches c and not h."""

    def sequence(self, x, state, done):
        outputs = []
        for x_t, done_t in zip(x, done):
            y, (h, c) = self.lstm(x_t.unsqueeze(0), self.reset(state, done_t))
            outputs.append(y)
            state = h, c.detach()
        return torch.cat(outputs), state


@pytest.mark.parametrize("seed", range(2))
def test_a_state_that_is_detached_in_part_has_gradients_of_the_wrong_size(seed):
    torch.manual_seed(seed)
    assert _flow(CleanRL(DetachesTheCell(), (OBS,)), seed)[0] == ["gradient-distorted"]


@pytest.mark.parametrize("seed", range(2))
def test_a_critic_that_does_not_train_the_memory_is_no_cut(seed):
    torch.manual_seed(seed)
    agent = Agent()
    agent.critic.register_forward_pre_hook(lambda layer, args: (args[0].detach(),))
    assert _flow(CleanRL(agent, (OBS,)), seed)[0] == []
