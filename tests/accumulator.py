"""A small core whose state has leaves of three dtypes, for tests of everything that handles states."""

from __future__ import annotations

import torch
from torch import nn

import holdfast as hf
from holdfast import state as state_ops
from holdfast.state import RowShape


class Accumulator(hf.Core):
    """The mean input of the episode. `sum` is float32 and `age` int32 in every module; `last` follows the module."""

    supports_advance = True

    def __init__(self, size: int = 4):
        super().__init__()
        self.input_size = self.output_size = size
        self.weight = nn.Parameter(torch.ones(size))

    def row_shapes(self):
        size = (self.input_size,)
        return {"sum": RowShape(size, torch.float32), "age": RowShape((), torch.int32), "last": RowShape(size)}

    def _step(self, x, state, resets):
        if resets is not None:
            state = state_ops.where(resets, self.initial_state(x.shape[0]), state)
        total, age = state["sum"] + x.float(), state["age"] + 1
        y = (total / age.unsqueeze(1) * self.weight.float()).to(x.dtype) - state["last"]
        return y, {"age": age, "last": x.to(state["last"].dtype, copy=True), "sum": total}  # any order of keys

    def advance_(self, x, state, resets):
        if resets is not None:
            state["sum"].masked_fill_(resets.unsqueeze(1), 0.0)
            state["last"].masked_fill_(resets.unsqueeze(1), 0.0)
            state["age"].masked_fill_(resets, 0)
        state["sum"].add_(x.float())
        state["age"].add_(1)
        y = (state["sum"] / state["age"].unsqueeze(1) * self.weight.float()).to(x.dtype) - state["last"]
        state["last"].copy_(x)
        return y


DTYPES = {"sum": torch.float32, "age": torch.int32}  # of the leaves that fix one


def dtypes(state):
    return {name: leaf.dtype for name, leaf in state_ops.named_leaves(state).items()}


class ProjectedAccumulator(Accumulator):
    """As `--core my_module:MyCore` makes a core: from the sizes of its input and of its state."""

    def __init__(self, input_size: int, hidden_size: int):
        super().__init__(hidden_size)
        self.input_size = input_size
        self.projection = nn.Linear(input_size, hidden_size)

    def row_shapes(self):
        size = (self.output_size,)
        return {"sum": RowShape(size, torch.float32), "age": RowShape((), torch.int32), "last": RowShape(size)}

    def _step(self, x, state, resets):
        return super()._step(self.projection(x), state, resets)

    def advance_(self, x, state, resets):
        return super().advance_(self.projection(x), state, resets)
