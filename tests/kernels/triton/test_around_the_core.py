"""The kernels around the core against float64 with the tiles that a GPU takes. Needs a GPU, or TRITON_INTERPRET=1."""

from __future__ import annotations

import importlib.util
import os
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from holdfast.algorithms.ppo import LossSettings, clipped_objective

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
ROWS = (7, 300) if ON_GPU else (3, 9)  # steps, environments of the rollout
pytestmark = [
    pytest.mark.skipif(not ON_GPU and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a CUDA GPU"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
]


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm().clamp(min=1e-12))


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE)


class Source(NamedTuple):
    """A part of an observation: whole numbers below `choices`, or a vector of that many numbers, normalized or not."""

    choices: tuple[int, ...] = ()
    vector: int = 0
    normalized: bool = False

    def draw(self, steps: int, batch: int) -> tuple[Any, Tensor, Tensor]:
        """The kernel's description, observations, and the input in float64."""
        from holdfast.kernels.triton.first_layer import Part

        if self.vector:
            obs = randn(steps, batch, self.vector)
            if not self.normalized:
                return Part(self.vector, self.vector), obs, obs.double()
            mean, var = randn(self.vector), 0.5 + randn(self.vector).square()
            x = ((obs.double() - mean) / var.double().sqrt()).clamp(-10, 10)
            return Part(self.vector, self.vector, shift=mean, scale=var.rsqrt()), obs, x
        sizes = torch.tensor(self.choices, device=DEVICE)
        obs = (torch.rand(steps, batch, len(sizes), device=DEVICE) * sizes).long()
        one_hot = [torch.nn.functional.one_hot(obs[..., i], n) for i, n in enumerate(self.choices)]
        tables = [
            [i for i, n in enumerate(self.choices) for _ in range(n)],
            [j for n in self.choices for j in range(n)],
        ]
        part, choice = torch.tensor(tables, dtype=torch.int32, device=DEVICE)
        return Part(sum(self.choices), len(sizes), part, choice), obs, torch.cat(one_hot, -1).double()


@pytest.mark.parametrize(
    ("sources", "activation", "features", "seed"),
    [
        ([Source((4,))], "tanh", 128, 1),
        ([Source(vector=3, normalized=True)], "relu", 100, 2),
        ([Source(vector=8, normalized=True)], "tanh", 64, 3),
        ([Source((20,))], "tanh", 128, 4),
        ([Source((14, 27))], "tanh", 128, 11),
        ([Source((3,)), Source((5,))], "tanh", 128, 12),
        ([Source((2,)), Source((12, 12))], "relu", 128, 13),
        ([Source(vector=5), Source((6,))], "tanh", 100, 14),
        ([Source((3, 3)), Source(vector=2, normalized=True)], "tanh", 64, 15),
        ([Source((3, 3)), Source((26,))], "tanh", 128, 16),
    ],
)  # fmt: skip
def test_first_layer(sources: list[Source], activation: str, features: int, seed: int):
    from holdfast.kernels.triton.first_layer import FirstLayer

    torch.manual_seed(seed)
    steps, batch = ROWS
    columns = torch.randperm(batch, device=DEVICE)[: batch // 2]
    parts, obs, inputs = zip(*(source.draw(steps, batch) for source in sources))
    x, layer = torch.cat(inputs, -1), FirstLayer(parts, activation)
    weight, bias = 0.3 * randn(features, layer.inputs), 0.1 * randn(features)
    given = randn(steps, len(columns), features)
    exact = [p.double().requires_grad_() for p in (weight, bias)]
    function = torch.tanh if activation == "tanh" else torch.relu
    y = function(x[:, columns] @ exact[0].T + exact[1])
    y.backward(given.double())
    assert error(layer.features(obs, columns, weight, bias), y.detach()) < 1e-6
    for got, wanted in zip(layer.gradients(obs, columns, weight, bias, given), exact):
        assert wanted.grad is not None and error(got, wanted.grad) < 2e-6


HEADS = [
    ((4,), 128, 5), ((2,), 100, 6), ((7,), 64, 7), ((12,), 128, 8), ((16,), 128, 17), ((27,), 128, 18), ((31,), 100, 19),
    ((52,), 256, 20), ((127,), 64, 21), ((3, 2, 5), 128, 22), ((12, 12), 128, 23), ((8, 8), 256, 24),
]  # fmt: skip


def bounds_of(heads: tuple[int, ...]) -> Tensor:
    return torch.tensor([sum(heads[:i]) for i in range(len(heads) + 1)], dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize(("heads", "features", "seed"), HEADS)
def test_loss_of_choices(heads: tuple[int, ...], features: int, seed: int):
    from holdfast.kernels.triton.outputs import Coefficients, Layers, Stored, loss_and_gradients

    torch.manual_seed(seed)
    steps, batch = ROWS
    outputs = sum(heads)
    columns = torch.randperm(batch, device=DEVICE)[: batch // 2]
    size = len(columns)
    weights = [0.2 * randn(outputs, features), randn(outputs), 0.2 * randn(1, features), randn(1)]
    y = randn(steps * size, features)
    actions = (torch.rand(steps, batch, len(heads), device=DEVICE) * torch.tensor(heads, device=DEVICE)).long()
    stored = Stored(
        actions, -1.5 * len(heads) + 0.3 * randn(steps, batch), randn(steps, batch), randn(steps, batch),
        randn(steps, batch), None,
    )  # fmt: skip
    numbers = [torch.tensor(x, device=DEVICE) for x in (1 / (steps * size), 0.2, 0.03)]
    by = Coefficients(numbers[0], numbers[1], None, numbers[2], 0.5)
    got = loss_and_gradients(y, Layers(*weights, bounds=bounds_of(heads)), stored, columns, by)

    actor_w, actor_b, critic_w, critic_b, exact_y = (p.double().requires_grad_() for p in (*weights, y))
    old = {name: part[:, columns].flatten(0, 1) for name, part in stored._asdict().items() if part is not None}

    class Old:
        log_prob, value, advantage, returns = (old[n].double() for n in ("log_prob", "value", "advantage", "returns"))
        valid = torch.ones_like(old["value"], dtype=torch.bool)

    log_ps = [part.log_softmax(-1) for part in (exact_y @ actor_w.T + actor_b).split(heads, 1)]
    chosen = sum(log_p.gather(1, old["actions"][:, [i]]).squeeze(1) for i, log_p in enumerate(log_ps))
    entropy = sum(-(log_p.exp() * log_p).sum(1) for log_p in log_ps)
    value = (exact_y @ critic_w.T + critic_b).squeeze(1)
    settings = LossSettings(clip_range=0.2, entropy_coef=0.03, value_coef=0.5)
    terms = clipped_objective(chosen, entropy, value, Old, settings, True)  # type: ignore[arg-type]
    terms.loss.backward()
    wanted = {"features": exact_y, "actor_w": actor_w, "actor_b": actor_b, "critic_w": critic_w, "critic_b": critic_b}
    for name, leaf in wanted.items():
        assert leaf.grad is not None and error(getattr(got, name), leaf.grad) < 3e-6, name
    sums = torch.stack([terms.policy_loss, terms.value_loss, terms.entropy, terms.approx_kl, terms.clip_fraction])
    assert error(got.metrics / (steps * size), sums) < 3e-6


@pytest.mark.parametrize(("numbers", "seed"), [(3, 25), (12, 26), (16, 27), (40, 28)])
def test_loss_of_numbers(numbers: int, seed: int):
    """Small means, and deviations for which log-probabilities are near 0: elsewhere their rounding hides that of the kernel. A
    gradient has the error of an output over the deviation, a quarter, of each number."""
    from holdfast.kernels.triton.outputs import Coefficients, Layers, Stored, loss_and_gradients

    torch.manual_seed(seed)
    steps, batch = ROWS
    weights = [0.02 * randn(numbers, 128), 0.1 * randn(numbers), 0.2 * randn(1, 128), randn(1)]
    log_std, center, half_range = -1.4 + 0.1 * randn(numbers), 0.1 * randn(numbers), 0.8 + randn(numbers).square()
    y = randn(steps * batch, 128)
    mean = center + half_range * (y @ weights[0].T + weights[1])
    actions = (mean + half_range * log_std.exp() * randn(steps * batch, numbers)).view(steps, batch, numbers)
    old, gain, returns = 0.1 * randn(3, steps, batch) + torch.tensor([[[0.0]], [[0.5]], [[1.0]]], device=DEVICE)

    exact = [p.double().requires_grad_() for p in (*weights, y, log_std)]
    actor_w, actor_b, critic_w, critic_b, exact_y, exact_log_std = exact
    dist = torch.distributions.Normal(
        center + half_range * (exact_y @ actor_w.T + actor_b), half_range * exact_log_std.exp()
    )
    log_prob, value = dist.log_prob(actions.flatten(0, 1)).sum(1), (exact_y @ critic_w.T + critic_b).squeeze(1)
    old = (log_prob.detach().float().view(steps, batch) + old).contiguous()

    class Old:
        valid = torch.ones_like(value, dtype=torch.bool)

    parts = (x.double().flatten() for x in (old, gain, returns, returns))
    Old.log_prob, Old.advantage, Old.returns, Old.value = parts  # type: ignore[attr-defined]
    settings = LossSettings(clip_range=0.2, entropy_coef=0.03, value_coef=0.5)
    clipped_objective(log_prob, dist.entropy().sum(1), value, Old, settings, True).loss.backward()  # type: ignore[arg-type]
    stored = Stored(actions, old, returns, gain.contiguous(), returns.contiguous(), None)
    each = [torch.tensor(x, device=DEVICE) for x in (1 / (steps * batch), 0.2, 0.03)]
    layers = Layers(*weights, kind="gaussian", log_std=log_std, center=center, half_range=half_range)
    got = loss_and_gradients(y, layers, stored, None, Coefficients(each[0], each[1], None, each[2], 0.5))
    for name, leaf in zip(("actor_w", "actor_b", "critic_w", "critic_b", "features", "log_std"), exact):
        assert leaf.grad is not None and error(getattr(got, name), leaf.grad) < 1e-5, name


@pytest.mark.parametrize(("heads", "features", "seed"), HEADS)
def test_a_step_draws_from_the_right_distribution(heads: tuple[int, ...], features: int, seed: int):
    """Each choice is the one whose logit minus the logarithm of its exponential number is largest."""
    from holdfast.kernels.triton.outputs import Layers, act

    torch.manual_seed(seed)
    batch, outputs = 1000 if ON_GPU else 20, sum(heads)
    weights = [0.2 * randn(outputs, features), randn(outputs), 0.2 * randn(1, features), randn(1)]
    y, noise = randn(batch, features), torch.empty(batch, outputs, device=DEVICE).exponential_()
    action = torch.full((batch, len(heads)), -1, device=DEVICE)
    log_prob, value = randn(batch), randn(batch)
    act(y, Layers(*weights, bounds=bounds_of(heads)), noise, None, action, log_prob, value)
    exact, total = y.double() @ weights[0].double().T + weights[1].double(), torch.zeros(batch, device=DEVICE).double()
    for i, (logits, drawn) in enumerate(zip(exact.split(heads, 1), noise.double().split(heads, 1))):
        log_p = logits.log_softmax(-1)
        score = log_p - drawn.log()
        assert float((score.max(1).values - score.gather(1, action[:, [i]]).squeeze(1)).max()) < 1e-5
        total += log_p.gather(1, action[:, [i]]).squeeze(1)
    assert error(log_prob, total) < 2e-6
    assert error(value, (y.double() @ weights[2].double().T + weights[3].double()).squeeze(1)) < 2e-6
