"""The kernels around the core against float64 with the tiles that a GPU takes. Needs a GPU, or TRITON_INTERPRET=1."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

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


@pytest.mark.parametrize(
    ("inputs", "one_hot", "activation", "features", "seed"),
    [(4, True, "tanh", 128, 1), (3, False, "relu", 100, 2), (8, False, "tanh", 64, 3), (20, True, "tanh", 128, 4)],
)
def test_first_layer(inputs: int, one_hot: bool, activation: str, features: int, seed: int):
    from holdfast.kernels.triton.first_layer import FirstLayer

    torch.manual_seed(seed)
    steps, batch = ROWS
    columns = torch.randperm(batch, device=DEVICE)[: batch // 2]
    weight, bias, given = 0.3 * randn(features, inputs), 0.1 * randn(features), randn(steps, len(columns), features)
    own: dict[str, Any] = {}
    if one_hot:
        numbers = torch.arange(inputs, dtype=torch.int32, device=DEVICE)
        own = {"part": torch.zeros_like(numbers), "choice": numbers}
        obs = torch.randint(inputs, (steps, batch), device=DEVICE)
        x = torch.nn.functional.one_hot(obs, inputs).double()
    else:
        obs = randn(steps, batch, inputs)
        own = {"mean": randn(inputs), "var": 0.5 + randn(inputs).square()}
        x = ((obs.double() - own["mean"]) / (own["var"].double() + 1e-8).sqrt()).clamp(-10, 10)
    layer = FirstLayer(inputs, activation, 1 if one_hot else inputs, **own)
    exact = [p.double().requires_grad_() for p in (weight, bias)]
    function = torch.tanh if activation == "tanh" else torch.relu
    y = function(x[:, columns] @ exact[0].T + exact[1])
    y.backward(given.double())
    assert error(layer.features(obs, columns, weight, bias), y.detach()) < 1e-6
    for got, wanted in zip(layer.gradients(obs, columns, weight, bias, given), exact):
        assert wanted.grad is not None and error(got, wanted.grad) < 2e-6


@pytest.mark.parametrize(("outputs", "features", "seed"), [(4, 128, 5), (2, 100, 6), (7, 64, 7), (12, 128, 8)])
def test_loss_of_one_choice(outputs: int, features: int, seed: int):
    from holdfast.kernels.triton.outputs import Coefficients, Layers, Stored, loss_and_gradients

    torch.manual_seed(seed)
    steps, batch = ROWS
    columns = torch.randperm(batch, device=DEVICE)[: batch // 2]
    size = len(columns)
    weights = [0.2 * randn(outputs, features), randn(outputs), 0.2 * randn(1, features), randn(1)]
    y = randn(steps * size, features)
    bounds = torch.tensor([0, outputs], dtype=torch.int32, device=DEVICE)
    stored = Stored(
        torch.randint(outputs, (steps, batch), device=DEVICE), -1.5 + 0.3 * randn(steps, batch), randn(steps, batch),
        randn(steps, batch), randn(steps, batch), None,
    )  # fmt: skip
    numbers = [torch.tensor(x, device=DEVICE) for x in (1 / (steps * size), 0.2, 0.03)]
    by = Coefficients(numbers[0], numbers[1], None, numbers[2], 0.5)
    got = loss_and_gradients(y, Layers(*weights, bounds=bounds), stored, columns, by)

    actor_w, actor_b, critic_w, critic_b, exact_y = (p.double().requires_grad_() for p in (*weights, y))
    log_p = (exact_y @ actor_w.T + actor_b).log_softmax(-1)
    old = {name: part[:, columns].flatten() for name, part in stored._asdict().items() if part is not None}

    class Old:
        log_prob, value, advantage, returns = (old[n].double() for n in ("log_prob", "value", "advantage", "returns"))
        valid = torch.ones_like(old["value"], dtype=torch.bool)

    chosen = log_p.gather(1, old["actions"].unsqueeze(1)).squeeze(1)
    value = (exact_y @ critic_w.T + critic_b).squeeze(1)
    settings = LossSettings(clip_range=0.2, entropy_coef=0.03, value_coef=0.5)
    terms = clipped_objective(chosen, -(log_p.exp() * log_p).sum(1), value, Old, settings, True)  # type: ignore[arg-type]
    terms.loss.backward()
    wanted = {"features": exact_y, "actor_w": actor_w, "actor_b": actor_b, "critic_w": critic_w, "critic_b": critic_b}
    for name, leaf in wanted.items():
        assert leaf.grad is not None and error(getattr(got, name), leaf.grad) < 3e-6, name
    sums = torch.stack([terms.policy_loss, terms.value_loss, terms.entropy, terms.approx_kl, terms.clip_fraction])
    assert error(got.metrics / (steps * size), sums) < 3e-6


@pytest.mark.parametrize(("outputs", "batch", "seed"), [(4, 1000, 9), (12, 70, 10)])
def test_a_step_draws_from_the_right_distribution(outputs: int, batch: int, seed: int):
    """The action is the one whose logit minus the logarithm of its exponential number is largest."""
    from holdfast.kernels.triton.outputs import Layers, act

    torch.manual_seed(seed)
    batch = batch if ON_GPU else 20
    weights = [0.2 * randn(outputs, 128), randn(outputs), 0.2 * randn(1, 128), randn(1)]
    y, noise = randn(batch, 128), torch.empty(batch, outputs, device=DEVICE).exponential_()
    action, log_prob, value = torch.empty(batch, dtype=torch.int64, device=DEVICE), randn(batch), randn(batch)
    bounds = torch.tensor([0, outputs], dtype=torch.int32, device=DEVICE)
    act(y, Layers(*weights, bounds=bounds), noise, None, action, log_prob, value)
    log_p = (y.double() @ weights[0].double().T + weights[1].double()).log_softmax(-1)
    score = log_p - noise.double().log()
    best = score.max(1).values
    assert float((best - score.gather(1, action.unsqueeze(1)).squeeze(1)).max()) < 1e-5
    assert error(log_prob, log_p.gather(1, action.unsqueeze(1)).squeeze(1)) < 2e-6
    assert error(value, (y.double() @ weights[2].double().T + weights[3].double()).squeeze(1)) < 2e-6
