"""Rollout buffers that hand out sb3-contrib's minibatches in a layout that one call of a core can take.

    env 0 |--------------|  env 1 |--------------|  env 2 ...     one environment after another, split at a random step
                   ^ split        ^ + batch_size                  in every pass: each minibatch is the next `batch_size`
                                                                  steps from there on, wrapping around at the end

Steps, order and random draw are sb3-contrib's: the same seed gives the same minibatches. `sequences.py` lays one out as
sequences. A sequence starts from the state that the rollout had there; episodes end anywhere inside, and the core
resets there.
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
from holdfast.state import tree_map


class _Sequences:
    """What both buffers share. Mixed in before sb3-contrib's classes, whose storage of states it replaces.

    isolated: nothing crosses a reset (reset modes "zero" and "learned"), so episodes can be laid out side by side.
    """

    samples: Callable[..., Any]
    mask_source: MaskSource | None = None

    def __init__(self, *args: Any, isolated: bool, **kwargs: Any) -> None:
        self.isolated = isolated
        super().__init__(*args, **kwargs)

    def _plain(self) -> Any:
        """The methods of Stable-Baselines3's buffer, without the per-step states of sb3-contrib's."""
        raise NotImplementedError

    def reset(self) -> None:
        self._plain().reset()
        self._states: list[tuple[Tensor, ...]] = []  # before each step; only references, no copies
        self._ready: dict[str, Any] = {}
        self.action_masks: np.ndarray | None = None

    def add(self, *args: Any, lstm_states: RNNStates, **kwargs: Any) -> None:
        self._states.append((*lstm_states.pi, *lstm_states.vf))
        if self.mask_source is not None:
            self._add_masks(self.mask_source.last)
        self._plain().add(*args, **kwargs)

    def _add_masks(self, masks: np.ndarray) -> None:
        if self.action_masks is None:
            shape = (self.buffer_size, self.n_envs, mask_size(self.action_space))  # type: ignore[attr-defined]
            self.action_masks = np.ones(shape, dtype=bool)
        self.action_masks[self.pos] = masks  # type: ignore[attr-defined]

    def get(self, batch_size: int | None = None) -> Iterator[Any]:
        """Minibatches of `batch_size` steps; the last of a pass has the rest."""
        if not self.full:  # type: ignore[attr-defined]
            raise ValueError("the rollout buffer is not full yet")
        if not self._ready:
            self._ready = self._prepare()
        total = self.buffer_size * self.n_envs  # type: ignore[attr-defined]
        split = np.random.randint(total)  # sb3-contrib's draw
        rows = np.roll(np.arange(total), -split)
        for first in range(0, total, batch_size or total):
            yield self._minibatch(rows[first : first + (batch_size or total)])

    def _flat(self, array: np.ndarray) -> Tensor:
        """[n_steps, n_envs, ...] -> [n_envs * n_steps, ...] on the device."""
        return torch.as_tensor(array).transpose(0, 1).flatten(0, 1).to(self.device)  # type: ignore[attr-defined]

    def _prepare(self) -> dict[str, Any]:
        ready: dict[str, Any] = {
            "observations": tree_map(self._flat, self.observations),  # type: ignore[attr-defined]
            "actions": self._flat(self.actions.astype(np.float32, copy=False)),  # type: ignore[attr-defined]
            "masks": None if self.action_masks is None else self._flat(self.action_masks),
            "resets": self.episode_starts.T.reshape(-1) != 0,  # type: ignore[attr-defined]
        }
        # One gather brings all numbers of a step.
        numbers = ("values", "log_probs", "advantages", "returns", "episode_starts")
        ready["numbers"] = torch.stack([self._flat(getattr(self, name)) for name in numbers])
        # n_steps of [layers, n_envs, size] -> [n_envs * n_steps, layers, size]
        ready["states"] = [torch.stack(part, 2).movedim(0, 2).flatten(0, 1) for part in zip(*self._states)]
        return ready

    def _minibatch(self, steps: np.ndarray) -> Any:
        ready = self._ready
        n_steps, device = self.buffer_size, self.device  # type: ignore[attr-defined]
        layout = sequences.lay_out(sequences.cut(steps, n_steps, ready["resets"], self.isolated))
        rows, states = (torch.as_tensor(a, device=device) for a in (layout.step.reshape(-1), layout.state))
        starts = [part.index_select(0, states).transpose(0, 1) for part in ready["states"]]  # [layers, rows, size]
        pi, vf = (starts[0], starts[1]), (starts[2], starts[3])
        masks = ready["masks"]
        values, log_probs, advantages, returns, flags = ready["numbers"].index_select(1, rows)
        return self.samples(
            observations=tree_map(lambda part: part[rows], ready["observations"]),
            actions=ready["actions"][rows],
            old_values=values,
            old_log_prob=log_probs,
            advantages=advantages,
            returns=returns,
            lstm_states=RNNStates(pi, vf) if masks is None else MaskedStates(pi, vf, masks[rows]),
            episode_starts=flags,
            mask=torch.as_tensor(layout.valid.reshape(-1), device=device).float(),
        )


class SequenceRolloutBuffer(_Sequences, RecurrentRolloutBuffer):  # type: ignore[misc]
    """For array observations."""

    samples = RecurrentRolloutBufferSamples

    def _plain(self) -> Any:
        return super(RecurrentRolloutBuffer, self)


class DictSequenceRolloutBuffer(_Sequences, RecurrentDictRolloutBuffer):  # type: ignore[misc]
    """For Dict observations."""

    samples = RecurrentDictRolloutBufferSamples

    def _plain(self) -> Any:
        return super(RecurrentDictRolloutBuffer, self)
