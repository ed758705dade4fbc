"""`Starts`: where the sequences of a buffer may begin, the states there, and their priorities. It draws nothing."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from holdfast.state import State, leaves, tree_map

FIRST_SLOTS = 64
_FINEST_PRIORITY = 2.0**-32  # relative to the largest one


class Starts:
    """Where sequences may begin: the row of each stream, and the state before it. A ring [N, B] that grows while its oldest entry
    may still be used. Start number s is in slot s % N; all streams have their s-th start at the same step."""

    def __init__(self, num_envs: int, device: torch.device) -> None:
        self.num_envs, self.device = num_envs, device
        self.count = 0
        self.steps: deque[int] = deque()  # of the starts that are held
        self.rows = torch.full((FIRST_SLOTS, num_envs), -1, device=device)
        self.numbers = torch.full((FIRST_SLOTS,), -1, device=device)  # of the starts, for code that a graph captures
        self.priorities = torch.ones(FIRST_SLOTS, num_envs, device=device)
        self.largest = torch.ones((), device=device)  # priority so far
        self.states: State = {}

    @property
    def last_step(self) -> int | None:
        return self.steps[-1] if self.steps else None

    def make(self, like: State) -> None:
        """Storage for states like these [B, ...]."""
        size = len(self.rows)
        self.states = tree_map(lambda x: torch.zeros(size, *x.shape, dtype=x.dtype, device=self.device), like)

    def state_bytes(self) -> int:
        """Of one environment."""
        return sum(x[0, 0].numel() * x.element_size() for x in leaves(self.states))

    def append(self, step: int, rows: Tensor, state: State, oldest: int) -> None:
        """A start of every stream [B]. oldest: starts of earlier steps are surely gone."""
        if len(self.steps) == len(self.rows):
            if self.steps[0] >= oldest:
                self._grow()
            else:
                self.steps.popleft()
        slot = self.count % len(self.rows)
        self.rows[slot] = rows
        self.numbers[slot] = self.count
        self.priorities[slot] = self.largest
        tree_map(lambda store, x: store[slot].copy_(x), self.states, state)
        self.steps.append(step)
        self.count += 1

    def _grow(self) -> None:
        size = len(self.rows)
        numbers = torch.arange(self.count - size, self.count, device=self.device)

        def grown(old: Tensor, fill: float = 0) -> Tensor:
            new = torch.full((2 * size, *old.shape[1:]), fill, dtype=old.dtype, device=self.device)
            return new.index_copy_(0, numbers % (2 * size), old.index_select(0, numbers % size))

        self.rows, self.priorities = grown(self.rows, -1), grown(self.priorities, 1)
        self.numbers = grown(self.numbers, -1)
        self.states = tree_map(grown, self.states)

    def number_slots(self) -> None:
        """Make `numbers` from `count`."""
        newest, slots = self.count - 1, torch.arange(len(self.rows), device=self.device)
        self.numbers = (newest - (newest - slots) % len(self.rows)).clamp(min=-1)

    def prioritize(self, index: Tensor, priorities: Tensor, oldest: Tensor) -> None:
        """Set the priorities of these starts. oldest [B]: rows before are gone, and so are their starts."""
        number, stream = index // self.num_envs, index % self.num_envs
        slot = number % len(self.rows)
        flat = slot * self.num_envs + stream
        old, rows = self.priorities.flatten(), self.rows.flatten().index_select(0, flat)
        held = (self.numbers.index_select(0, slot) == number) & (number >= 0) & (rows >= oldest.index_select(0, stream))
        held &= priorities.isfinite() & (priorities >= 0)
        # Those that are gone write to a place that nobody reads.
        wide = torch.cat([old, old[:1]]).index_copy_(0, torch.where(held, flat, len(old)), priorities)
        self.priorities.copy_(wide[:-1].view_as(self.priorities))
        self.largest.copy_(torch.maximum(self.largest, torch.where(held, priorities, 0.0).max()))

    def weights(self) -> Tensor:
        """Priorities as whole numbers of at least 1."""
        return (self.priorities.double() / (self.largest * _FINEST_PRIORITY)).long().clamp(min=1)
