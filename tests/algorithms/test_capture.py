"""A gradient step can be captured: it never waits for the device, and runs the same operations with the same constants every time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gymnasium import spaces
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import holdfast as hf
from holdfast.algorithms.base import Progress, RunContext
from holdfast.algorithms.off_policy import OffPolicy
from holdfast.algorithms.r2d2 import R2D2
from holdfast.algorithms.sac import SAC
from holdfast.distributed.ranks import ALONE
from holdfast.engines.choose import Engines
from holdfast.rollout.segment import Segment

OBS, BOX, CHOICES = spaces.Box(-1, 1, (3,)), spaces.Box(-2, 6, (2,)), spaces.Discrete(3, start=2)
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_unique2", "item"}


class Recorded(TorchDispatchMode):
    """The operations of a gradient step and all that is not a tensor in them. Values cannot be read under a mode of dispatch, as on a
    GPU (`checks.values_are_readable`)."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in WAITS, f"{func} waits for the device"
        if name == "index":
            assert all(i is None or i.dtype != torch.bool for i in args[1]), "indexing by a mask waits"
        if not name.startswith("_record_function"):
            self.operations.append(f"{func}{shown(list(args))}{shown(kwargs or {})}")
        return func(*args, **(kwargs or {}))


def shown(x: Any) -> Any:
    if isinstance(x, Tensor):
        return tuple(x.shape)
    if isinstance(x, dict):
        return {name: shown(part) for name, part in x.items() if name != "generator"}
    return [shown(part) for part in x] if isinstance(x, (list, tuple)) else repr(x)


def made(kind: type[OffPolicy], make: Any, space: Any, **settings: Any) -> OffPolicy:
    torch.manual_seed(1)
    config = make(
        hidden_size=8, head_sizes=(8,), num_envs=2, num_steps=8, batch_size=4, train_length=8, burn_in=2, buffer_size=400, device="cpu",
        threads=1, **settings,
    )  # fmt: skip
    context = RunContext(ALONE, torch.device("cpu"), 1, Engines(config, torch.device("cpu")), 2, space)
    return kind(kind.make_policy(config, OBS, space), config, context)


def played(algorithm: OffPolicy, seed: int) -> Segment:
    random, T, B = torch.Generator().manual_seed(seed), 8, 2
    ends = torch.rand(T, B, generator=random) < 0.1
    resets = torch.cat([torch.ones(1, B, dtype=torch.bool), ends[:-1]])
    actions = torch.randint(3, (T, B), generator=random) + 2
    if isinstance(algorithm.run.action_space, spaces.Box):
        actions = torch.rand(T, B, 2, generator=random) * 8 - 2
    return Segment(
        obs=torch.randn(T, B, 3, generator=random), actions=actions, resets=resets, rewards=torch.randn(T, B, generator=random),
        terminated=ends, truncated=ends & False, valid=ends | True, start_state=algorithm.policy.initial_state(B),
    )  # fmt: skip


CASES = {
    "sac": (SAC, hf.SACConfig, BOX, {}),
    "sac, a choice of critics": (SAC, hf.SACConfig, CHOICES, dict(critics=3, core="lstm", critic_core="shared")),
    "r2d2": (R2D2, hf.R2D2Config, CHOICES, dict(target_every=3, normalize_reward=True)),
    "r2d2, from anywhere": (
        R2D2,
        hf.R2D2Config,
        CHOICES,
        dict(prioritized=False, rescale=False, core="lstm", target_every=3),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_every_gradient_step_is_the_same_operations_with_the_same_constants(case: str):
    kind, make, space, settings = CASES[case]
    algorithm = made(kind, make, space, **settings)
    found = []
    for number in range(8):
        segment = played(algorithm, number)
        if algorithm.reward_scale is not None:
            algorithm.reward_scale.update(segment.rewards, segment.terminated, segment.valid)
        algorithm.buffer.add(segment)
        if number < 3:  # before there is enough to sample, and while the optimizers make their state
            if number == 2:
                gradient_step(algorithm)
            continue
        with Recorded() as recorded:
            gradient_step(algorithm)
        found.append(recorded.operations)
    assert len(found[0]) > 200
    for other in found[1:]:
        assert [pair for pair in zip(found[0], other) if pair[0] != pair[1]] == [] and len(other) == len(found[0])


def gradient_step(algorithm: OffPolicy) -> None:
    config = algorithm.config
    algorithm.learn(algorithm.buffer.sample(config.batch_size, config.train_length, config.burn_in))
    algorithm.gradient_steps += 1


def test_an_update_learns_with_the_reward_scale_of_its_rollout():
    """Rewards that are four times as large and a quarter of the scale: the same targets."""
    kind, make, space, settings = CASES["r2d2"]
    found = []
    for times in (1.0, 4.0):
        algorithm = made(kind, make, space, **settings, warmup_steps=10_000)
        assert algorithm.reward_scale is not None
        segment = played(algorithm, 1)
        segment.rewards = segment.rewards * times
        algorithm.reward_scale.update(segment.rewards, segment.terminated, segment.valid)
        algorithm.start_update(segment, Progress(0, 1000, 0, 1, 0.0))()
        assert isinstance(algorithm, R2D2) and float(algorithm.reward_factor) != 1.0
        found.append(algorithm.errors(segment)[0])
    assert torch.allclose(*found, atol=1e-5)
