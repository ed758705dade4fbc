"""`hf.LRU`: linear recurrent unit, complex numbers that turn and fade at trained rates.

    core = hf.LRU(64, 128)                 # in the trainer inside a Block: it is linear, the block's MLP is not
    y, state = core(x, state, resets)      # state {"re": [B, M], "im": [B, M]}, float32

    h = a h + gamma (B x)                  # a = exp(-exp(nu) + i exp(theta)), M complex numbers
    y = Re(C h) + D x

Each mode is a damped oscillation, so that together they hold a window of the past as a Fourier series does: good at
recalling what was seen a fixed time ago. The reference is Orvieto et al. 2023, "Resurrecting recurrent neural networks for
long sequences".
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from holdfast.cores.base import check_sizes
from holdfast.cores.linear_core import STATE_DTYPE, LinearCore, complex_state
from holdfast.state import State


class LRU(LinearCore):
    """Diagonal linear recurrence over complex numbers.

    modes: how many, by default twice the hidden size. They start with moduli between `min_radius` and `max_radius`, evenly
    over the ring. A quarter of them hardly turn: they hold what was seen, whenever that was. The phases of the others are
    evenly spaced up to `max_phase`: N of them tell 2 N steps of the past apart, where random ones leave gaps.
    """

    leaf_names = ("re", "im")

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        modes: int | None = None,
        min_radius: float = 0.9,
        max_radius: float = 0.999,
        max_phase: float = math.pi,
        reset: str = "zero",
        kernel: str = "auto",
        precision: str = "fast",
    ) -> None:
        modes = 2 * hidden_size if modes is None else modes
        check_sizes(input_size=input_size, hidden_size=hidden_size, modes=modes)
        if not 0 < min_radius <= max_radius < 1:
            raise ValueError(
                f"radii must be 0 < min_radius <= max_radius < 1, got {min_radius!r} and {max_radius!r}: "
                "a mode outside the unit circle grows without bound"
            )
        if not 0 < max_phase <= 2 * math.pi:
            raise ValueError(f"max_phase must be above 0 and at most 2 pi, got {max_phase!r}")
        super().__init__((modes,), reset, kernel, precision)
        self.input_size, self.output_size, self.hidden_size, self.modes = input_size, hidden_size, hidden_size, modes
        self.min_radius, self.max_radius, self.max_phase = min_radius, max_radius, max_phase
        self.nu, self.theta, self.log_gamma = (nn.Parameter(torch.empty(modes)) for _ in range(3))
        self.weight_in = nn.Parameter(torch.empty(2 * modes, input_size))  # B: real parts, then imaginary parts
        self.weight_out = nn.Parameter(torch.empty(hidden_size, 2 * modes))  # C, with the sign of its imaginary parts
        self.weight_skip = nn.Parameter(torch.empty(hidden_size, input_size))  # D
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Modes on the ring, products that keep the variance. Learned starts begin at 0."""
        low, high = self.min_radius**2, self.max_radius**2
        radius = torch.empty(self.modes).uniform_(low, high).sqrt_()
        self.set_radii_(radius)
        still = self.modes // 4
        evenly = (torch.arange(self.modes) + 0.5 - still) * (self.max_phase / (self.modes - still))
        self.theta.copy_(evenly.clamp_min(1e-4 * self.max_phase).log())
        nn.init.normal_(self.weight_in, std=1 / math.sqrt(2 * self.input_size))
        nn.init.normal_(self.weight_out, std=1 / math.sqrt(self.modes))
        nn.init.normal_(self.weight_skip, std=1 / math.sqrt(self.input_size))
        for leaf in self.leaf_names if self.reset == "learned" else ():
            nn.init.zeros_(getattr(self, f"initial_{leaf}"))

    @torch.no_grad()
    def set_radii_(self, radius: Tensor) -> None:
        """Give the modes these moduli, [M], and inputs that keep a mode's variance at that of what enters it."""
        self.nu.copy_(torch.log(-torch.log(radius)))
        self.log_gamma.copy_(0.5 * torch.log(1 - radius**2))

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}, modes={self.modes}, reset={self.reset!r}"

    def dtype_and_device(self) -> tuple[torch.dtype, torch.device]:
        return self.weight_in.dtype, self.weight_in.device

    def eigenvalues(self) -> Tensor:
        """The factor of each mode per step, [2 M] float32: real parts, then imaginary parts."""
        radius, phase = torch.exp(-torch.exp(self.nu.to(STATE_DTYPE))), torch.exp(self.theta.to(STATE_DTYPE))
        return torch.cat([radius * torch.cos(phase), radius * torch.sin(phase)])

    def _unroll(self, x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor, State, State]:
        dtype = self._compute_dtype(x)
        x = x.to(dtype)
        scale = torch.exp(self.log_gamma).repeat(2).unsqueeze(1)
        inputs = self._linear(x, scale * self.weight_in)  # [T, B, 2 M]
        start = torch.cat([state["re"], state["im"]], dim=-1)
        re, im = self._learned("re"), self._learned("im")
        fill = None if re is None or im is None else torch.cat([re, im])
        h, final = self._recur(self.eigenvalues(), inputs, start, resets, fill, "complex")
        y = self._linear(h.to(dtype), self.weight_out) + self._linear(x, self.weight_skip)
        return y, complex_state(self.leaf_names, final, (self.modes,)), dict(zip(self.leaf_names, h.chunk(2, dim=-1)))
