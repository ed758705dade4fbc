"""`hf.MLSTM`: an LSTM whose memory is a matrix per head, written by keys and read by queries.

    core = hf.MLSTM(64, 128)
    y, state = core(x, state, resets)      # state {"memory": [B, heads, 32, 32]}, float32

    C = f R C + i v k^T;   y = out(o * (C q))

What was written under a key is found again by a query like it, however long ago, as long as forget gates stay open. Three
quarters of a key turn with every step (R), each plane at its own pace: by these a query can ask for what was seen a given
number of steps ago. Without them, a memory that is a sum has no order.
Gates are sigmoids and keys have length 1, so the memory needs no running maximum and no normalizer: a step and a chunk of
steps agree to float32's digits. The reference is Beck et al. 2024, "xLSTM: extended long short-term memory".
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast import state as state_ops
from holdfast.cores.base import Core, RowShape, check_reset_mode, check_sizes
from holdfast.kernels import dispatch, reference
from holdfast.kernels.operands import MatrixInputs, Resets
from holdfast.kernels.precision import without_autocast
from holdfast.state import State

STATE_DTYPE = torch.float32


class MLSTM(Core):
    """Matrix memory.

    reset: "zero" (each episode starts from zeros), "learned" (from a trained matrix per head), "detach" (the values cross
    episodes, their gradient does not; sequences run step by step), "never" (flags are ignored).
    kernel: "auto", "reference" or "portable". precision: for all cores alike; the memory is always float32.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        num_heads: int = 4,
        reset: str = "zero",
        kernel: str = "auto",
        precision: str = "fast",
    ) -> None:
        super().__init__()
        check_sizes(input_size=input_size, hidden_size=hidden_size, num_heads=num_heads)
        if hidden_size % num_heads:
            raise ValueError(f"hidden_size {hidden_size} must be a multiple of num_heads {num_heads}")
        if precision not in ("fast", "exact"):
            raise ValueError(f"unknown precision {precision!r}; 'fast' or 'exact'")
        self.input_size, self.hidden_size, self.output_size = input_size, hidden_size, hidden_size
        self.num_heads, self.reset = num_heads, check_reset_mode(reset)
        self.kernel, self.precision = kernel, precision
        size = hidden_size // num_heads
        self._row_shapes = {"memory": RowShape((num_heads, size, size), STATE_DTYPE)}
        self.qkvo = nn.Linear(input_size, 4 * hidden_size)
        self.gates = nn.Linear(input_size, 2 * num_heads)  # input gates, then forget gates
        self.out = nn.Linear(hidden_size, hidden_size)
        with torch.no_grad():  # heads that forget over about 20 to 400 steps
            self.gates.bias[num_heads:] = torch.linspace(3.0, 6.0, num_heads)
        if reset == "learned":
            self.initial_memory = nn.Parameter(torch.zeros(num_heads, size, size))

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}, num_heads={self.num_heads}, reset={self.reset!r}"

    def dtype_and_device(self) -> tuple[torch.dtype, torch.device]:
        return self.qkvo.weight.dtype, self.qkvo.weight.device

    def row_shapes(self) -> State:
        return self._row_shapes

    def initial_rows(self) -> State | None:
        return {"memory": self.initial_memory} if self.reset == "learned" else None

    def _step(self, x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor, State]:
        if resets is not None and self.reset != "never":
            other = state_ops.detach(state) if self.reset == "detach" else self.initial_state(resets.shape[0])
            state = state_ops.where(resets, other, state)
        inputs, output_gate = self._project(x)
        with without_autocast(x.device):
            y, memory = reference.mlstm.step(inputs, state["memory"], self._angles(x))
        return self._output(y, output_gate, x), {"memory": memory}

    def _sequence(self, x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor, State]:
        kernel = dispatch.by_name("mlstm", self.kernel)
        fill = self.initial_memory.to(STATE_DTYPE) if self.reset == "learned" else None
        rule = Resets(None if self.reset == "never" else resets, fill, None, self.reset == "detach")
        inputs, output_gate = self._project(x)
        with without_autocast(x.device):
            y, memory = kernel.sequence(inputs, state["memory"], rule, self._angles(x))
        return self._output(y, output_gate, x), {"memory": memory}

    def _angles(self, x: Tensor) -> Tensor:
        """By how much each plane of the keys turns per step, [heads, planes] float32: evenly from 0 to pi over all heads."""
        planes = (3 * (self.hidden_size // self.num_heads) + 4) // 8  # of channels in twos, three quarters
        count = planes * self.num_heads
        evenly = (torch.arange(count, dtype=STATE_DTYPE, device=x.device) + 0.5) * (math.pi / max(1, count))
        return evenly.view(planes, self.num_heads).t()

    def _project(self, x: Tensor) -> tuple[MatrixInputs, Tensor]:
        """What the memory reads, in float32, and the output gate, [..., H]."""
        q, k, v, output_gate = self.qkvo(x).chunk(4, -1)
        q, k, v = (part.to(STATE_DTYPE).unflatten(-1, (self.num_heads, -1)) for part in (q, k, v))
        i, f = self.gates(x).to(STATE_DTYPE).chunk(2, -1)
        return MatrixInputs(q, F.normalize(k, dim=-1), v, i.sigmoid(), F.logsigmoid(f)), output_gate

    def _output(self, y: Tensor, output_gate: Tensor, x: Tensor) -> Tensor:
        y = y.flatten(-2).to(output_gate.dtype)
        return self.out(output_gate.sigmoid() * y)
