"""`hf.MLSTM`: an LSTM whose memory is a matrix per head, written by keys and read by queries.

    core = hf.MLSTM(64, 128)
    y, state = core(x, state, resets)      # state {"memory": [B, heads, 32, 32] float32, "position": [B] int32}

    C = f C + i v k^T;   y = out(o * limited(C q))

What was written under a key is found again by a query like it, however long ago, as long as forget gates stay open. Three
quarters of keys and queries turn with the step's position in its episode, each plane at its own pace: by these a query can
ask for what was seen a given number of steps ago. Without them, a memory that is a sum has no order.

Gates are sigmoids and keys have length 1, so the memory needs no running maximum and no normalizer. A step and a chunk of
steps agree to float32's digits, over thousands of steps too: positions are whole numbers, and what is read is limited
(x / sqrt(1 + mean(x^2)) per head), so that rounding errors do not grow with what is stored. The reference is Beck et al. 2024,
"xLSTM: extended long short-term memory".
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast import state as state_ops
from holdfast.cores.base import Core, RowShape, check_heads, check_precision, check_reset_mode, check_sizes
from holdfast.kernels import dispatch, reference
from holdfast.kernels.autocast import without_autocast
from holdfast.kernels.operands import MatrixInputs, Resets
from holdfast.state import State

STATE_DTYPE = torch.float32
MAX_READ_RMS = 1.0
"""Root mean square that what a head reads comes close to, however much it has stored. Smaller numbers stay as they are."""


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
        check_heads(hidden_size, num_heads)
        self.input_size, self.hidden_size, self.output_size = input_size, hidden_size, hidden_size
        self.num_heads, self.reset = num_heads, check_reset_mode(reset)
        self.kernel, self.precision = dispatch.known_kernel(kernel, dispatch.PURE_TORCH), check_precision(precision)
        size = hidden_size // num_heads
        planes = (3 * size + 4) // 8  # three quarters of a key's channels, in twos
        self._period = max(1, 4 * planes * num_heads)
        self._row_shapes = {
            "memory": RowShape((num_heads, size, size), STATE_DTYPE),
            "position": RowShape((), torch.int32),
        }
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
        if self.reset != "learned":
            return None
        return {"memory": self.initial_memory, "position": self.initial_memory.new_zeros((), dtype=torch.int32)}

    def _step(self, x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor, State]:
        if resets is not None and self.reset != "never":
            other = state_ops.detach(state) if self.reset == "detach" else self.initial_state(resets.shape[0])
            state = state_ops.where(resets, other, state)
        position = (state["position"] + 1) % self._period
        inputs, output_gate = self._project(x, position)
        with without_autocast(x.device):
            y, memory = reference.mlstm.step(inputs, state["memory"])
        return self._output(y, output_gate), {"memory": memory, "position": position}

    def _sequence(self, x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor, State]:
        kernel = dispatch.by_name("mlstm", self.kernel)
        fill = self.initial_memory.to(STATE_DTYPE) if self.reset == "learned" else None
        rule = Resets(None if self.reset == "never" else resets, fill, None, self.reset == "detach")
        positions = self._positions(state["position"], x.shape[0], None if rule.detach else rule.mask)
        inputs, output_gate = self._project(x, positions)
        with without_autocast(x.device):
            y, memory = kernel.sequence(inputs, state["memory"], rule)
        return self._output(y, output_gate), {"memory": memory, "position": positions[-1].clone()}

    def _positions(self, start: Tensor, T: int, resets: Tensor | None) -> Tensor:
        """The position of each step in its episode, as `_step` counts them from `start` [B]: [T, B]."""
        steps = torch.arange(1, T + 1, dtype=torch.int32, device=start.device).unsqueeze(1)
        if resets is None:
            return (start + steps) % self._period
        began = (
            torch.where(resets, steps, 0).cummax(0).values
        )  # the step of the last reset, counted from 1; 0: none yet
        return torch.where(began > 0, steps - began + 1, start + steps) % self._period

    def _project(self, x: Tensor, position: Tensor) -> tuple[MatrixInputs, Tensor]:
        """What the memory reads, in float32, and the output gate, [..., H]. position [...]: of each step in its episode."""
        both, v, output_gate = self.qkvo(x).split([2 * self.hidden_size, self.hidden_size, self.hidden_size], -1)
        both = both.to(STATE_DTYPE).unflatten(-1, (2, self.num_heads, -1))
        q, k = _turned(both, *self._turns(position.unsqueeze(-1))).unbind(-3)
        v = v.to(STATE_DTYPE).unflatten(-1, (self.num_heads, -1))
        i, f = self.gates(x).to(STATE_DTYPE).chunk(2, -1)
        return MatrixInputs(q, F.normalize(k, dim=-1), v, i.sigmoid(), F.logsigmoid(f)), output_gate

    def _turns(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the angle of each plane at a position: [..., heads, planes] float32.

        Plane n of N turns by (2 n + 1) / 4 N of a circle per step, so that after 4 N steps all are where they began, and whole
        numbers say where they are: no error piles up however long the episode.
        """
        planes = self._period // (4 * self.num_heads)
        odd = torch.arange(1, 2 * planes * self.num_heads + 1, 2, dtype=torch.int32, device=position.device)
        odd = odd.view(planes, self.num_heads).t()  # each head has slow and fast ones
        angle = (position[..., None, None] * odd % self._period).to(STATE_DTYPE) * (2 * math.pi / self._period)
        return angle.cos(), angle.sin()

    def _output(self, y: Tensor, output_gate: Tensor) -> Tensor:
        y = y * torch.rsqrt(1 + y.square().mean(-1, keepdim=True) / MAX_READ_RMS**2)
        y = y.flatten(-2).to(output_gate.dtype)
        return self.out(output_gate.sigmoid() * y)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., d] with its first 2 P channels turned back: channels c and P + c are a plane. cos and sin [..., P]."""
    P = cos.shape[-1]
    one, other, rest = x.split([P, P, x.shape[-1] - 2 * P], dim=-1)
    return torch.cat([one * cos + other * sin, other * cos - one * sin, rest], dim=-1)
