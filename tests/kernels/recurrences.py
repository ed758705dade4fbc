"""Random arguments of one LSTM or GRU layer, and the comparison of a kernel with the float64 reference."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from holdfast.kernels import reference
from holdfast.kernels.operands import Resets, Weights

GATES = {"lstm": 4, "gru": 3}
RESETS = ("none", "random", "all")


@dataclass
class Layer:
    """The arguments of a kernel; `state` is (h, c) for an LSTM, (h,) for a GRU."""

    cell: str
    x: Tensor
    state: tuple[Tensor, ...]
    resets: Resets
    weights: Weights

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
        learned: bool = False,
        bias: bool = True,
        detach: bool = False,
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
            Resets(flags[resets], *[rand(H) if learned else None for _ in range(leaves)], detach=detach),
            Weights(rand(rows, I, scale=I**-0.5), rand(rows, H, scale=H**-0.5), *biases),
        )

    def tensors(self) -> dict[str, Tensor]:
        """Everything a gradient can be asked for, by name."""
        named = {"x": self.x, **dict(zip(("h0", "c0"), self.state)), "reset_h": self.resets.h, "reset_c": self.resets.c}
        return {name: value for name, value in (named | self.weights._asdict()).items() if value is not None}

    def with_tensors(self, tensors: dict[str, Tensor]) -> Layer:
        """The same layer on other tensors, named as in `tensors`."""
        return replace(
            self,
            x=tensors["x"],
            state=tuple(tensors[name] for name in ("h0", "c0")[: len(self.state)]),
            resets=self.resets._replace(h=tensors.get("reset_h"), c=tensors.get("reset_c")),
            weights=Weights(*[tensors.get(name) for name in Weights._fields]),  # type: ignore[arg-type]
        )

    def with_mask(self, mask: Tensor | None) -> Layer:
        return replace(self, resets=self.resets._replace(mask=mask))

    def to(self, dtype: torch.dtype, state_dtype: torch.dtype | None = None) -> Layer:
        """In another precision, leaves for gradients; the state may keep a wider one, as under autocast."""
        wide = ("h0", "c0", "reset_h", "reset_c")
        return self.with_tensors(
            {
                name: t.detach().to(state_dtype or dtype if name in wide else dtype, copy=True).requires_grad_()
                for name, t in self.tensors().items()
            }
        )

    def run(self, kernel: Any) -> tuple[Tensor, ...]:
        """y [T, B, H] and the final state. kernel: a folder of `holdfast.kernels`."""
        return getattr(kernel, self.cell).sequence(self.x, *self.state, self.resets, self.weights)

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
