"""`LSTMWrapper`: a base class for policies already written around a hand-managed LSTM state.

Such a policy reads

    lstm_h, lstm_c, env_id = self._manage_lstm_state(td, B, TT, device)      # [layers, B, hidden]
    hidden, (new_h, new_c) = self.lstm(hidden, (lstm_h, lstm_c))             # [TT, B, ...] -> [TT, B, hidden]
    self._store_lstm_state(new_h, new_c, env_id)

and becomes correct by changing its base class: rows per environment, resets at every step of a segment, no
graph kept, memory untouched by training. New policies are shorter as `hf.RecurrentPolicy`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from holdfast.cores.lstm import LSTM
from holdfast.integrations import entries
from holdfast.memory import EnvIds, Memory
from holdfast.state import State

if TYPE_CHECKING:
    from tensordict import TensorDictBase


class ManagedLSTM(LSTM):
    """`hf.LSTM` called as torch.nn.LSTM is; the resets of the call come from `_manage_lstm_state`."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        batch_first: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(input_size, hidden_size, num_layers, **kwargs)
        self.batch_first = batch_first
        self.resets: Tensor | None = None  # [TT, B], between _manage_lstm_state and _store_lstm_state

    def forward(  # type: ignore[override]
        self, x: Tensor, hx: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """x [TT, B, I] ([B, TT, I] if batch_first), hx (h, c) each [layers, B, H], as torch.nn.LSTM."""
        if x.dim() != 3:
            raise ValueError(f"lstm got shape {tuple(x.shape)}, expected three dimensions [TT, B, {self.input_size}]")
        if self.batch_first:
            x = x.transpose(0, 1)
        state = None if hx is None else {"h": hx[0].transpose(0, 1), "c": hx[1].transpose(0, 1)}
        resets = self.resets
        if resets is not None and tuple(resets.shape) != tuple(x.shape[:2]):
            raise ValueError(
                f"lstm got [TT, B] = {list(x.shape[:2])}, but _manage_lstm_state was called for "
                f"{list(resets.shape)}: time comes first (reshape to [B, TT, ...], then transpose(0, 1))"
            )
        if x.shape[0] == 1:  # a rollout step
            y, state = super().forward(x[0], state, None if resets is None else resets[0])
            y = y.unsqueeze(0)
        else:
            y, state = super().forward(x, state, resets)
        y = y.transpose(0, 1) if self.batch_first else y
        return y, (state["h"].transpose(0, 1), state["c"].transpose(0, 1))

    @classmethod
    def from_torch(cls, lstm: nn.LSTM) -> ManagedLSTM:
        """The same layers with the same weights."""
        if lstm.bidirectional or lstm.proj_size or lstm.dropout:
            raise ValueError(
                "self.lstm must be one-directional, without projection and without dropout: a policy cannot "
                "read the future, and dropout makes training differ from the rollout it trains on"
            )
        ours = cls(lstm.input_size, lstm.hidden_size, lstm.num_layers, bias=lstm.bias, batch_first=lstm.batch_first)
        like = next(lstm.parameters())
        ours.to(dtype=like.dtype, device=like.device)
        ours.load_state_dict(lstm.state_dict())
        return ours


class LSTMWrapper(nn.Module):
    """Base class: `self.lstm` and the three calls of the module docstring, backed by `hf.Memory`.

    Subclasses write `forward(self, td, state=None, action=None)`. `action=None` is a rollout step. With
    `action` it is training: `state` is what `start_state(td)` gave before the rollout, None the initial state
    (every row's first step must then be a reset). An `nn.LSTM` assigned to `self.lstm` is converted with its
    weights.
    """

    lstm: ManagedLSTM

    def __init__(
        self,
        env: Any = None,
        policy: nn.Module | None = None,
        input_size: int = 128,
        hidden_size: int = 128,
        num_layers: int = 1,
    ) -> None:
        super().__init__()
        self.policy = policy
        self.is_training_leg = False
        self._start: State = None
        self.lstm = ManagedLSTM(input_size, hidden_size, num_layers)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "forward" in cls.__dict__:
            cls.forward = _recording_the_leg(cls.__dict__["forward"])

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "lstm":
            value = ManagedLSTM.from_torch(value) if isinstance(value, nn.LSTM) else value
            self.memory = Memory(value)
        super().__setattr__(name, value)

    # --- what the policy's forward calls --------------------------------------------------------------------

    def _manage_lstm_state(
        self, td: TensorDictBase, B: int, TT: int, device: Any = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """(h, c, env_id) for this call: h, c are [layers, B, hidden], env_id goes to `_store_lstm_state`."""
        resets = entries.resets(td, B, TT)
        resets = None if resets is None else resets.to(self.lstm.device())
        ids: Tensor | None = None
        if self.is_training_leg:
            start, self._start = self._start, None
            state = entries.start_of_segment(self.lstm, start, resets, B)
            self.lstm.check_state(state, B)
        elif TT != 1:
            raise ValueError(
                f"a rollout is one step per environment, but TT={TT}; training passes action=, and forward "
                "must name the parameters (td, state=None, action=None)"
            )
        else:
            with torch.no_grad():
                ids = entries.env_ids(td, B)
                self.memory.expect(B, ids)
                state, ids = self.memory.take(B, ids)
        self.lstm.resets = resets
        return state["h"].transpose(0, 1), state["c"].transpose(0, 1), ids

    def _store_lstm_state(self, lstm_h: Tensor, lstm_c: Tensor, env_id: Tensor | None) -> None:
        """Keep the new state of a rollout step, without its graph; training keeps nothing."""
        self.lstm.resets = None
        if self.is_training_leg:
            return
        with torch.no_grad():  # copies: the policy may still change what it holds
            state = {"h": _batch_first_copy(lstm_h), "c": _batch_first_copy(lstm_c)}
            self.memory.put(state, env_id)

    def start_state(self, td: TensorDictBase) -> State:
        """What the environments of `td` remember now: before a rollout, the `state` to train from."""
        return entries.snapshot(self.memory, td)

    # --- memory ---------------------------------------------------------------------------------------------

    def has_memory(self) -> bool:
        return True

    def get_memory(self) -> dict[str, Any]:
        """A copy of the memory, to keep or to give to `set_memory`."""
        return self.memory.state_dict()

    def set_memory(self, m: Memory | dict[str, Any]) -> None:
        """Take over a copy from `get_memory`, or use another `hf.Memory` of `self.lstm` from now on."""
        if isinstance(m, Memory):
            if m.core is not self.lstm:
                raise ValueError("this Memory belongs to another LSTM; make one with hf.Memory(policy.lstm)")
            self.memory = m
        else:
            self.memory.load_state_dict(m)

    def reset_memory(self) -> None:
        """Every environment starts from a fresh state."""
        self.memory.reset()

    def reset_env_memory(self, env_id: int | EnvIds) -> None:
        """This environment starts from a fresh state."""
        self.memory.reset([env_id] if isinstance(env_id, int) else env_id)


def _batch_first_copy(leaf: Tensor) -> Tensor:
    """[layers, B, H] -> [B, layers, H]"""
    return leaf.transpose(0, 1).clone(memory_format=torch.contiguous_format)


def _recording_the_leg(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward`, after recording on the module whether it trains (an action was given) and from which state."""
    names = list(inspect.signature(forward).parameters)[1:]

    def argument(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in kwargs:
            return kwargs[name]
        place = names.index(name) if name in names else len(args)
        return args[place] if place < len(args) else None

    @functools.wraps(forward)
    def recording(self: LSTMWrapper, *args: Any, **kwargs: Any) -> Any:
        self.is_training_leg = argument("action", args, kwargs) is not None
        self._start = argument("state", args, kwargs) if self.is_training_leg else None
        return forward(self, *args, **kwargs)

    return recording
