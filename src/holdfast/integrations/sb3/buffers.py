"""Rollout buffers that hand out whole sequences with the state each started from.

    env 0  |-- head --|------- tail -------|      where chunks begin is drawn anew for every pass over the data; a head
    env 1  |-- head --|------- tail -------|      goes with the tail of another environment, chosen by lot

A chunk is at most `chunk` steps long. It can begin at every `grid`-th step, and states are stored for those alone. How a
minibatch of chunks is laid out is in `sequences.py`. Episodes end anywhere inside: the core resets there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from sb3_contrib.common.recurrent.buffers import RecurrentDictRolloutBuffer, RecurrentRolloutBuffer
from sb3_contrib.common.recurrent.type_aliases import (
    RecurrentDictRolloutBufferSamples,
    RecurrentRolloutBufferSamples,
    RNNStates,
)
from torch import Tensor

from holdfast.integrations import sequences
from holdfast.integrations.sb3.masks import MaskedStates, MaskSource, mask_size

# Of a chunk's steps, at how many a chunk can begin.
_STARTS = 4


class _Chunks:
    """What both buffers share. Mixed in before sb3-contrib's classes, whose storage of states it replaces.

    isolated: a reset lets nothing through (reset modes "zero" and "learned"), so episodes can be laid out side by side.
    """

    samples: Callable[..., Any]
    mask_source: MaskSource | None = None

    def __init__(self, buffer_size: int, *args: Any, chunk: int, isolated: bool, **kwargs: Any) -> None:
        self.chunk, self.isolated = min(chunk, buffer_size), isolated
        self.grid = self.chunk // _STARTS if self.chunk % _STARTS == 0 else self.chunk
        super().__init__(buffer_size, *args, **kwargs)  # type: ignore[call-arg]

    def _plain(self) -> Any:
        """The methods of Stable-Baselines3's buffer, without the per-step states of sb3-contrib's."""
        raise NotImplementedError

    def reset(self) -> None:
        self._plain().reset()
        self._starts: list[tuple[Tensor, ...]] = []
        self._ready: dict[str, Any] = {}
        self.action_masks: np.ndarray | None = None

    def add(self, *args: Any, lstm_states: RNNStates, **kwargs: Any) -> None:
        if self.pos % self.grid == 0:  # type: ignore[attr-defined]
            self._starts.append((*lstm_states.pi, *lstm_states.vf))
        if self.mask_source is not None:
            self._add_masks(self.mask_source.last)
        self._plain().add(*args, **kwargs)

    def _add_masks(self, masks: np.ndarray) -> None:
        if self.action_masks is None:
            shape = (self.buffer_size, self.n_envs, mask_size(self.action_space))  # type: ignore[attr-defined]
            self.action_masks = np.ones(shape, dtype=bool)
        self.action_masks[self.pos] = masks  # type: ignore[attr-defined]

    def get(self, batch_size: int | None = None) -> Iterator[Any]:
        """Minibatches of whole chunks, at most `batch_size` steps each (one chunk at least)."""
        if not self.full:  # type: ignore[attr-defined]
            raise ValueError("the rollout buffer is not full yet")
        if not self._ready:
            self._ready = self._prepare()
        limit = self.buffer_size * self.n_envs if batch_size is None else batch_size  # type: ignore[attr-defined]
        picked: list[list[sequences.Piece]] = []
        steps = 0
        for chunk in self._shuffled_chunks(shift=batch_size is not None):
            length = sum(piece.length for piece in chunk)
            if picked and steps + length > limit:
                yield self._minibatch(picked)
                picked, steps = [], 0
            picked.append(chunk)
            steps += length
        yield self._minibatch(picked)

    def _shuffled_chunks(self, shift: bool = True) -> list[list[sequences.Piece]]:
        """Chunks of a new cut in random order, heads and tails in pairs that together have the length of a chunk."""
        n_steps, n_envs = self.buffer_size, self.n_envs  # type: ignore[attr-defined]
        head = self.grid * np.random.randint(self.chunk // self.grid) if shift else 0
        bounds = [0, *range(head or self.chunk, n_steps, self.chunk), n_steps]
        flags = self.episode_starts != 0  # type: ignore[attr-defined]
        chunks = sequences.cut(flags, bounds, self.grid, self.isolated)
        per_env = len(bounds) - 1
        groups: list[list[int]] = []
        for k in range(per_env):
            mine = (np.random.permutation(n_envs) * per_env + k).tolist()
            if head and k and k == per_env - 1:
                groups[:n_envs] = [[a, b] for (a,), b in zip(groups[:n_envs], mine)]
            else:
                groups += [[chunk] for chunk in mine]
        return [chunks[c] for g in np.random.permutation(len(groups)) for c in groups[g]]

    def _flat(self, array: np.ndarray) -> Tensor:
        """[n_steps, n_envs, ...] -> [n_envs * n_steps, ...] on the device."""
        return torch.as_tensor(array).transpose(0, 1).flatten(0, 1).to(self.device)  # type: ignore[attr-defined]

    def _prepare(self) -> dict[str, Any]:
        obs = self.observations  # type: ignore[attr-defined]
        ready: dict[str, Any] = {
            "observations": {k: self._flat(v) for k, v in obs.items()} if isinstance(obs, dict) else self._flat(obs),
            "actions": self._flat(self.actions.astype(np.float32, copy=False)),  # type: ignore[attr-defined]
            "masks": None if self.action_masks is None else self._flat(self.action_masks),
        }
        # One gather brings all numbers of a step.
        numbers = ("values", "log_probs", "advantages", "returns", "episode_starts")
        ready["numbers"] = torch.stack([self._flat(getattr(self, name)) for name in numbers])
        # [states per env, layers, n_envs, size] -> [states, layers, size], environment by environment
        ready["starts"] = [torch.stack(part).movedim(2, 0).flatten(0, 1) for part in zip(*self._starts)]
        return ready

    def _minibatch(self, chunks: list[list[sequences.Piece]]) -> Any:
        ready, layout = self._ready, sequences.lay_out(chunks)
        device = self.device  # type: ignore[attr-defined]
        rows, states = (torch.as_tensor(a, device=device) for a in (layout.step.reshape(-1), layout.state))
        obs = ready["observations"]
        starts = [part.index_select(0, states).transpose(0, 1) for part in ready["starts"]]  # [layers, rows, size]
        pi, vf = (starts[0], starts[1]), (starts[2], starts[3])
        masks = ready["masks"]
        values, log_probs, advantages, returns, flags = ready["numbers"].index_select(1, rows)
        return self.samples(
            observations={k: v[rows] for k, v in obs.items()} if isinstance(obs, dict) else obs[rows],
            actions=ready["actions"][rows],
            old_values=values,
            old_log_prob=log_probs,
            advantages=advantages,
            returns=returns,
            lstm_states=RNNStates(pi, vf) if masks is None else MaskedStates(pi, vf, masks[rows]),
            episode_starts=flags,
            mask=torch.as_tensor(layout.valid.reshape(-1), device=device).float(),
        )


class ChunkRolloutBuffer(_Chunks, RecurrentRolloutBuffer):  # type: ignore[misc]
    """For array observations."""

    samples = RecurrentRolloutBufferSamples

    def _plain(self) -> Any:
        return super(RecurrentRolloutBuffer, self)


class DictChunkRolloutBuffer(_Chunks, RecurrentDictRolloutBuffer):  # type: ignore[misc]
    """For Dict observations."""

    samples = RecurrentDictRolloutBufferSamples

    def _plain(self) -> Any:
        return super(RecurrentDictRolloutBuffer, self)
