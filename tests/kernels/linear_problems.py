"""Random arguments of a linear recurrence, and the comparison of a kernel with the float64 reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from holdfast.kernels import reference
from holdfast.kernels.operands import Resets

# (form, whether a is the same for all steps and rows)
FORMS = (("real", False), ("real", True), ("complex", False), ("complex", True), ("gated", False))


@dataclass
class Problem:
    """resets: the probability of a reset, None for no flags. learned: the fill is not zero."""

    form: str
    per_channel: bool
    size: tuple[int, int, int]  # T, B, W
    resets: float | None = 0.2
    learned: bool = False
    detach: bool = False
    seed: int = 0
    device: str = "cpu"
    tensors: dict[str, Tensor] = field(init=False)
    mask: Tensor | None = field(init=False)

    def __post_init__(self) -> None:
        T, B, W = self.size
        g = torch.Generator().manual_seed(self.seed)

        def rand(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g, dtype=torch.float64)

        self.tensors = {"b": rand(T, B, 2 * W if self.form == "gated" else W), "h0": rand(B, W)}
        if self.form != "gated":  # of modulus below 1, most of them close to it
            a = rand(W) if self.per_channel else rand(T, B, W)
            re, im = a.chunk(2, -1) if self.form == "complex" else (a, torch.zeros_like(a))
            radius = torch.tanh(3 * torch.hypot(re, im)) / torch.hypot(re, im)
            self.tensors["a"] = a * (torch.cat([radius, radius], -1) if self.form == "complex" else radius)
        if self.learned:
            self.tensors["fill"] = rand(W)
        self.mask = None if self.resets is None else torch.rand(T, B, generator=g) < self.resets
        self.weights = [rand(T, B, W), rand(B, W)]

    def answer(self, sequence: Any, dtype: torch.dtype) -> dict[str, Tensor]:
        """Outputs, and the gradients of a fixed random weighting of them."""
        leaves = {n: t.to(self.device, dtype, copy=True).requires_grad_() for n, t in self.tensors.items()}
        mask = None if self.mask is None else self.mask.to(self.device)
        resets = Resets(mask, leaves.get("fill"), None, self.detach)
        outputs = sequence(leaves.get("a"), leaves["b"], leaves["h0"], resets, self.form)
        loss = sum((o * w.to(self.device, dtype)).sum() for o, w in zip(outputs, self.weights))
        gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        results = {"h": outputs[0].detach(), "h_n": outputs[1].detach()}
        for (name, leaf), gradient in zip(leaves.items(), gradients):
            results[f"d {name}"] = torch.zeros_like(leaf) if gradient is None else gradient
        return results

    def worst_error(self, sequence: Any, dtype: torch.dtype) -> tuple[float, str]:
        """Of `sequence` in `dtype` against the float64 reference, relative to the largest element; and of what."""
        self.tensors = {n: t.to(dtype).double() for n, t in self.tensors.items()}  # the same, rounded numbers
        self.weights = [w.to(dtype).double() for w in self.weights]
        got, expected = self.answer(sequence, dtype), self.answer(reference.linear.sequence, torch.float64)
        errors = [(relative_error(got[name], expected[name]), name) for name in expected]
        return max(errors)


def relative_error(got: Tensor, expected: Tensor) -> float:
    assert got.shape == expected.shape and torch.isfinite(got).all()
    scale = expected.abs().max().item() or 1.0
    return (got.double() - expected.double()).abs().max().item() / scale
