"""One recurrence to time: inputs, start state, resets, weights, and the float64 answer every contender must give.

A contender is built from a `Problem` and returns a `Contender`: a function that runs the forward, and the parameters
whose gradients it fills. What is timed is forward + backward from a fixed output gradient; what is checked is the
output and the gradients of input and weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from holdfast.kernels import reference
from holdfast.kernels.operands import Resets, Weights

# Relative to the largest element of the float64 answer. Far below what a wrong reset would cause (1e-2 and more).
TOLERANCE = 1e-4


class Mismatch(Exception):
    """A contender computes something else."""


@dataclass(frozen=True)
class Shape:
    """B environments, T steps, P(reset) per step and environment; input = hidden = `hidden`."""

    batch: int
    steps: int
    p: float
    hidden: int = 128

    @classmethod
    def parse(cls, text: str) -> Shape:
        """`64,128,.01` or `64,128,.01,256`."""
        parts = text.split(",")
        if len(parts) not in (3, 4):
            raise ValueError(f"a shape is B,T,P or B,T,P,H; got {text!r}")
        return cls(int(parts[0]), int(parts[1]), float(parts[2]), int(parts[3]) if len(parts) == 4 else 128)

    def __str__(self) -> str:
        hidden = "" if self.hidden == 128 else f", H={self.hidden}"
        return f"{self.batch}, {self.steps}, {self.p:g}{hidden}"


@dataclass
class Answer:
    """Output and gradients, by name."""

    tensors: dict[str, Tensor]

    def worst_difference(self, other: Answer) -> tuple[str, float]:
        """The tensor that differs most from `other`'s, relative to its largest element."""
        worst = ("", 0.0)
        for name, mine in self.tensors.items():
            theirs = other.tensors[name]
            difference = (mine.double() - theirs).abs().max() / theirs.abs().max().clamp_min(1e-30)
            value = float(difference) if bool(torch.isfinite(difference)) else float("inf")
            if value >= worst[1]:
                worst = (name, value)
        return worst


@dataclass
class Problem:
    """x [T, B, I] float32, start state [B, H] per leaf (not 0), resets [T, B], dy [T, B, H], and a torch.nn module."""

    cell: str
    shape: Shape
    with_resets: bool = True
    x: Tensor = field(init=False)
    dy: Tensor = field(init=False)
    start: tuple[Tensor, ...] = field(init=False)
    resets: Tensor = field(init=False)
    module: nn.RNNBase = field(init=False)

    def __post_init__(self) -> None:
        s = self.shape
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(s.steps, s.batch, s.hidden, generator=generator)
        self.dy = torch.randn(s.steps, s.batch, s.hidden, generator=generator) / s.steps
        leaves = 2 if self.cell == "lstm" else 1
        self.start = tuple(torch.randn(s.batch, s.hidden, generator=generator) for _ in range(leaves))
        self.resets = torch.rand(s.steps, s.batch, generator=generator) < s.p
        torch.manual_seed(1)
        self.module = (nn.LSTM if self.cell == "lstm" else nn.GRU)(s.hidden, s.hidden)

    def answer(self, with_resets: bool) -> Answer:
        """What the float64 reference says."""
        kernel = getattr(reference, self.cell)
        x = self.x.double().requires_grad_()
        weights = {n: p.detach().double().requires_grad_() for n, p in self.module.named_parameters()}
        resets = Resets(self.resets if with_resets else None)
        y, *_ = kernel.sequence(x, *[s.double() for s in self.start], resets, Weights(*weights.values()))
        y.backward(self.dy.double())
        return Answer({"y": y.detach(), "dx": x.grad, **{f"d {n}": w.grad for n, w in weights.items()}})


@dataclass
class Contender:
    """`forward(x)` gives y [T, B, H]; `parameters` by torch.nn's names receive gradients."""

    forward: Callable[[Tensor], Tensor]
    parameters: dict[str, Tensor]

    def run(self, problem: Problem) -> tuple[Tensor, Tensor]:
        """Forward and backward once: (y, x with its gradient)."""
        x = problem.x.detach().requires_grad_()
        for p in self.parameters.values():
            p.grad = None
        y = self.forward(x)
        y.backward(problem.dy)
        return y, x

    def answer(self, problem: Problem) -> Answer:
        y, x = self.run(problem)
        return Answer({"y": y.detach(), "dx": x.grad, **{f"d {n}": p.grad for n, p in self.parameters.items()}})


def by_name(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters())
