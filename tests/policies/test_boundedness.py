"""However long the run: no graph is carried, nothing accumulates, and a segment can be trained on again and again."""

from __future__ import annotations

import gc

import psutil
import pytest
import torch

from conformance.policies import actor_critic

ENVS, STEPS = 8, 16


def live_tensors():
    gc.collect()
    return sum(1 for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter))


def rss():
    return psutil.Process().memory_info().rss


@pytest.mark.parametrize("kind", ["lstm", "gru", "stack", "parallel"])
def test_a_thousand_steps_with_gradients_enabled_and_ten_backward_passes_leave_nothing_behind(kind):
    driver = actor_critic(kind, "zero")
    policy, obs = driver.policy, driver.observations(STEPS, ENVS)
    resets = torch.rand(STEPS, ENVS, generator=torch.Generator().manual_seed(0)) < 0.05
    ids = torch.randperm(ENVS)

    def steps(n):
        for t in range(n):
            policy.act(obs[t % STEPS], resets[t % STEPS], ids if t % 3 == 0 else None)

    def train(n):
        for _ in range(n):
            ev = policy.evaluate(obs, torch.zeros(STEPS, ENVS, dtype=torch.long), start, resets)
            (ev.log_prob.mean() + ev.value.square().mean() - ev.entropy.mean()).backward()

    assert torch.is_grad_enabled()
    start = policy.initial_state(ENVS)
    steps(100)
    train(2)
    tensors, growth = live_tensors(), []
    while len(growth) < 3 and (not growth or growth[-1] >= 4 * 2**20):
        memory = rss()
        steps(1000)
        assert all(leaf.grad_fn is None and not leaf.requires_grad for leaf in driver.carried())
        train(10)
        assert live_tensors() == tensors
        growth.append(rss() - memory)
    # What leaks grows every time; an allocator that other tests left in pieces grows once.
    assert growth[-1] < 4 * 2**20, f"the process grew every time: {growth}"
    assert all(torch.isfinite(p.grad).all() for p in policy.parameters())


def test_memory_is_as_large_as_its_environments():
    driver = actor_critic("lstm", "zero")
    for t in range(50):
        driver.act(driver.observations(4, seed=t), env_ids=torch.arange(t % 5, t % 5 + 4))
    assert driver.memory.num_envs == 8 and all(leaf.shape[0] == 8 for leaf in driver.carried())
