"""A memory of your own: a recurrent trace unit, complex numbers that turn and fade, with gates around the recurrence.

    python examples/own_memory.py
    holdfast train --env holdfast/RepeatPreviousEasy-v0 --core own_memory:RTU        # in this folder

`Loop` writes one step; the library resets the state and loops over time. `RTU` is the same cell with the recurrence of a whole
segment in one call, `hf.linear_recurrence`. The page is docs/own_memory.md, the speed of both is benchmarks/own_core.py.
"""

from __future__ import annotations

import math
import sys

import torch
from torch import Tensor, nn

import holdfast as hf


class Loop(hf.Core):
    """h = a h + W x with complex a, y = gate(x) * out(relu(h)). The state holds real parts, then imaginary parts."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.input_size, self.output_size = input_size, hidden_size
        self.into, self.out = nn.Linear(input_size, 2 * hidden_size), nn.Linear(2 * hidden_size, hidden_size)
        self.gate = nn.Linear(input_size, hidden_size)
        self.decay = nn.Parameter(torch.empty(hidden_size).uniform_(-6, -1))  # log of minus the log of the radius
        self.angle = nn.Parameter(torch.linspace(0, math.pi, hidden_size))

    def row_shapes(self) -> dict[str, hf.RowShape]:
        return {"h": hf.RowShape((2 * self.output_size,))}

    def factors(self) -> tuple[Tensor, Tensor]:
        radius = torch.exp(-torch.exp(self.decay))
        return radius * torch.cos(self.angle), radius * torch.sin(self.angle)

    def step(self, x: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        (a, b), (re, im), (u, v) = self.factors(), state["h"].chunk(2, -1), self.into(x).chunk(2, -1)
        h = torch.cat([a * re - b * im + u, b * re + a * im + v], -1)
        return self.read(h, x), {"h": h}

    def read(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.sigmoid(self.gate(x)) * self.out(torch.relu(h))


class RTU(Loop):
    """The same numbers, without a loop in Python."""

    def sequence(self, x: Tensor, state: dict[str, Tensor], resets: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        a = torch.cat(self.factors())
        h, last = hf.linear_recurrence(a, self.into(x), state["h"], resets, form="complex")  # [T, B, 2 H]
        return self.read(h, x), {"h": last}


def main(arguments: list[str]) -> dict[str, float]:
    env = hf.envs.make("holdfast/RepeatPreviousEasy-v0", num_envs=1)
    policy = hf.ActorCritic(env.single_observation_space, env.single_action_space, RTU, 64)
    steps = int(arguments[0]) if arguments else 200_000
    config = hf.PPOConfig.preset("repeat-previous-easy", total_steps=steps, quiet=True, tensorboard=False)
    return {"mean_return": hf.Trainer(config, policy=policy).run().mean_return}


if __name__ == "__main__":
    print(main(sys.argv[1:]))
