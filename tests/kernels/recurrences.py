"""Random arguments of one LSTM or GRU layer, and the comparison of a kernel with the float64 reference."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from holdfast.kernels import reference

GATES = {"lstm": 4, "gru": 3}
RESETS = ("none", "random", "all")


@dataclass
class Layer:
    """What a kernel takes; `state` and `fills` are (h, c) for an LSTM, (h,) for a GRU."""

    cell: str
    x: Tensor
    state: tuple[Tensor, ...]
    resets: Tensor | None
    fills: tuple[Tensor | None, ...]
    weights: tuple[Tensor | None, ...]
    cut: bool = False

    @classmethod
    def random(
        cls,
        cell: str,
        T: int,
        B: int,
        I: int,
        H: int,
        *,
        resets: str = "random",
        fill: bool = False,
        bias: bool = True,
        cut: bool = False,
        seed: int = 0,
        dtype: torch.dtype = torch.float64,
    ) -> Layer:
        g = torch.Generator().manual_seed(seed)

        def rand(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=g, dtype=torch.float64) * scale).to(dtype)

        leaves, rows = (2 if cell == "lstm" else 1), GATES[cell] * H
        flags = {"none": None, "all": torch.ones(T, B, dtype=torch.bool), "random": torch.rand(T, B, generator=g) < 0.2}
        biases = (rand(rows, scale=0.3), rand(rows, scale=0.3)) if bias else (None, None)
        return cls(
            cell,
            rand(T, B, I),
            tuple(rand(B, H) for _ in range(leaves)),
            flags[resets],
            tuple(rand(H) if fill else None for _ in range(leaves)),
            (rand(rows, I, scale=I**-0.5), rand(rows, H, scale=H**-0.5), *biases),
            cut,
        )

    def tensors(self) -> dict[str, Tensor]:
        """Everything a gradient can be asked for, by name."""
        names = ["x", *[f"state{i}" for i in range(len(self.state))], *[f"fill{i}" for i in range(len(self.fills))]]
        values = [self.x, *self.state, *self.fills, *self.weights]
        names += ["w_ih", "w_hh", "b_ih", "b_hh"]
        return {name: value for name, value in zip(names, values) if value is not None}

    def to(self, dtype: torch.dtype, state_dtype: torch.dtype | None = None) -> Layer:
        """In another precision, leaves for gradients; the state may keep a wider one, as under autocast."""

        def leaf(t: Any, d: torch.dtype) -> Any:
            return None if t is None else t.detach().to(d, copy=True).requires_grad_()

        wide = state_dtype or dtype
        return replace(
            self,
            x=leaf(self.x, dtype),
            state=tuple(leaf(s, wide) for s in self.state),
            fills=tuple(leaf(f, wide) for f in self.fills),
            weights=tuple(leaf(w, dtype) for w in self.weights),
        )

    def run(self, kernel: Any) -> tuple[Tensor, ...]:
        """y [T, B, H] and the final state."""
        fn = getattr(kernel, self.cell)
        return fn(self.x, *self.state, self.resets, *self.fills, *self.weights, cut=self.cut)

    def answer(self, kernel: Any) -> dict[str, Tensor]:
        """Outputs and all gradients of a fixed random weighting of the outputs."""
        outputs = self.run(kernel)
        g = torch.Generator().manual_seed(7)
        loss = sum((o.double() * torch.randn(o.shape, generator=g, dtype=torch.float64)).sum() for o in outputs) / len(
            self.x
        )
        inputs = self.tensors()
        grads = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True)
        result = {f"out{i}": o.detach() for i, o in enumerate(outputs)}
        for (name, value), grad in zip(inputs.items(), grads):
            result[f"d {name}"] = torch.zeros_like(value) if grad is None else grad
        return result


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest element; the expected may be all zero, then the largest difference."""
    assert got.shape == expected.shape and torch.isfinite(got).all()
    scale = expected.abs().max().item() or 1.0
    return (got.double() - expected.double()).abs().max().item() / scale


def assert_matches_reference(
    kernel: Any, layer: Layer, dtype: torch.dtype, tolerance: float, state_dtype: torch.dtype | None = None
) -> None:
    """Outputs and gradients in `dtype` against the reference in float64 on the same (rounded) numbers."""
    mine = layer.to(dtype, state_dtype)
    expected = mine.to(torch.float64).answer(reference)
    for name, value in mine.answer(kernel).items():
        error = relative_error(value, expected[name])
        assert error <= tolerance, f"{name} is off by {error:.2e} of its maximum"
