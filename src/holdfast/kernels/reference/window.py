"""Attention over a window, as specified: each row keeps the keys and values of its episode as a list.

The state is a `Ring` (`operands`). A step attends to itself and to at most `window - 1` steps before it in its episode; a
distance between two steps adds a bias per head to their score.
"""

from __future__ import annotations

import torch
from torch import Tensor

from holdfast.kernels.operands import Ring


def sequence(q: Tensor, k: Tensor, v: Tensor, ring: Ring, resets: Tensor | None, bias: Tensor) -> tuple[Tensor, Ring]:
    """q, k, v [T, B, h, d]; resets [T, B]; bias [h, window] -> y [T, B, h, d], the ring after the last step."""
    T, B, heads, size = q.shape
    ys, rows = [], []
    for b in range(B):
        past, age = _steps_of(ring, b), int(ring.age[b])
        for t in range(T):
            if resets is not None and bool(resets[t, b]):
                past, age = [], 0
            seen = [*past[-ring.slots :], (k[t, b], v[t, b])]
            distances = torch.arange(len(seen) - 1, -1, -1)
            keys, values = (torch.stack(parts, 1) for parts in zip(*seen))  # [h, n, d]
            scores = (keys @ q[t, b].unsqueeze(-1)).squeeze(-1) * size**-0.5 + bias[:, distances]  # [h, n]
            ys.append((scores.softmax(-1).unsqueeze(1) @ values).squeeze(1))
            past, age = seen, age + 1
        rows.append(_row_of(past, age, ring, heads, size))
    y = torch.stack(ys).view(B, T, heads, size).transpose(0, 1)
    ring_keys, ring_values, ages = zip(*rows)
    return y, Ring(torch.stack(ring_keys), torch.stack(ring_values), torch.tensor(ages, dtype=ring.age.dtype))


def output(q: Tensor, k: Tensor, v: Tensor, ring: Ring, resets: Tensor | None, bias: Tensor) -> Tensor:
    """y of `sequence` alone."""
    return sequence(q, k, v, ring, resets, bias)[0]


def _steps_of(ring: Ring, b: int) -> list[tuple[Tensor, Tensor]]:
    """(key, value) of the steps in a row's ring, oldest first."""
    age, slots = int(ring.age[b]), ring.slots
    order = [step % slots for step in range(max(0, age - slots), age)]
    return [(ring.keys[b, :, slot], ring.values[b, :, slot]) for slot in order]


def _row_of(
    past: list[tuple[Tensor, Tensor]], age: int, ring: Ring, heads: int, size: int
) -> tuple[Tensor, Tensor, int]:
    """The ring of a row whose episode has `age` steps, of which `past` are the last."""
    slots: list[tuple[Tensor, Tensor]] = [(ring.keys.new_zeros(heads, size),) * 2] * ring.slots
    for back, step in enumerate(reversed(past[-ring.slots :])):
        slots[(age - 1 - back) % ring.slots] = step
    keys, values = (torch.stack(parts, 1) for parts in zip(*slots))
    return keys, values, age if age < 2 * ring.slots else ring.slots + age % ring.slots
