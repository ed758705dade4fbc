"""`hf.FFM`: fast and forgetful memory, traces of the past that all fade at their own rates and turn at their own pitches.

    core = hf.FFM(64, 128)                 # in the trainer inside a Block
    y, state = core(x, state, resets)      # state {"re": [B, M, C], "im": [B, M, C]}, float32

    s = exp(-alpha_m + i omega_c) s + (W x) sigmoid(W' x)     # M memories in C contexts; the input enters every context
    y = g norm(V [Re s, Im s]) + (1 - g) (U x)                # g = sigmoid(W'' x)

M rates and C pitches make M * C complex numbers with M + C parameters. The reference is Morad et al. 2023, "Reinforcement
learning with fast and forgetful memory".
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.cores.base import check_sizes
from holdfast.cores.linear_core import STATE_DTYPE, LinearCore, complex_state
from holdfast.state import State

# A fresh memory fades to 1/e over this many steps, and turns once over this many: spread evenly in the logarithm.
_SHORTEST, _LONGEST = 2.0, 1024.0


class FFM(LinearCore):
    """memory_size: number of memories, each with a decay rate. context_size: frequencies at which each memory rotates."""

    leaf_names = ("re", "im")

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        memory_size: int = 32,
        context_size: int = 4,
        reset: str = "zero",
        kernel: str = "auto",
        precision: str = "fast",
    ) -> None:
        check_sizes(input_size=input_size, hidden_size=hidden_size, memory_size=memory_size, context_size=context_size)
        super().__init__((memory_size, context_size), reset, kernel, precision)
        self.input_size, self.output_size, self.hidden_size = input_size, hidden_size, hidden_size
        self.memory_size, self.context_size = memory_size, context_size
        self.log_alpha = nn.Parameter(torch.empty(memory_size))
        self.log_omega = nn.Parameter(torch.empty(context_size))
        # Inputs and their gate [M each], the gate of the output and what passes by the memory [H each].
        self.weight_in = nn.Parameter(torch.empty(2 * memory_size + 2 * hidden_size, input_size))
        self.bias_in = nn.Parameter(torch.empty(2 * memory_size + 2 * hidden_size))
        self.weight_out = nn.Parameter(torch.empty(hidden_size, 2 * memory_size * context_size))
        self.bias_out = nn.Parameter(torch.empty(hidden_size))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Rates and pitches for 2 to 1024 steps, weights uniform within 1/sqrt(inputs). Learned starts begin at 0."""
        low, high = math.log(_SHORTEST), math.log(_LONGEST)
        self.log_alpha.copy_(-torch.linspace(low, high, self.memory_size))
        self.log_omega.copy_(math.log(2 * math.pi) - torch.linspace(low, high, self.context_size))
        for weight, bias in ((self.weight_in, self.bias_in), (self.weight_out, self.bias_out)):
            bound = 1 / math.sqrt(weight.shape[1])
            nn.init.uniform_(weight, -bound, bound)
            nn.init.zeros_(bias)
        for leaf in self.leaf_names if self.reset == "learned" else ():
            nn.init.zeros_(getattr(self, f"initial_{leaf}"))

    def extra_repr(self) -> str:
        sizes = f"memory_size={self.memory_size}, context_size={self.context_size}"
        return f"{self.input_size}, {self.hidden_size}, {sizes}, reset={self.reset!r}"

    def dtype_and_device(self) -> tuple[torch.dtype, torch.device]:
        return self.weight_in.dtype, self.weight_in.device

    def eigenvalues(self) -> Tensor:
        """The factor of each number per step, [2 M C] float32: real parts, then imaginary parts."""
        radius = torch.exp(-torch.exp(self.log_alpha.to(STATE_DTYPE))).unsqueeze(1)  # [M, 1]
        phase = torch.exp(self.log_omega.to(STATE_DTYPE))  # [C]
        return torch.cat([(radius * torch.cos(phase)).flatten(), (radius * torch.sin(phase)).flatten()])

    def _unroll(self, x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor, State, State]:
        (T, B, _), M, H, C = x.shape, self.memory_size, self.hidden_size, self.context_size
        x = x.to(self._compute_dtype(x))
        entering, gate, pass_by, around = self._linear(x, self.weight_in, self.bias_in).split([M, M, H, H], dim=-1)
        entering = (entering * torch.sigmoid(gate)).to(STATE_DTYPE)
        real = entering.unsqueeze(-1).expand(T, B, M, C).reshape(T, B, M * C)
        inputs = torch.cat([real, torch.zeros_like(real)], dim=-1)  # [T, B, 2 M C]
        start = torch.cat([state["re"].flatten(1), state["im"].flatten(1)], dim=-1)
        re, im = self._learned("re"), self._learned("im")
        fill = None if re is None or im is None else torch.cat([re.flatten(), im.flatten()])
        s, final = self._recur(self.eigenvalues(), inputs, start, resets, fill, "complex")
        read = self._linear(s.to(x.dtype), self.weight_out, self.bias_out)
        gate = torch.sigmoid(pass_by)
        y = gate * F.layer_norm(read, (H,)) + (1 - gate) * around
        names, row = self.leaf_names, (M, C)
        return (
            y,
            complex_state(names, final, row),
            {name: half.unflatten(-1, row) for name, half in zip(names, s.chunk(2, dim=-1))},
        )
