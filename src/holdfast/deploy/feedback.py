"""Feeds a policy its previous action and reward, for one that was trained with `inputs=("obs", "prev_action", ...)`.

The previous action is kept as a part of each environment's state, so memory, resets and saving treat it as such. At the
first step of an episode it is 0 (a Discrete space's first), and the reward is 0; with reset="never" only where an environment is
fresh.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.cores.base import Core
from holdfast.deploy import nonfinite
from holdfast.deploy.exported_signature import Port, batch_size, nest, take
from holdfast.state import RowShape, State, leaves, tree_map

ACTION, REWARD = "prev_action", "prev_reward"


class WithPreviousAction(Core):
    """The state of `core` next to the previous action, for `hf.Memory`."""

    def __init__(self, core: Core, action: list[Port], first: Any) -> None:
        super().__init__()
        self.input_size, self.output_size = core.input_size, core.output_size
        self.core = core
        parts = [Port(port.name, port.shape, port.dtype, port.path[1:]) for port in action]
        self._action = nest(parts, [RowShape(port.shape, getattr(torch, port.dtype)) for port in action])
        self._first = first

    def row_shapes(self) -> State:
        return {"policy": self.core.row_shapes(), ACTION: self._action}

    def initial_state(self, batch_size: int) -> State:
        device = self.core.device()

        def begin(row: RowShape, first: int) -> Tensor:
            return torch.full((batch_size, *row.shape), first, dtype=row.dtype, device=device)

        return {"policy": self.core.initial_state(batch_size), ACTION: tree_map(begin, self._action, self._first)}

    def dtype_and_device(self) -> tuple[torch.dtype, torch.device]:
        return self.core.dtype_and_device()


class FeedBack:
    """A step model that sees "obs", and its previous action or reward; the caller passes the observation alone.

    An observation that holds all parts is used as it is.
    """

    def __init__(self, model: Any, ports: list[Port]) -> None:
        self.model = model
        self._seen = [port for port in ports if port.path[0] == "obs"]
        # The observation alone: paths without the leading "obs".
        self._alone = [Port(port.name, port.shape, port.dtype, port.path[1:]) for port in self._seen]
        self._fed = [port for port in ports if port.path[0] != "obs"]
        self._names = {str(port.path[0]) for port in self._fed}
        action = [port for port in self._fed if port.path[0] == ACTION]
        none = [Port(ACTION, (0,), "float32", (ACTION,))]  # a leaf without numbers
        self.core: Core = WithPreviousAction(model.core, action or none, model.first_action if action else 0)

    def __repr__(self) -> str:
        return repr(self.model)

    def inputs(self, obs: Any, rewards: Any = None) -> tuple[Any, int | None]:
        """(the model's inputs, rewards [B] or None, whether the caller gave all parts), and B."""
        if isinstance(obs, dict) and obs.keys() >= {"obs", *self._names}:
            inputs, batch = self.model.inputs(obs)
            return (inputs, None, True), batch
        batch = batch_size(self._alone, [np.shape(take(obs, port)) for port in self._alone])
        lead = () if batch is None else (batch,)
        parts = nest(self._fed, [np.zeros((*lead, *port.shape), port.dtype) for port in self._fed])
        inputs, _ = self.model.inputs({"obs": obs, **parts})
        return (inputs, self._rewards(rewards, batch or 1), False), batch

    def _rewards(self, rewards: Any, batch: int) -> Any:
        if rewards is None:
            return None
        paid = rewards.detach().cpu().numpy() if isinstance(rewards, Tensor) else np.asarray(rewards)
        if paid.size != batch or paid.ndim > 1:
            raise ValueError(f"rewards have shape {paid.shape}, expected ({batch},): one per environment")
        return paid.reshape(batch).astype(np.float32)

    def flags(self, resets: Any, batch: int) -> Any:
        return self.model.flags(resets, batch)

    def from_memory(self, state: State) -> Any:
        previous = tree_map(Tensor.numpy, state[ACTION]) if self.model.in_numpy else state[ACTION]
        return {"policy": self.model.from_memory(state["policy"]), ACTION: previous}

    def to_memory(self, state: Any) -> State:
        return {"policy": self.model.to_memory(state["policy"]), ACTION: tree_map(torch.as_tensor, state[ACTION])}

    def step(
        self, given: Any, flags: Any, state: Any, action_mask: Any, deterministic: bool
    ) -> tuple[Any, Any, Any, Any, Any]:
        inputs, rewards, complete = given
        previous = state[ACTION]
        if not complete:
            crosses, count = self.model.crosses_episodes, len(leaves(previous)[0])
            fresh = nonfinite.as_rows(flags, count)
            start = self.core.initial_state(count)[ACTION]
            start = tree_map(Tensor.numpy, start) if self.model.in_numpy else start
            parts = {
                ACTION: previous if crosses else nonfinite.where(fresh, start, previous),
                REWARD: self._seen_rewards(rewards, fresh, leaves(previous)[0], crosses),
            }
            inputs = self.model.with_parts(inputs, {name: parts[name] for name in self._names})
        action, value, raw, after, logits = self.model.step(inputs, flags, state["policy"], action_mask, deterministic)
        kept = tree_map(_as_dtype_of, previous, raw) if ACTION in self._names else previous
        return action, value, raw, {"policy": after, ACTION: kept}, logits

    def with_action_of(self, new: Any, state: Any) -> Any:
        """`state`, with the action that `new` remembers."""
        return {**state, ACTION: new[ACTION]}

    def _seen_rewards(self, rewards: Any, fresh: nonfinite.Flags, like: Any, crosses: bool) -> Any:
        if rewards is None:
            if REWARD in self._names and not fresh.all():
                raise ValueError(
                    "this policy sees its previous reward: pass rewards=, what each environment paid for its last "
                    "action, or resets=True where an episode begins"
                )
            rewards = np.zeros(len(fresh), np.float32)
        paid = rewards if crosses else np.where(fresh, np.float32(0), rewards)
        return torch.as_tensor(paid, device=like.device) if isinstance(like, Tensor) else paid

    def result(self, array: Any, numpy: bool) -> Any:
        return self.model.result(array, numpy)


def _as_dtype_of(like: Any, array: Any) -> Any:
    return array.to(like.dtype) if isinstance(array, Tensor) else array.astype(like.dtype)


def wants_feedback(ports: list[Port] | None) -> bool:
    """Whether a policy with these observations sees its previous action or reward next to an observation."""
    names = {port.path[0] for port in ports or [] if port.path}
    return "obs" in names and len(names) > 1 and names <= {"obs", ACTION, REWARD}
