"""Cores of users that let episodes reach each other are stopped, in the doctor's words; healthy ones never are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import holdfast as hf
from accumulator import ProjectedAccumulator
from holdfast.causes import CAUSES
from holdfast.training.isolation_check import IsolationError, find_leak


class Own(hf.Core):
    """A GRU cell of torch, right by its base class."""

    def __init__(self, input_size: int = 4, hidden_size: int = 8, reset: str = "zero") -> None:
        super().__init__()
        self.input_size, self.output_size, self.reset = input_size, hidden_size, reset
        self.cell, self.slow = nn.GRUCell(input_size, hidden_size), nn.Parameter(torch.full((hidden_size,), 0.9))

    def row_shapes(self):
        return {"h": hf.RowShape((self.output_size,)), "m": hf.RowShape((self.output_size,))}

    def step(self, x, state):
        m = self.slow * state["m"] + (1 - self.slow) * state["h"]
        h = self.cell(x, state["h"])
        return h + m, {"h": h, "m": m}


class Scanned(Own):
    """One form for both legs: gates and outputs around a linear recurrence."""

    def sequence(self, x, state, resets):
        u = torch.tanh(x @ self.cell.weight_ih.t()[:, : self.output_size])
        a = torch.sigmoid(self.slow).expand_as(u).contiguous()
        h, last = hf.linear_recurrence(a, u, state["h"], resets)
        return torch.relu(h), {"h": last, "m": state["m"]}

    step = hf.Core.step


class Attention(Own):
    """Keeps what is left of earlier episodes in its state and does not read it."""

    def row_shapes(self):
        return {"ring": hf.RowShape((5, self.input_size)), "age": hf.RowShape((), torch.int64)}

    def step(self, x, state):
        raise NotImplementedError

    def _step(self, x, state, resets):
        age = state["age"] if resets is None else state["age"].masked_fill(resets, 0)
        ring = torch.cat([state["ring"][:, 1:], x.unsqueeze(1)], 1)
        seen = torch.arange(4, -1, -1) <= age.unsqueeze(1)
        mean = torch.where(seen.unsqueeze(-1), ring, 0.0).sum(1) / seen.sum(1, keepdim=True)
        return self.cell(mean), {"ring": ring, "age": age + 1}


class OneHot(Own):
    """Takes whole numbers alone: random inputs are an error."""

    def step(self, x, state):
        if not ((x == 0) | (x == 1)).all():
            raise ValueError("not one-hot")
        return super().step(x, state)


class Ignores(Own):
    def _step(self, x, state, resets):
        return self.step(x, state)


class HalfReset(Own):
    def _step(self, x, state, resets):
        fresh = self.reset_rows(state, resets)
        return self.step(x, {"h": fresh["h"], "m": state["m"]})


class Late(Own):
    def _step(self, x, state, resets):
        y, state = self.step(x, state)
        return y, self.reset_rows(state, resets)


class Everybody(Own):
    def _step(self, x, state, resets):
        return self.step(x, self.reset_rows(state, resets if resets is None else resets.any().expand_as(resets)))


class Common(Own):
    def _step(self, x, state, resets):
        return self.step(x, self.reset_rows(state, None if resets is None or resets.all() else resets))


class SequenceAlone(Scanned):
    """Steps reset, sequences do not."""

    def sequence(self, x, state, resets):
        return super().sequence(x, state, resets if len(x) == 1 else None)

    def _step(self, x, state, resets):
        y, state = self.sequence(x.unsqueeze(0), state, None if resets is None else resets.unsqueeze(0))
        return y.squeeze(0), state


class FirstStep(Own):
    """A sequence ignores the flag of its first step."""

    def sequence(self, x, state, resets):
        flags = None if resets is None else torch.cat([torch.zeros_like(resets[:1]), resets[1:]])
        return super().sequence(x, state, flags)


class GradientCrosses(Own):
    def _step(self, x, state, resets):
        fresh = self.reset_rows(state, resets)
        return self.step(x, {k: fresh[k] + state[k] - state[k].detach() for k in state})


BROKEN = {
    Ignores: "never-resets", HalfReset: "partial-reset", Late: "late-by-one", Everybody: "resets-everybody",
    Common: "common-ends-ignored", SequenceAlone: "never-resets", FirstStep: "boundary-lost-at-segment-start",
    GradientCrosses: "gradient-crosses-reset",
}  # fmt: skip


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("seed", range(5))
def test_a_broken_core_is_named_whatever_its_weights(kind, seed):
    torch.manual_seed(seed)
    leak = find_leak(kind(), torch.randn(24, 4, 4))
    assert leak is not None and leak.cause == BROKEN[kind]


@pytest.mark.parametrize("kind", [Own, Scanned, Attention, ProjectedAccumulator])
@pytest.mark.parametrize("seed", range(20))
def test_a_healthy_core_is_never_stopped(kind, seed):
    torch.manual_seed(seed)
    core = kind(4, 8)
    with torch.no_grad():
        for p in core.parameters():
            p.mul_(10.0 ** (seed % 5 - 2))  # from hardly any memory to saturated
    assert find_leak(core, torch.randn(24, 4, 4) * 10.0 ** (seed % 3 - 1)) is None


@pytest.mark.parametrize("mode", ["zero", "detach", "never"])
def test_reset_modes_decide_what_may_cross(mode):
    assert find_leak(Own(reset=mode)) is None
    crossing = find_leak(GradientCrosses(reset=mode))
    assert (crossing is None) == (mode == "never") and (crossing is None or crossing.cause == "gradient-crosses-reset")
    assert find_leak(hf.Block(Own(4, 4, reset=mode))) is None


def policy_around(core):
    env = hf.envs.make("holdfast/RepeatPreviousEasy-v0", num_envs=1)
    return hf.ActorCritic(env.single_observation_space, env.single_action_space, core, 8)


def config(tmp_path):
    return hf.TrainConfig(
        env="holdfast/RepeatPreviousEasy-v0", num_envs=4, num_steps=16, total_steps=128, run_dir=str(tmp_path / "run"),
        quiet=True, tensorboard=False, final_eval_episodes=2, hidden_size=8,
    )  # fmt: skip


def inside_stack(kind):
    return lambda i, h: hf.Stack([hf.Block(hf.GRU(i, h)), hf.Block(kind(h, h))])


def inside_parallel(kind):
    return lambda i, h: hf.Parallel(actor=kind(i, h), critic=hf.GRU(i, h, reset="never"))


@pytest.mark.parametrize("make", [lambda kind: kind, inside_stack, inside_parallel])
def test_the_trainer_stops_a_core_that_ignores_resets_and_says_what_the_doctor_says(make, tmp_path):
    with pytest.raises(IsolationError, match="your core Ignores") as error:
        hf.Trainer(config(tmp_path), policy=policy_around(make(Ignores))).run()
    assert CAUSES["never-resets"].meaning in str(error.value) and CAUSES["never-resets"].fix in str(error.value)
    hf.Trainer(config(tmp_path / "healthy"), policy=policy_around(make(Own))).run()


def test_inputs_that_the_core_had_are_enough_to_judge_it(tmp_path):
    hf.Trainer(config(tmp_path), policy=OneHotPolicy(OneHot(4, 8))).run()
    with pytest.raises(IsolationError, match="never-resets"):

        class Wrong(OneHot):
            _step = Ignores._step

        hf.Trainer(config(tmp_path / "broken"), policy=OneHotPolicy(Wrong(4, 8))).run()


class OneHotPolicy(hf.RecurrentPolicy):
    def __init__(self, core):
        super().__init__(core=core)
        self.heads = nn.Linear(8, 5)

    def encode(self, obs):
        return nn.functional.one_hot(obs.reshape(-1).long() % 4, 4).float()

    def decode(self, features):
        logits, value = self.heads(features).split([4, 1], -1)
        return torch.distributions.Categorical(logits=logits), value
