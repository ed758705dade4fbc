"""How a minibatch of rollout steps is laid out as rows of a sequence batch.

    rollout [n_steps, n_envs], flat and environment-major: row = env * n_steps + t
    chunk    consecutive steps of one environment, with the state it started from
    piece    a chunk cut at its episode starts; only the first piece of a chunk needs that state

A piece that begins an episode does not depend on what came before it, so pieces are laid one after another into rows
as long as the longest of them:

    chunk 0:  aaaaaa|bbb|cc      ->   aaaaaa        2 rows of 6 steps instead of 1 row of 11:
    (| is an episode start)           bbbcc.        the recurrence takes 6 steps in sequence, not 11,
                                                    and the core resets where b becomes c
The result is the same, because neither values nor gradients cross a reset.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

# With this many rows the number of steps in sequence no longer limits the recurrence.
ENOUGH_ROWS = 32


class Piece(NamedTuple):
    start: int  # flat row of its first step
    length: int
    state: int | None  # the stored state it starts from; None when it begins with a reset


class Layout(NamedTuple):
    """step [rows, T]: the flat row of each step; valid [rows, T]; state [rows]: the stored state (any, if reset)."""

    step: np.ndarray
    valid: np.ndarray
    state: np.ndarray


def cut(rows: np.ndarray, n_steps: int, episode_starts: np.ndarray, at_episodes: bool) -> list[list[Piece]]:
    """The chunks of a minibatch: `rows` are flat rows in time order, where environments follow each other.

    episode_starts [n_envs * n_steps] bool. The state of a piece is the row of its first step.
    """
    resets = episode_starts[rows]
    begins = rows % n_steps == 0  # another environment
    begins[0] = True
    heads = np.flatnonzero(begins | resets if at_episodes else begins)
    lengths = np.diff(heads, append=len(rows))
    chunks: list[list[Piece]] = []
    for at, length in zip(heads.tolist(), lengths.tolist()):
        first = int(rows[at])
        piece = Piece(first, length, None if at_episodes and resets[at] else first)
        if begins[at]:
            chunks.append([piece])
        else:
            chunks[-1].append(piece)
    return chunks


def lay_out(chunks: list[list[Piece]]) -> Layout:
    """The steps of these chunks as rows of one length, padded at their end."""
    if len(chunks) >= ENOUGH_ROWS:
        rows = chunks
    else:
        rows = _first_fit([piece for chunk in chunks for piece in chunk])
    length = max(sum(piece.length for piece in row) for row in rows)
    step, valid = np.zeros((len(rows), length), dtype=np.int64), np.zeros((len(rows), length), dtype=bool)
    for r, row in enumerate(rows):
        at = 0
        for piece in row:
            step[r, at : at + piece.length] = np.arange(piece.start, piece.start + piece.length)
            at += piece.length
        valid[r, :at] = True
    return Layout(step, valid, np.array([row[0].state or 0 for row in rows]))


def _first_fit(pieces: list[Piece]) -> list[list[Piece]]:
    """Rows no longer than the longest piece; pieces that need a state come first in theirs, the rest by length."""
    length = max(piece.length for piece in pieces)
    rows: list[list[Piece]] = []
    room: list[int] = []
    for piece in sorted(pieces, key=lambda p: (p.state is None, -p.length)):
        fits = (r for r, left in enumerate(room) if left >= piece.length) if piece.state is None else iter(())
        row = next(fits, None)
        if row is None:
            rows.append([piece])
            room.append(length - piece.length)
        else:
            rows[row].append(piece)
            room[row] -= piece.length
    return rows
