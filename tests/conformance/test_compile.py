"""Both legs compile as one graph each, memory update included, and changing flags recompile nothing."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

import holdfast as hf
from conformance.driver import either
from conformance.episodes import assert_close, flags
from conformance.policies import actor_critic, conv

# One small case of each leg with the real compiler; the rest with the same graphs run by eager kernels.
CASES = {
    "lstm, inductor": (lambda: actor_critic("lstm", "zero"), "inductor"),
    "every cell": (lambda: actor_critic("every cell", "zero"), "aot_eager"),
    "stack": (lambda: actor_critic("stack", "zero"), "aot_eager"),
    "block": (lambda: actor_critic("block", "zero"), "aot_eager"),
    "conv-gru": (lambda: conv("gru"), "aot_eager"),
    "learned": (lambda: actor_critic("lstm", "learned"), "aot_eager"),
    "detach": (lambda: actor_critic("gru", "detach"), "aot_eager"),
    "never": (lambda: actor_critic("lstm", "never"), "aot_eager"),
}
# Rows by id concern the memory and the form of a state: flat, a dict of dicts with integers, a tuple.
ROWS = [*((case, "all") for case in CASES), *((case, "by id") for case in ("lstm, inductor", "every cell", "stack"))]
ENVS, STEPS = 3, 4


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    torch._dynamo.reset()
    counters.clear()  # reset() leaves the counters as they are
    yield
    torch._dynamo.reset()


def graphs_and_breaks():
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def step_flags(t):
    """None of, some of, and all environments begin an episode."""
    return [flags(1, ENVS)[0], flags(1, ENVS, (0, t % ENVS))[0], torch.ones(ENVS, dtype=torch.bool)][t % 3]


@pytest.mark.parametrize(("case", "rows"), ROWS)
def test_act_is_one_graph_with_its_memory_update_and_equals_eager(case, rows):
    make, backend = CASES[case]
    driver, eager = make(), make()
    if rows == "by id":
        for each in (driver, eager):
            each.memory.reserve(ENVS + 2)
    env_ids = None if rows == "all" else torch.tensor([4, 0, 2])
    act = torch.compile(driver.policy.act, fullgraph=True, backend=backend)
    for t in range(6):
        obs = driver.observations(ENVS, seed=t)
        got = act(obs, step_flags(t), env_ids, deterministic=True)
        expected = eager.policy.act(obs, step_flags(t), env_ids, deterministic=True)
        assert_close(got.value, expected.value)
        assert_close(got.log_prob, expected.log_prob)
    assert graphs_and_breaks() == (1, 0)
    for mine, theirs in zip(driver.carried(), eager.carried()):
        assert_close(mine, theirs)


def test_memories_of_other_sizes_are_served_by_a_few_graphs():
    driver, eager = actor_critic("lstm", "zero"), actor_critic("lstm", "zero")
    act = torch.compile(driver.policy.act, fullgraph=True, backend="aot_eager")
    for batch in (3, 5, 2, 7, 4):
        mine, theirs = hf.Memory(driver.policy.core), hf.Memory(eager.policy.core)
        for t in range(3):
            obs = driver.observations(batch, seed=t)
            got = act(obs, memory=mine, deterministic=True).value
            assert_close(got, eager.policy.act(obs, memory=theirs, deterministic=True).value)
    graphs, breaks = graphs_and_breaks()
    assert graphs <= 4 and breaks == 0


def test_compiled_and_eager_steps_share_one_memory():
    driver, eager = actor_critic("lstm", "zero"), actor_critic("lstm", "zero")
    act = torch.compile(driver.policy.act, fullgraph=True, backend="aot_eager")
    for t in range(6):
        obs = driver.observations(ENVS, seed=t)
        if t == 3:
            for each in (driver, eager):
                each.reset_env_memory(1)
        got = (act if t % 2 else driver.policy.act)(obs, step_flags(t), deterministic=True)
        assert_close(got.value, eager.policy.act(obs, step_flags(t), deterministic=True).value)
    assert graphs_and_breaks() == (1, 0)


@pytest.mark.parametrize("case", CASES)
def test_evaluate_with_backward_is_one_graph_and_equals_eager(case):
    make, backend = CASES[case]
    driver, eager = make(), make()
    evaluate = torch.compile(driver.policy, fullgraph=True, backend=backend)  # forward is evaluate
    patterns = [(None, flags(STEPS, ENVS, (0, 1), (2, 0))), (flags(STEPS, ENVS), flags(STEPS, ENVS))]
    patterns += [(torch.ones(STEPS, ENVS, dtype=torch.bool), None)]
    for seed, (dones, truncateds) in enumerate(patterns):
        obs, state = driver.observations(STEPS, ENVS, seed=seed), driver.start_state(ENVS)
        actions = torch.arange(STEPS * ENVS).view(STEPS, ENVS) % 5
        for run, each in ((evaluate, driver), (eager.policy.evaluate, eager)):
            each.module.zero_grad()
            ev = run(obs, actions, state, either(dones, truncateds))
            (ev.log_prob.sum() + ev.value.square().sum() + ev.entropy.sum()).backward()
        for (name, mine), theirs in zip(driver.module.named_parameters(), eager.module.parameters()):
            if theirs.grad is not None:
                assert mine.grad is not None, name
                assert_close(mine.grad, theirs.grad, atol=1e-4)
    assert graphs_and_breaks() == (1, 0)
