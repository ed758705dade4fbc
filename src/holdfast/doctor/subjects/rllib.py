"""RLlib's new API stack: an `RLModule` with recurrent state, on PyTorch. Needs `pip install 'holdfast[rllib]'`."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.doctor.columns import columns
from holdfast.doctor.script import STEPS
from holdfast.doctor.subjects.base import CarriesState, RecordedSegment, Replay, SubjectStep
from holdfast.state import map_tensors, tree_map

#: consecutive steps of one episode in a row: (row, first step, last step, whether the episode begins here)
Piece = tuple[int, int, int, bool]


class RLlib(CarriesState):
    """A `TorchRLModule` whose `get_initial_state` is not empty, driven as RLlib's env runner and learner do it.

    Rollout: `forward_exploration` with one step and `state_in`, which is the last `state_out`, or the initial state at the
    start of an episode. Training: RLlib keeps episodes apart, so each is a row of its own; the learner connector
    `AddStatesFromEpisodesToBatch` gives each piece of `max_seq_len` steps (of `model_config`, 20 by default) its
    `state_in`, and rows are padded with zeros. Compared are the inputs of the action distribution, and values if the
    module computes them.
    """

    framework = "rllib"

    def __init__(self, module: Any, *, num_envs: int = 5, name: str | None = None) -> None:
        self.module = module
        super().__init__(module.observation_space, name=name or type(module).__name__)
        if not module.is_stateful():
            raise TypeError(
                f"subjects.RLlib: {type(module).__name__} has no state: get_initial_state() returns nothing"
            )
        self.num_envs = num_envs
        config = module.model_config
        given = config.get("max_seq_len") if isinstance(config, dict) else getattr(config, "max_seq_len", None)
        self.max_seq_len = int(given or 20)
        self.bptt = self.max_seq_len if self.max_seq_len < STEPS else None

    def begin(self, num_envs: int) -> None:
        one = tree_map(torch.as_tensor, self.module.get_initial_state())
        self._state = map_tensors(lambda x: x.expand(num_envs, *x.shape).clone(), one)

    def step(self, obs: Any, terminated: Tensor, truncated: Tensor, env_ids: Tensor) -> SubjectStep:
        rows = len(env_ids)
        fresh, state = tree_map(torch.as_tensor, self.module.get_initial_state()), self._state
        ended = terminated | truncated
        state = tree_map(lambda x, new: torch.where(ended.reshape(-1, *[1] * new.dim()), new, x), state, fresh)
        batch = {"obs": map_tensors(lambda x: x[:, None], obs), "state_in": state}
        with torch.no_grad():
            result = self.module.forward_exploration(batch)
            parts = [result["action_dist_inputs"], *self._values(batch, result)]
        self._state = result["state_out"]
        return SubjectStep(columns([x.reshape(rows, -1) for x in parts], rows))

    def replay(self, segment: RecordedSegment) -> Replay:
        steps, rows = segment.terminated.shape
        pieces = [piece for row in range(rows) for piece in _episodes(segment.resets[:, row].tolist(), row)]
        chunks = [
            (row, first + at, min(first + at + self.max_seq_len, last))
            for row, first, last, _ in pieces
            for at in range(0, last - first, self.max_seq_len)
        ]
        batch = {"obs": self._padded(segment.obs, chunks), "state_in": self._states_in(segment, pieces)}
        result = self.module.forward_train(batch)
        count = len(chunks) * self.max_seq_len
        parts = [result["action_dist_inputs"], *self._values(batch, result)]
        output = columns([x.reshape(count, -1) for x in parts], count).reshape(len(chunks), self.max_seq_len, -1)
        places = {(t, row): (i, t - first) for i, (row, first, last) in enumerate(chunks) for t in range(first, last)}
        index = torch.tensor([[places[t, row] for row in range(rows)] for t in range(steps)])  # [T, B, 2]
        return Replay(output[index[..., 0], index[..., 1]])

    def _values(self, batch: Any, result: Any) -> list[Tensor]:
        if not hasattr(self.module, "compute_values"):
            return []
        return [self.module.compute_values(batch, result.get("embeddings"))]

    def _padded(self, obs: Any, chunks: list[tuple[int, int, int]]) -> Any:
        """`[chunks, max_seq_len, ...]`."""

        def pad(x: Tensor) -> Tensor:
            rows = [x[first:last, row] for row, first, last in chunks]
            room = [self.max_seq_len - len(row) for row in rows]
            return torch.stack([torch.cat([row, row.new_zeros(n, *row.shape[1:])]) for row, n in zip(rows, room)])

        return map_tensors(pad, obs)

    def _states_in(self, segment: RecordedSegment, pieces: list[Piece]) -> Any:
        """What RLlib's learner connector makes of the states that the env runner stored."""
        from ray.rllib.connectors.common.add_states_from_episodes_to_batch import AddStatesFromEpisodesToBatch

        connector = AddStatesFromEpisodesToBatch(as_learner_connector=True)
        episodes = [_episode(segment, piece) for piece in pieces]
        module = _WithLength(self.module, self.max_seq_len)
        batch = connector(rl_module=module, batch={}, episodes=episodes, shared_data={})
        states = [state for episode in episodes for state in batch["state_in"][(episode.id_,)]]
        return tree_map(lambda *leaves: torch.stack([torch.as_tensor(x) for x in leaves]), *states)


class _WithLength:
    """What the connector asks of a module; `max_seq_len` is set even if its configuration has none."""

    def __init__(self, module: Any, max_seq_len: int) -> None:
        self.is_stateful, self.get_initial_state = module.is_stateful, module.get_initial_state
        self.model_config = {"max_seq_len": max_seq_len}


def _episodes(resets: list[bool], row: int) -> list[Piece]:
    cuts = [0, *(t for t in range(1, len(resets)) if resets[t]), len(resets)]
    return [(row, first, last, resets[first]) for first, last in pairwise(cuts)]


def _episode(segment: RecordedSegment, piece: Piece) -> Any:
    """An episode, or the rest of one with a step to look back on, with the states that came out of each step."""
    from ray.rllib.env.single_agent_episode import SingleAgentEpisode

    row, first, last, begins = piece
    back = 0 if begins else 1
    count = last - first + back
    states = [_numpy_row(segment.marks[t + 1], row) for t in range(first - back, last)]
    return SingleAgentEpisode(
        observations=[np.zeros(1, np.float32)] * (count + 1),
        actions=[0] * count,
        rewards=[0.0] * count,
        extra_model_outputs={"state_out": states},
        t_started=back,
        len_lookback_buffer=back,
    )


def _numpy_row(state: Any, row: int) -> Any:
    return map_tensors(lambda x: x[row].detach().cpu().numpy(), state)
