"""`hf.Block`: a core inside a residual block, the way layers of modern sequence models are stacked.

    y = skip(x) + core(norm(x))
    y = y + mlp(norm(y))

    hf.Block(hf.WindowAttention(64, 128, window=32))
    hf.Stack([hf.Block(hf.MinGRU(128, 128)), hf.Block(hf.MinGRU(128, 128))])

Norms and MLP act on each step alone; the state, its resets and its dtypes are those of the core inside.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from holdfast.cores.base import Core
from holdfast.cores.compose import CompositeCore, require_core
from holdfast.state import State

INPUT_NORM_EPS = 0.1
"""Added to the variance of what a core reads: a step in which nothing happens is not made as loud as one that matters."""


class Block(CompositeCore):
    """Pre-norm residual block around a core: x + core(norm(x)), then + mlp(norm(.)).

    core: anything that remembers. If its input and output sizes differ, `skip` is a linear map without bias from one to
    the other; otherwise it is the identity. expansion: width of the MLP's hidden layer, in units of the output size.

    >>> import holdfast as hf
    >>> block = hf.Block(hf.GRU(4, 8))
    >>> block.input_size, block.output_size, block.skip
    (4, 8, Linear(in_features=4, out_features=8, bias=False))
    """

    def __init__(self, core: Core, expansion: int = 2) -> None:
        super().__init__()
        if isinstance(expansion, bool) or not isinstance(expansion, int) or expansion < 1:
            raise ValueError(f"expansion must be a positive integer, got {expansion!r}")
        self.core = require_core(core, "Block")
        self.input_size, self.output_size = core.input_size, core.output_size
        self.supports_advance = core.supports_advance
        size, hidden = core.output_size, expansion * core.output_size
        self.skip = nn.Identity() if core.input_size == size else nn.Linear(core.input_size, size, bias=False)
        self.norm = nn.LayerNorm(core.input_size, eps=INPUT_NORM_EPS)
        self.mlp_norm = nn.LayerNorm(size)
        self.mlp = nn.Sequential(nn.Linear(size, hidden), nn.ReLU(), nn.Linear(hidden, size))

    def dtype_and_device(self) -> tuple[torch.dtype, torch.device]:
        return self.norm.weight.dtype, self.norm.weight.device

    def row_shapes(self) -> State:
        return self.core.row_shapes()

    def context(self) -> int | None:
        return self.core.context()

    def initial_state(self, batch_size: int) -> State:
        return self.core.initial_state(batch_size)

    def _run(self, form: str, x: Tensor, state: State, resets: Tensor | None) -> Any:
        y, *states = getattr(self.core, form)(self.norm(x), state, resets)
        y = self.skip(x) + y
        return y + self.mlp(self.mlp_norm(y)), *states
