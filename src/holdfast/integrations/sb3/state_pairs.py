"""States as sb3-contrib passes them around: a pair of tensors [layers, environments, size].

For an LSTM the pair is (h, c), as in sb3-contrib, so that its checkpoints and scripts keep working. The state of any
other core is packed into the first of the two, [1, environments, size]; the second is empty, [1, environments, 0].
sb3-contrib keeps both in floating point, so an integer leaf is packed as numbers, exact up to 2**24 in float32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from holdfast import state as state_ops
from holdfast.cores import LSTM, Core
from holdfast.state import State

Pair = tuple[Tensor, Tensor]


def pack(core: Core, state: State) -> Pair:
    """A core's state (leaves [B, ...]) as a pair."""
    if isinstance(core, LSTM):
        return state["h"].transpose(0, 1), state["c"].transpose(0, 1)
    leaves = state_ops.ordered_leaves(state, core.row_shapes())
    if not leaves:
        raise ValueError("this core keeps no state; use stable_baselines3.PPO for a policy without memory")
    rows = [state_ops.flat_rows(leaf) for leaf in leaves]
    packed = torch.cat(rows, -1) if len(rows) > 1 else rows[0]  # cat promotes to the widest dtype
    packed = packed if packed.is_floating_point() else packed.float()
    return packed.unsqueeze(0), packed.new_empty(1, packed.shape[0], 0)


def unpack(core: Core, pair: Pair) -> State:
    """The core's state from a pair."""
    if isinstance(core, LSTM):
        return {"h": pair[0].transpose(0, 1), "c": pair[1].transpose(0, 1)}
    packed, batch = pair[0][0], pair[0].shape[1]  # [B, size]
    shapes, dtype = core.row_shapes(), core.state_dtype()
    parts = packed.split([math.prod(row.shape) for row in state_ops.leaves(shapes)], -1)
    tree = state_ops.from_leaves(list(parts), like=shapes)
    return state_ops.tree_map(lambda row, part: part.reshape(batch, *row.shape).to(row.dtype or dtype), shapes, tree)


def initial(core: Core, batch: int) -> Pair:
    """A fresh pair, without a graph."""
    with torch.no_grad():
        pair = pack(core, core.initial_state(batch))
        return pair[0].clone(), pair[1].clone()


def check(core: Core, pair: object, batch: int) -> None:
    """Raise unless `pair` is a state of this core for `batch` environments."""
    expected = [tuple(part.shape) for part in initial(core, batch)]
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise ValueError(f"the state is a {type(pair).__name__}, expected the tuple of 2 arrays that predict returned")
    got = [tuple(part.shape) for part in pair]
    if got != expected:
        raise ValueError(
            f"the state has shapes {got}, expected {expected} for {batch} environments: pass the state that predict "
            "returned for these environments, or None for a fresh state"
        )
