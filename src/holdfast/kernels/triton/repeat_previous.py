"""One step of all RepeatPrevious environments as one launch. `envs/repeat_previous.py` says what is computed; all but rewards are
whole numbers, and the results are the same bit for bit."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["batch", "scored"])
def step_kernel(
    deck, recent, actions, draws, full, reward, next_deck, next_recent, suits, rewards, terminated, truncated, final_obs,
    batch, scored, K: tl.constexpr, KINDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    env = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = env < batch
    mine, next_mine = deck + env * KINDS, next_deck + env * KINDS
    unseen = tl.load(mine + (KINDS - 1), mask=ok, other=1)
    gain = tl.load(reward)
    right = tl.load(actions + env, mask=ok, other=0) == tl.load(recent + env, mask=ok, other=0)
    tl.store(rewards + env, tl.where(unseen <= scored, tl.where(right, gain, -gain), 0.0), mask=ok)
    ended = unseen == 1
    tl.store(terminated + env, ended, mask=ok)
    tl.store(truncated + env, unseen < 0, mask=ok)  # never

    # as `cards.deal`: where an episode ended, from a full deck
    place = tl.load(draws + env, mask=ok, other=0) % tl.where(ended, tl.load(full + (KINDS - 1)), unseen)
    suit = tl.zeros([BLOCK], tl.int64)
    last = tl.full([BLOCK], KINDS, tl.int64)
    for kind in range(KINDS):
        left = tl.load(mine + kind, mask=ok, other=0)
        last -= left
        left = tl.where(ended, tl.load(full + kind), left)
        passed = (place >= left).to(tl.int64)
        suit += passed
        tl.store(next_mine + kind, left + passed - 1, mask=ok)
    tl.store(suits + env, suit, mask=ok)
    tl.store(final_obs + env, tl.where(ended, last, suit), mask=ok)
    for i in range(1, K):
        tl.store(next_recent + (i - 1) * batch + env, tl.load(recent + i * batch + env, mask=ok, other=0), mask=ok)
    tl.store(next_recent + (K - 1) * batch + env, suit, mask=ok)


class Step(NamedTuple):
    """New tensors; `Transition` explains them."""

    deck: Tensor
    recent: Tensor
    suits: Tensor
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor
    final_obs: Tensor


def step(
    deck: Tensor, recent: Tensor, actions: Tensor, draws: Tensor, full: Tensor, reward: Tensor, scored: int
) -> Step:
    """deck [B, kinds], recent [k, B], actions [B], draws [B, 1], full [kinds]: int64. scored: answers count from so many unseen
    cards on; reward: of a right one, a float32 tensor."""
    batch, kinds = deck.shape
    flags, numbers = (torch.empty(2, batch, dtype=dtype, device=deck.device) for dtype in (torch.bool, torch.int64))
    rewards = torch.empty(batch, dtype=torch.float32, device=deck.device)
    out = Step(torch.empty_like(deck), torch.empty_like(recent), numbers[0], rewards, flags[0], flags[1], numbers[1])
    given = (part.contiguous() for part in (deck, recent, actions, draws))
    block = 64
    step_kernel[(triton.cdiv(batch, block),)](
        *given, full, reward, *out, batch, scored, K=len(recent), KINDS=kinds, BLOCK=block, num_warps=2
    )
    return out
