"""Runs the Triton recurrences in Triton's interpreter on the CPU and prints their errors as JSON.

A script of its own, run by triton_interpreter.run (TRITON_INTERPRET=1, `tests` on the path). It does not set the variable itself,
because pytest imports this file to look for doctests.
"""

import json
import sys

import torch

import triton_interpreter
from holdfast.kernels import gpu, reference
from holdfast.kernels.operands import Resets, Weights

CASES = {
    "no resets": {"size": (5, 3, 7, 16), "rate": None},
    "rows and units that fill no tile": {"size": (4, 19, 5, 24), "rate": 0.3},
    "one step, one row": {"size": (1, 1, 8, 8), "rate": 0.5},
    "a wide layer": {"size": (2, 5, 8, 100), "rate": 0.1},
    "reset at every step": {"size": (4, 5, 6, 20), "rate": 1.0},
    "learned start": {"size": (4, 5, 6, 20), "rate": 0.4, "learned": True},
    "detached gradients": {"size": (4, 5, 6, 20), "rate": 0.4, "detach": True},
    "huge gradients": {"size": (3, 4, 6, 16), "rate": 0.2, "gradient": 1e9},
    "tiny gradients": {"size": (3, 4, 6, 16), "rate": 0.2, "gradient": 1e-12},
}


def inputs(
    gates: int, size: tuple[int, int, int, int], rate: float | None, learned: bool
) -> dict[str, torch.Tensor | None]:
    T, B, I, H = size
    g = torch.Generator().manual_seed(T + 10 * B + 100 * H)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g)

    def uniform(*shape: int) -> torch.Tensor:
        return (2 * torch.rand(*shape, generator=g) - 1) * H**-0.5

    values: dict[str, torch.Tensor | None] = {"x": normal(T, B, I), "h0": 0.5 * normal(B, H)}
    if gates == 4:
        values["c0"] = normal(B, H)
    values["resets"] = None if rate is None else torch.rand(T, B, generator=g) < rate
    values["reset_h"] = 0.3 * normal(H) if learned else None
    if gates == 4:
        values["reset_c"] = 0.3 * normal(H) if learned else None
    weights = {"w_ih": uniform(gates * H, I), "w_hh": uniform(gates * H, H)}
    return values | weights | {"b_ih": uniform(gates * H), "b_hh": uniform(gates * H)}


def outcome(folder, kind, values, dtype, detach, gradient) -> dict[str, torch.Tensor | None]:  # type: ignore[no-untyped-def]
    leaves = {
        k: v if v is None or v.dtype == torch.bool else v.to(dtype, copy=True).requires_grad_()
        for k, v in values.items()
    }
    resets = Resets(leaves["resets"], leaves["reset_h"], leaves.get("reset_c"), detach)
    weights = Weights(*[leaves[name] for name in Weights._fields])
    state = [leaves[name] for name in ("h0", "c0") if name in leaves]
    outputs = getattr(folder, kind).sequence(leaves["x"], *state, resets, weights)
    g = torch.Generator().manual_seed(1)
    weights = [gradient * torch.randn(o.shape, generator=g).to(o.dtype) for o in outputs]
    torch.autograd.backward(outputs, weights)
    results: dict[str, torch.Tensor | None] = dict(zip(("y", "h_n", "c_n"), (o.detach() for o in outputs)))
    return results | {"d_" + k: v.grad for k, v in leaves.items() if v is not None and v.dtype != torch.bool}


def largest_error(kind: str, size, rate, learned=False, detach=False, gradient=1e-4) -> float:  # type: ignore[no-untyped-def]
    """Max abs error / max abs reference, over outputs and gradients; infinite where one is missing or not finite."""
    values = inputs(4 if kind == "lstm" else 3, size, rate, learned)
    expected = outcome(reference, kind, values, torch.float64, detach, gradient)
    got = outcome(gpu, kind, values, torch.float32, detach, gradient)
    worst = 0.0
    for name, reference_value in expected.items():
        value = got[name]
        if reference_value is None or not reference_value.any():
            assert value is None or not value.any(), name
            continue
        if value is None or not value.isfinite().all():
            return float("inf")
        worst = max(worst, float((value.double() - reference_value).abs().max() / reference_value.abs().max()))
    return worst


if __name__ == "__main__":
    triton_interpreter.accept_arrays_as_numbers()
    triton_interpreter.check_memory()
    torch.set_num_threads(1)
    json.dump(
        {f"{kind}: {name}": largest_error(kind, **case) for kind in ("lstm", "gru") for name, case in CASES.items()},
        sys.stdout,
    )
