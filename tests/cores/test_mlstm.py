"""`hf.MLSTM`: its formula, its memory, steps against chunks. The laws are tested for all cores."""

from __future__ import annotations

import math

import pytest
import torch
from gymnasium import spaces

import holdfast as hf


def test_a_step_is_the_formula():
    torch.manual_seed(0)
    core = hf.MLSTM(3, 4, num_heads=1)
    x, memory = torch.randn(1, 3), torch.randn(1, 1, 4, 4)
    y, state = core(x, {"memory": memory})
    q, k, v, o = core.qkvo(x)[0].split(4)
    i, f = core.gates(x)[0].sigmoid()
    a, b, c, d = memory[0, 0].t()  # by channel of the keys: a and c are a plane, b and d another
    cos, sin = (torch.tensor([0.25, 0.75]) * math.pi).cos(), (torch.tensor([0.25, 0.75]) * math.pi).sin()
    turned = [a * cos[0] - c * sin[0], b * cos[1] - d * sin[1], a * sin[0] + c * cos[0], b * sin[1] + d * cos[1]]
    expected = f * torch.stack(turned, 1) + i * torch.outer(v, k / k.norm())
    torch.testing.assert_close(state["memory"][0, 0], expected)
    torch.testing.assert_close(y[0], core.out(o.sigmoid() * (expected @ q)))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("reset", ["zero", "learned"])
def test_log_probabilities_of_steps_and_chunks_agree(seed, reset):
    """Law 1 on a whole policy with N(0, 1) inputs, over several chunks and several sequences in a row."""
    torch.manual_seed(seed)
    core = hf.Stack([hf.Block(hf.MLSTM(32, 32, reset=reset)), hf.Block(hf.MLSTM(32, 32, reset=reset))])
    policy = hf.ActorCritic(spaces.Box(-9, 9, (8,)), spaces.Discrete(6), core=core, hidden_size=32)
    torch.nn.init.orthogonal_(policy.actor.weight)  # logits as large as features
    T, B = 80, 4
    obs, resets = torch.randn(3 * T, B, 8), torch.rand(3 * T, B) < 0.02
    start, worst = policy.initial_state(B), 0.0
    for part in range(3):
        rows = slice(part * T, (part + 1) * T)
        steps = [policy.act(o, r) for o, r in zip(obs[rows], resets[rows])]
        actions, expected = torch.stack([s.action for s in steps]), torch.stack([s.log_prob for s in steps])
        with torch.no_grad():
            ev = policy.evaluate(obs[rows], actions, start, resets[rows])
        worst = max(worst, float((ev.log_prob - expected).abs().max()))
        start = policy.memory.read()
    assert worst <= 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_its_memory_is_float32_in_every_module(dtype):
    core = hf.MLSTM(4, 8).to(dtype)
    y, state = core(torch.randn(3, 2, 4).to(dtype))
    assert y.dtype == dtype and state["memory"].dtype == torch.float32


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="hidden_size 6 must be a multiple of num_heads 4"):
        hf.MLSTM(4, 6)
    with pytest.raises(ValueError, match="unknown reset mode 'zeros'"):
        hf.MLSTM(4, 8, reset="zeros")
    with pytest.raises(ValueError, match="unknown kernel 'native'"):
        hf.MLSTM(4, 8, kernel="native")(torch.zeros(1, 1, 4))
