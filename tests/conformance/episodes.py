"""Rollouts with known episode boundaries, and what the suite compares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from torch import Tensor

from conformance.driver import Driver, Evaluated

# Examples are small already; shrinking them would take longer than the whole suite.
quick = settings(max_examples=8, phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck))


def for_resets(*modes: str):
    """Run a test only for policies with these reset modes."""

    def mark(test):
        test.reset_modes = modes
        return test

    return mark


@st.composite
def boundaries(draw, max_steps: int = 6, max_envs: int = 3, min_steps: int = 1) -> tuple[Tensor, Tensor]:
    """(dones, truncateds), each [T, B]: any pattern, both at once included."""
    T, B = draw(st.integers(min_steps, max_steps)), draw(st.integers(1, max_envs))
    kinds = draw(st.lists(st.sampled_from([0, 0, 0, 1, 2, 3]), min_size=T * B, max_size=T * B))
    flags = torch.tensor(kinds).view(T, B)
    return (flags & 1).bool(), (flags & 2).bool()


@dataclass
class Rollout:
    """A segment [T, B, ...] with the outputs of the rollout and the state it started from."""

    obs: Tensor
    dones: Tensor | None
    truncateds: Tensor | None
    actions: Tensor
    log_prob: Tensor
    value: Tensor
    signature: Tensor
    start: Any

    def replay(self, driver: Driver, **changes: Any) -> Evaluated:
        """The segment in training mode."""
        parts = {"state": self.start, "dones": self.dones, "truncateds": self.truncateds, **changes}
        return driver.evaluate(self.obs, self.actions, **parts)


def roll(
    driver: Driver,
    obs: Tensor,
    dones: Tensor | None = None,
    truncateds: Tensor | None = None,
    env_ids: Any = None,
) -> Rollout:
    """Play observations [T, B, ...] through the rollout leg."""
    start = driver.start_state(obs.shape[1], env_ids)
    steps = [
        driver.act(obs[t], None if dones is None else dones[t], None if truncateds is None else truncateds[t], env_ids)
        for t in range(obs.shape[0])
    ]
    columns = [torch.stack([getattr(s, part) for s in steps]) for part in ("action", "log_prob", "value", "signature")]
    return Rollout(obs, dones, truncateds, *columns, start)


def warm_up(driver: Driver, batch: int, steps: int = 3, env_ids: Any = None) -> None:
    """Give the environments a past, so that no memory is zero."""
    roll(driver, driver.observations(steps, batch, seed=99), env_ids=env_ids)


def flags(T: int, B: int, *places: tuple[int, int]) -> Tensor:
    """[T, B] False, True at the given (t, b)."""
    out = torch.zeros(T, B, dtype=torch.bool)
    for t, b in places:
        out[t, b] = True
    return out


def assert_close(got: Tensor, expected: Tensor, atol: float = 1e-5) -> None:
    """Equal within the tolerance of the replay law; both finite."""
    assert torch.isfinite(got).all() and torch.isfinite(expected).all()
    worst = (got - expected).abs().max().item() if got.numel() else 0.0
    assert got.shape == expected.shape and worst <= atol, f"differs by {worst:.3g}"


def assert_differs(got: Tensor, expected: Tensor, by: float = 1e-3) -> None:
    """Clearly not the same."""
    worst = (got - expected).abs().max().item()
    assert worst > by, f"differs by {worst:.3g} only"


def assert_replays(driver: Driver, rollout: Rollout) -> None:
    """Law 1: the training leg gives what the rollout gave."""
    ev = rollout.replay(driver)
    assert_close(ev.log_prob, rollout.log_prob)
    assert_close(ev.value, rollout.value)
