"""TorchRL: a TensorDict module with `LSTMModule`/`GRUModule`, wired into environments by transforms."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.doctor.columns import columns
from holdfast.doctor.inference import space_of
from holdfast.doctor.observations import device_of
from holdfast.doctor.subjects.base import RecordedSegment, Replay, Subject, SubjectStep


class TorchRL(Subject):
    """A module that reads `observation`, recurrent states and `is_init` from a TensorDict.

    The other arguments say how the project wires it; the defaults follow TorchRL's documentation. `primed`: the
    environment has the module's `TensorDictPrimer`, which carries the states from step to step and zeroes them at a
    reset. `init_tracker`: the environment has `InitTracker`; without it `is_init` is False everywhere.
    `is_init_dtype`: the dtype in the collected data. `recurrent_mode`: training runs inside `set_recurrent_mode(True)`.
    `out_keys`: the entries to compare, by default what the module writes except states and sampled actions.
    """

    framework = "torchrl"

    def __init__(
        self,
        module: nn.Module,
        observation_space: Any = None,
        *,
        obs_key: Any = "observation",
        out_keys: list[Any] | None = None,
        primed: bool = True,
        init_tracker: bool = True,
        is_init_dtype: torch.dtype = torch.bool,
        recurrent_mode: bool = True,
        num_envs: int = 5,
        name: str | None = None,
    ) -> None:
        super().__init__(space_of(module, observation_space), name=name or type(module).__name__)
        self.module: Any = module
        self.obs_key = obs_key
        self.primed, self.init_tracker, self.is_init_dtype = primed, init_tracker, is_init_dtype
        self.recurrent_mode, self.num_envs = recurrent_mode, num_envs
        self.cells: list[Any] = [m for m in module.modules() if _is_recurrent(m)]
        if not self.cells:
            raise TypeError(
                f"subjects.TorchRL found no LSTMModule, GRUModule or other module with is_init among its in_keys "
                f"in {type(module).__name__}"
            )
        written = [_tuple(key) for cell in self.cells for key in cell.out_keys[1:]]
        keys: Any = out_keys if out_keys is not None else self.module.out_keys
        sampled = {("action",), ("sample_log_prob",), ("action_log_prob",)}
        self.out_keys = [k for k in keys if _tuple(k) not in written and _tuple(k) not in sampled]
        self._carried: dict[Any, Tensor] = {}
        self._first = True

    def begin(self, num_envs: int) -> None:
        self._first = True
        self._carried = {key: self._zeros(cell, key, num_envs) for cell, _, key in self._state_keys()}

    def step(self, obs: Any, terminated: Tensor, truncated: Tensor, env_ids: Tensor) -> SubjectStep:
        from tensordict import TensorDict

        rows = len(terminated)
        resets = terminated | truncated | self._first
        self._first = False
        self._carried = {key: _zero_rows(value, resets) for key, value in self._carried.items()}  # as a primer does
        td = TensorDict({}, [rows], device=device_of([self.module]))
        td[self.obs_key] = obs
        td["is_init"] = self._is_init(resets)
        for key, value in self._carried.items() if self.primed else ():
            td[key] = value
        with torch.no_grad():
            td = self.module(td)
        self._carried = {key: td[cell.out_keys[1 + i]] for cell, i, key in self._state_keys()}
        return SubjectStep(columns([td[key] for key in self.out_keys], rows))

    def mark(self) -> Any:
        return dict(self._carried)

    def state(self) -> Any:
        return list(self._carried.values()) if self.primed else None

    def replay(self, segment: RecordedSegment) -> Replay:
        from tensordict import TensorDict
        from torchrl.modules import set_recurrent_mode

        steps, rows = segment.terminated.shape
        resets = segment.resets
        td = TensorDict({}, [rows, steps], device=device_of([self.module]))
        td[self.obs_key] = segment.obs.transpose(0, 1)
        td["is_init"] = self._is_init(resets.T)
        if self.primed:
            for key in self._carried:
                # The buffer holds each step's state as the primer left it: zero at a reset.
                stored = [_zero_rows(segment.marks[t][key], resets[t]) for t in range(steps)]
                td[key] = torch.stack(stored, dim=1)
        with set_recurrent_mode(True) if self.recurrent_mode else contextlib.nullcontext():
            td = self.module(td)
        flat = [td[key].flatten(0, 1) for key in self.out_keys]
        return Replay(columns(flat, rows * steps).reshape(rows, steps, -1).transpose(0, 1))

    def poison(self, row: int) -> None:
        self._carried = {key: value.clone() for key, value in self._carried.items()}
        for value in self._carried.values():
            value[row] = float("nan")

    def alternatives(self) -> list[tuple[str, Subject]]:
        if self.is_init_dtype is torch.bool:
            return []
        other = copy.copy(self)
        other.is_init_dtype = torch.bool
        return [("flags-not-bool", other)]

    def _is_init(self, resets: Tensor) -> Tensor:
        flags = resets if self.init_tracker else torch.zeros_like(resets)
        return flags.unsqueeze(-1).to(self.is_init_dtype)

    def _state_keys(self) -> list[tuple[Any, int, Any]]:
        """(cell, index among its states, key that it reads)."""
        return [
            (cell, i, key) for cell in self.cells for i, key in enumerate(k for k in cell.in_keys[1:] if k != "is_init")
        ]

    def _zeros(self, cell: Any, key: Any, num_envs: int) -> Tensor:
        net = getattr(cell, "lstm", None) or getattr(cell, "gru", None)
        weight = next(iter(cell.parameters()))
        if net is not None:
            return weight.new_zeros(num_envs, net.num_layers, net.hidden_size)
        spec = cell.make_tensordict_primer().primers[key]
        return weight.new_zeros(num_envs, *spec.shape)


def _is_recurrent(module: Any) -> bool:
    keys = getattr(module, "in_keys", None) or []
    inner = [m for m in module.modules() if m is not module]
    return "is_init" in keys and not any("is_init" in (getattr(m, "in_keys", None) or []) for m in inner)


def _tuple(key: Any) -> tuple[Any, ...]:
    return key if isinstance(key, tuple) else (key,)


def _zero_rows(value: Tensor, rows: Tensor) -> Tensor:
    return torch.where(rows.reshape(-1, *[1] * (value.dim() - 1)), torch.zeros_like(value), value)
