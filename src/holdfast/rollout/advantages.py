"""Generalized advantage estimation (Schulman et al., 2016), of arrays and of segments; which observations begin an episode."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from holdfast.checks import values_are_readable
from holdfast.kernels.dispatch import choose_linear
from holdfast.kernels.operands import Resets
from holdfast.rollout.segment import Segment
from holdfast.spans import span


def gae(
    rewards: Tensor, values: Tensor, next_values: Tensor, dones: Tensor, gamma: float = 0.99, lam: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, all [T, B].

    next_values[t]: the value of what follows step t *inside its episode*: 0 where it terminated, V(final observation)
    where it was truncated, V(next observation) elsewhere (`next_values` builds it). dones[t]: the episode ended at t,
    either way.

    >>> adv, ret = gae(torch.tensor([[1.0], [1.0]]), torch.zeros(2, 1), torch.tensor([[0.0], [5.0]]),
    ...                torch.tensor([[False], [True]]), gamma=0.5, lam=1.0)
    >>> adv.squeeze(1).tolist()            # 1 + 0.5 * 5 = 3.5, then 1 + 0.5 * 3.5
    [2.75, 3.5]
    """
    parts = {"values": values, "next_values": next_values, "dones": dones}
    _require_shape("gae", rewards, "rewards [T, B]", (2,), parts)
    _require_flags("gae", dones=dones)
    deltas = rewards + gamma * next_values - values
    if deltas.numel() == 0:
        return deltas, deltas + values
    if values_are_readable(deltas) and not bool(deltas.isfinite().all()):
        advantage = _within_episodes(deltas, dones, gamma * lam)
        return advantage, advantage + values
    carry = (gamma * lam) * (~dones).to(deltas.dtype)
    # A linear recurrence from the last step to the first, with one row whose channels are the environments.
    backwards = [part.flip(0).unsqueeze(1) for part in (carry, deltas)]  # [T, 1, B]
    after_the_last = torch.zeros_like(deltas[:1])
    advantages, _ = choose_linear("auto", deltas).sequence(*backwards, after_the_last, Resets())
    advantage = advantages.squeeze(1).flip(0)
    return advantage, advantage + values


def segment_advantages(
    segment: Segment, gamma: float, gae_lambda: float, reward_scale: Any = 1.0
) -> tuple[Tensor, Tensor]:
    """Advantages and returns [T, B] of a segment that recorded values, bootstrapped with V(final observation) where an episode was
    truncated. Rewards are multiplied by `reward_scale` first."""
    with span("advantages (GAE)"):
        dones = segment.terminated | segment.truncated
        rewards = segment.rewards * reward_scale
        advantage, returns = gae(rewards, segment.value, next_values(segment), dones, gamma, gae_lambda)
        if not segment.all_valid:
            advantage = advantage.masked_fill(~segment.valid, 0.0)
            returns = torch.where(segment.valid, returns, segment.value)
        return advantage, returns


def next_values(segment: Segment) -> Tensor:
    """The value of what follows each step inside its episode [T, B]: 0 where it terminated, V(final observation) where it was
    truncated, V(next observation) elsewhere."""
    values = torch.cat([segment.value[1:], segment.last_value.unsqueeze(0)])
    if segment.final_value is not None:
        values = torch.where(segment.truncated, segment.final_value, values)
    return values.masked_fill(segment.terminated, 0.0)


def _within_episodes(deltas: Tensor, dones: Tensor, decay: float) -> Tensor:
    """The same sums, selected and not multiplied at the ends of episodes: what is not finite stays in its episode."""
    advantage, after = [], torch.zeros_like(deltas[0])
    for delta, done in zip(deltas.flip(0), dones.flip(0)):
        after = torch.where(done, delta, delta + decay * after)
        advantage.append(after)
    return torch.stack(advantage).flip(0)


def resets_from(
    terminated: Tensor, truncated: Tensor, autoreset_mode: Any, previous_done: Tensor | None = None
) -> Tensor:
    """Which observations returned by `step` are the first of an episode.

    Flags of one step [B] or of several [T, B]; entry t is about the observation that the same `step` call returned.
    SAME_STEP (and DISABLED, once the caller has reset the finished ones): where that step ended an episode. NEXT_STEP:
    where the step *before* did; `previous_done` [B] says so for the first entry (None: nowhere).
    """
    _require_shape("resets_from", terminated, "terminated [B] or [T, B]", (1, 2), {"truncated": truncated})
    _require_flags("resets_from", terminated=terminated, truncated=truncated)
    if previous_done is not None:
        _require_flags("resets_from", previous_done=previous_done)
        if previous_done.shape != terminated.shape[-1:]:
            expected = tuple(terminated.shape[-1:])
            raise ValueError(
                f"resets_from got previous_done of shape {tuple(previous_done.shape)}, expected [B] = {expected}"
            )
    done = terminated | truncated
    mode = getattr(autoreset_mode, "name", str(autoreset_mode)).upper().replace("-", "_")
    if mode in ("SAME_STEP", "DISABLED", "SAMESTEP"):
        return done
    if mode not in ("NEXT_STEP", "NEXTSTEP"):
        raise ValueError(f"unknown autoreset mode {autoreset_mode!r}; a gymnasium.vector.AutoresetMode")
    if done.dim() == 1:
        return torch.zeros_like(done) if previous_done is None else previous_done
    first = torch.zeros_like(done[:1]) if previous_done is None else previous_done.unsqueeze(0)
    return torch.cat([first, done[:-1]])


def _require_shape(function: str, first: Tensor, what: str, ranks: tuple[int, ...], others: dict[str, Tensor]) -> None:
    """Nothing is broadcast: the value after the last step [B] in place of all next values would give numbers, too."""
    if first.ndim not in ranks:
        raise ValueError(f"{function} got {what} of shape {tuple(first.shape)}")
    for name, other in others.items():
        if other.shape != first.shape:
            raise ValueError(
                f"{function} got {name} of shape {tuple(other.shape)}, expected {tuple(first.shape)} as {what}"
            )


def _require_flags(function: str, **flags: Tensor) -> None:
    for name, flag in flags.items():
        if str(flag.dtype) not in ("torch.bool", "bool"):  # arrays are taken, too
            raise TypeError(f"{function} got {name} of dtype {flag.dtype}, expected flags of dtype bool")
