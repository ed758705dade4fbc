"""Streams of rows as plain Python lists, and the segments that a rollout would have given of them: what a buffer is compared with.

Every row says which environment it is of and which number it has in its stream, in observations, actions and states alike. Nothing
here is shared with the buffer: flags, zeros and validity are worked out one row after another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import torch

import holdfast as hf
from holdfast.state import from_leaves, leaves, tree_map

ENDS = ("terminated", "truncated", "both")
Tree = Any  # of tensors of one row


@dataclass
class Row:
    """One step of an environment, or the final observation of a truncated episode."""

    obs: Tree
    action: torch.Tensor
    reward: float
    reset: bool = False
    terminated: bool = False
    truncated: bool = False
    valid: bool = True
    failed: bool = False
    known: bool = True  # its observation is finite
    mask: Any = None
    final_obs: Tree = None  # of a truncated step, if it is no row that was played

    @property
    def ended(self) -> bool:
        return self.terminated or self.truncated


@dataclass
class Stream:
    """An environment that draws its own episodes. `rows` is what a buffer must hold; `played` what a rollout records."""

    number: int
    draw: Random
    obs: str = "vector"
    actions: str = "discrete"
    masked: bool = False
    adds: bool = True  # final rows are added; otherwise the environment plays them (NEXT_STEP)
    odd: float = 0.0  # chance of a number that is not finite
    mean_length: float = 4.0
    rows: list[Row] = field(default_factory=list)
    played: list[Row] = field(default_factory=list)
    at: list[int] = field(default_factory=list)  # of each played row: its number among `rows`
    spoiled: bool = False
    interrupted: bool = False  # a new episode begins, though none ended

    def observation(self, number: int) -> Tree:
        b, x = self.number, self.draw.gauss(0, 1)
        if self.odd and self.draw.random() < self.odd:
            x = self.draw.choice((math.nan, math.inf, -math.inf))
        if self.obs == "image":
            return torch.tensor([b, number // 256, number % 256, 255], dtype=torch.uint8)
        if self.obs == "vector":
            return torch.tensor([b, number, x])
        image = torch.full((2, 2, 1), number % 256, dtype=torch.uint8)
        flags = (torch.tensor(x > 0), torch.tensor([x], dtype=torch.float64))
        return {"id": torch.tensor([b, number]), "image": image, "parts": flags}

    def action(self, number: int) -> torch.Tensor:
        if self.actions == "box":
            odd = self.odd and self.draw.random() < self.odd / 3
            return torch.tensor([number + 0.25, math.nan if odd else -self.number])
        if self.actions == "heads":
            return torch.tensor([number % 3, self.number])
        return torch.tensor(number % 5)

    def step(self) -> None:
        """Play one step."""
        before = self.played[-1] if self.played else None
        number = len(self.rows)
        dummy = before is not None and before.ended and not self.adds
        dummy = dummy and not self.interrupted
        first = (
            before is None
            or self.interrupted
            or (before.ended and self.adds)
            or (not before.valid and not before.failed)
        )
        self.interrupted = False
        mask = torch.tensor([self.draw.random() < 0.7 for _ in range(4)]) if self.masked else None
        # NEXT_STEP plays the final observation of an episode as a row whose action is ignored.
        row = Row(self.observation(number), self.action(number), 0.0 if dummy else self._reward(), first, mask=mask)
        if dummy:
            row.valid = False
        elif self.draw.random() < 1 / self.mean_length:
            end = self.draw.choice(ENDS)
            row.terminated, row.truncated = end != "truncated", end != "terminated"
            if row.truncated and self.adds:
                row.final_obs = self.observation(number + 1)
        self.take(row)

    def fail(self) -> None:
        """The environment is rebuilt in this step: it counts for nothing, and a new episode begins."""
        number = len(self.rows)
        before = self.played[-1] if self.played else None
        obs = self.observation(number)
        row = Row(obs, self.action(number), 0.0, before is None or before.ended, truncated=True, failed=True)
        row.mask = torch.ones(4, dtype=torch.bool) if self.masked else None
        row.final_obs = self.observation(number + 1)
        self.take(row)

    def take(self, row: Row) -> None:
        """Append what was played, and the rows that a buffer makes of it."""
        self.played.append(row)
        self.at.append(len(self.rows))
        obs, action = _finite(row.obs), _finite(row.action)
        reward = row.reward if math.isfinite(row.reward) else 0.0
        known = _is_finite(row.obs)
        self.spoiled = (self.spoiled and not row.reset) or not (
            known and _is_finite(row.action) and math.isfinite(row.reward)
        )
        valid = row.valid and not row.failed and not self.spoiled
        self.rows.append(replace(row, obs=obs, action=action, reward=reward, valid=valid, known=known))
        if row.truncated and self.adds:
            mask = None if row.mask is None else torch.ones_like(row.mask)
            final = Row(_finite(row.final_obs), action, 0.0, valid=False, known=_is_finite(row.final_obs), mask=mask)
            self.rows.append(final)

    def _reward(self) -> float:
        odd = self.odd and self.draw.random() < self.odd / 3
        return math.nan if odd else float(torch.tensor(self.draw.gauss(0, 1)))

    def learnable(self, number: int) -> bool:
        """Whether row `number` and its successor can be learned from."""
        row, after = self.rows[number], self.rows[number + 1]
        return row.valid and (row.terminated or (not after.reset and after.known))


def _is_finite(tree: Tree) -> bool:
    return all(bool(x.isfinite().all()) for x in leaves(tree) if x.is_floating_point())


def _finite(tree: Tree) -> Tree:
    return tree_map(lambda x: x.nan_to_num(0.0, 0.0, 0.0) if x.is_floating_point() else x, tree)


def streams(count: int, seed: int, **settings: Any) -> list[Stream]:
    return [Stream(b, Random(f"{seed}/{b}"), **settings) for b in range(count)]


def who(obs: Tree) -> tuple[int, int]:
    """The environment and the row that an observation is of."""
    if isinstance(obs, dict):
        return int(obs["id"][0]), int(obs["id"][1])
    if obs.dtype == torch.uint8:
        return int(obs[0]), 256 * int(obs[1]) + int(obs[2])
    return int(obs[0]), int(obs[1])


def state_before(stream: int, row: int) -> dict[str, torch.Tensor]:
    """The state before a row: it says of which."""
    return {"h": torch.tensor([float(stream), float(row)]), "age": torch.tensor([row], dtype=torch.int32)}


def segment(envs: list[Stream], steps: int, chunks: int = 1, state: Any = state_before) -> hf.Segment:
    """What a rollout records of the next steps of these environments; it knows nothing of final rows."""
    first = len(envs[0].played)
    starts = []
    for t in range(steps):
        if t % (steps // chunks) == 0:
            starts.append(stacked([state(env.number, len(env.rows)) for env in envs]))
        for env in envs:
            env.step()
    return recorded(envs, first, starts)


def recorded(envs: list[Stream], first: int, starts: list[Any]) -> hf.Segment:
    """The segment of the steps from `first` on."""
    steps = range(first, len(envs[0].played))

    def part(read: Any) -> Any:
        return stacked([stacked([read(env.played[t]) for env in envs]) for t in steps])

    def numbers(name: str) -> torch.Tensor:
        return torch.tensor([[getattr(env.played[t], name) for env in envs] for t in steps])

    ends = [row for env in envs for row in env.played[first:] if row.final_obs is not None]
    nothing = tree_map(torch.zeros_like, ends[0].final_obs) if ends else None
    masked = envs[0].masked
    return hf.Segment(
        obs=part(lambda row: row.obs),
        actions=part(lambda row: row.action),
        resets=numbers("reset"),
        rewards=numbers("reward").float(),
        terminated=numbers("terminated"),
        truncated=numbers("truncated"),
        valid=numbers("valid"),
        failed=numbers("failed") if bool(numbers("failed").any()) else None,
        action_mask=part(lambda row: row.mask) if masked else None,
        final_obs=part(lambda row: nothing if row.final_obs is None else row.final_obs) if ends else None,
        start_state=starts[0],
        chunk_states=starts,
    )


def stacked(trees: list[Tree]) -> Tree:
    columns = zip(*(leaves(tree) for tree in trees))
    return from_leaves([torch.stack(column) for column in columns], trees[0])


def same(a: Tree, b: Tree) -> bool:
    """Bitwise, with dtypes and structure."""
    pairs = list(zip(leaves(a), leaves(b), strict=True))
    kinds = all(x.dtype == y.dtype and x.shape == y.shape for x, y in pairs)
    return kinds and all(torch.equal(x, y) for x, y in pairs)


def check_sample(
    batch: hf.Segment, envs: list[Stream], length: int, burn_in: int = 0, state: Any = state_before
) -> set:
    """Every row and every flag of sampled sequences is the one that was played. Returns which starts were drawn."""
    need = burn_in + length + 1
    assert batch.resets.shape[0] == need
    drawn = set()
    for s in range(batch.num_envs):
        b, first = who(tree_map(lambda x, s=s: x[0, s], batch.obs))
        env = envs[b]
        drawn.add((b, first))
        assert first + need <= len(env.rows), "it runs over the write position"
        for t in range(need):
            row, where = env.rows[first + t], f"environment {b}, row {first} + {t}"
            assert same(tree_map(lambda x, t=t, s=s: x[t, s], batch.obs), row.obs), where
            assert same(batch.actions[t, s], row.action), where
            assert float(batch.rewards[t, s]) == row.reward, where
            for name in ("reset", "terminated", "truncated"):
                flags = batch.resets if name == "reset" else getattr(batch, name)
                assert bool(flags[t, s]) == getattr(row, name), f"{where}: {name}"
            wanted = env.learnable(first + t) if t + 1 < need else row.valid
            assert bool(batch.valid[t, s]) == wanted, f"{where}: valid should be {wanted}"
            if env.masked:
                assert torch.equal(batch.action_mask[t, s], row.mask), where
        if state is not None:
            assert same(tree_map(lambda x, s=s: x[s], batch.start_state), state(b, first)), f"start of {b}, {first}"
    return drawn
