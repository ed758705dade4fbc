"""Mazes are made by the law of POPGym's, which come from mazelib."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch

from holdfast.envs.popgym.labyrinth import grid_size, hunt_and_kill, pool


def neighbors(room, rooms):
    row, column = room
    places = [(row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)]
    return [(r, c) for r, c in places if 0 <= r < rooms and 0 <= c < rooms]


@cache
def maze_laws(rooms, entered, passages, here):
    """How likely each maze (a set of passages) is if a walk goes on from `here`. Picks never run out: with 9 rooms and 49
    picks, that is an error below 1e-5."""
    if len(entered) == rooms**2:
        return {passages: 1.0}

    def ahead(room):
        return [there for there in neighbors(room, rooms) if there not in entered]

    nexts = [here] if ahead(here) else [room for room in sorted(entered) if ahead(room)]
    law = {}
    for room in nexts:
        for there in ahead(room):
            chance = 1 / len(nexts) / len(ahead(room))
            rest = maze_laws(rooms, entered | {there}, passages | {frozenset((room, there))}, there)
            for maze, probability in rest.items():
                law[maze] = law.get(maze, 0.0) + chance * probability
    return law


def passages_of(walls, rooms):
    """[B, 2 n (n - 1)] bool: carved between rooms next to each other in a row, and then in a column."""
    open_cells = ~walls.view(-1, grid_size(rooms), grid_size(rooms))
    return torch.cat((open_cells[:, 1::2, 2:-1:2].flatten(1), open_cells[:, 2:-1:2, 1::2].flatten(1)), 1)


def assert_no_difference(statistic, freedom):
    """Chi-square, with a false alarm rate of one in a million."""
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert z < 4.75, f"chi-square {statistic:.1f} for {freedom} degrees of freedom"


@pytest.mark.parametrize("seed", [1, 2])
def test_a_maze_is_as_likely_as_hunt_and_kill_makes_it(seed):
    rooms, samples = 3, 60_000
    law = {}
    for start in ((r, c) for r in range(rooms) for c in range(rooms)):
        for maze, probability in maze_laws(rooms, frozenset({start}), frozenset(), start).items():
            law[maze] = law.get(maze, 0.0) + probability / rooms**2
    assert len(law) == 174  # of the 192 spanning trees of the grid; a walk never stops where others branch

    across = [frozenset(((r, c), (r, c + 1))) for r in range(3) for c in range(2)]
    down = [frozenset(((r, c), (r + 1, c))) for r in range(2) for c in range(3)]
    bits = {passage: 1 << number for number, passage in enumerate(across + down)}
    codes = {sum(bits[passage] for passage in maze): probability for maze, probability in law.items()}
    walls = hunt_and_kill(rooms, samples, torch.Generator().manual_seed(seed))
    counts = torch.bincount((passages_of(walls, rooms) << torch.arange(12)).sum(1), minlength=1 << 12)
    assert counts.nonzero().flatten().tolist() == sorted(codes)  # 8 passages each, and no circles
    likely = [code for code, probability in codes.items() if probability * samples > 40]  # the others together
    expected = torch.tensor([codes[code] for code in likely], dtype=torch.float64) * samples
    counts, expected = (torch.cat((c, samples - c.sum(0, keepdim=True))) for c in (counts[likely], expected))
    assert expected.min() > 30  # for the normal approximation
    assert_no_difference(((counts - expected) ** 2 / expected).sum().item(), len(likely))


@pytest.mark.parametrize(("rooms", "samples"), [(5, 2000), (9, 500)])
def test_larger_mazes_have_as_many_dead_ends_as_mazelibs(rooms, samples):
    mazelib = pytest.importorskip("mazelib.generate.HuntAndKill")
    import random

    import numpy as np

    random.seed(rooms)
    np.random.seed(rooms)
    theirs = np.stack([mazelib.HuntAndKill(rooms, rooms).generate().ravel() for _ in range(samples)]) != 0
    ours = hunt_and_kill(rooms, 8 * samples, torch.Generator().manual_seed(rooms))

    def dead_ends(walls):
        free = (~walls).long().view(-1, grid_size(rooms), grid_size(rooms))
        ways = free[:, :-1:2, 1::2] + free[:, 2::2, 1::2] + free[:, 1::2, :-1:2] + free[:, 1::2, 2::2]
        return (ways == 1).sum((1, 2))

    low, high = (2, 6) if rooms == 5 else (8, 12)  # these and all that are beyond
    counts = torch.stack(
        [torch.bincount(dead_ends(w).clamp(low, high) - low) for w in (torch.as_tensor(theirs), ours)]
    ).double()
    expected = counts.sum(0) * counts.sum(1, keepdim=True) / counts.sum()
    assert expected.min() > 20
    assert_no_difference(((counts - expected) ** 2 / expected).sum().item(), high - low)


def test_only_rooms_and_passages_between_them_are_carved():
    rooms = 5
    walls = hunt_and_kill(rooms, 500, torch.Generator().manual_seed(3)).view(-1, 11, 11)
    assert walls[:, ::2, ::2].all()  # corners
    for edge in (walls[:, 0], walls[:, -1], walls[:, :, 0], walls[:, :, -1]):
        assert edge.all()
    entered = (~walls[:, 1::2, 1::2]).flatten(1).sum(1)
    assert torch.equal(passages_of(walls.flatten(1), rooms).sum(1), entered - 1)


def test_a_pool_is_always_the_same():
    first = pool(4, 20).clone()
    pool.cache_clear()
    assert torch.equal(pool(4, 20), first) and not torch.equal(first[0], first[1])
