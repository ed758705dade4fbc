"""torch.optim.Adam's step and the gradient clipping before it, in one call of C.

With a small network torch's bookkeeping around both takes several times as long as the arithmetic. The state stays in
the torch optimizer.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from holdfast.kernels.cpu import library

# With more parameters torch's threads save more than its bookkeeping costs.
_MAX_PARAMETERS = 4_000_000


class _AdamJob(ctypes.Structure):
    """`Adam` in c/job.h, field by field."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("tensors", "step")),
        *((name, ctypes.c_void_p) for name in ("count", "parameter", "mean", "square", "gradient")),
        *((name, ctypes.c_double) for name in ("rate", "beta1", "beta2", "eps", "max_norm")),
        *((name, ctypes.c_void_p) for name in ("norm", "steps_taken")),
    ]


class NativeAdam:
    """Steps for an optimizer with one parameter group that has taken its first step, so that its state exists."""

    def __init__(self, optimizer: torch.optim.Adam, parameters: list[torch.nn.Parameter]) -> None:
        self.group = optimizer.param_groups[0]
        self.parameters = parameters
        states = [optimizer.state[p] for p in parameters]
        self._steps = [state["step"] for state in states]
        self.count = int(self._steps[0])
        addresses = [library.address(step, 1, torch.float32, "Adam's step") for step in self._steps]
        self._step_pointers = (ctypes.c_void_p * len(addresses))(*addresses)
        self._gradients: list[Tensor | None] = []  # of the last step, and where they are
        self._kept = [p.data for p in parameters], *([s[name] for s in states] for name in ("exp_avg", "exp_avg_sq"))
        self._pointers = [_addresses(tensors, parameters) for tensors in self._kept]
        self._sizes = (ctypes.c_int64 * len(parameters))(*[p.numel() for p in parameters])
        self._norm = ctypes.c_double()

    @staticmethod
    def try_create(optimizer: torch.optim.Adam, parameters: list[torch.nn.Parameter]) -> NativeAdam | None:
        """None unless it is plain Adam on contiguous float32 tensors that have all taken the same number of steps."""
        states = [optimizer.state.get(p, {}) for p in parameters]
        if not all(states) or len(optimizer.param_groups) != 1 or sum(p.numel() for p in parameters) > _MAX_PARAMETERS:
            return None
        group = optimizer.param_groups[0]
        plain = not (group["weight_decay"] or group["amsgrad"] or group["maximize"])
        for p, state in zip(parameters, states):
            for name in ("exp_avg", "exp_avg_sq"):
                if state[name].shape != p.shape:
                    raise ValueError(
                        f"the optimizer's {name} has shape {list(state[name].shape)}, its parameter {list(p.shape)}"
                    )
        tensors = [t for p, state in zip(parameters, states) for t in (p, state["exp_avg"], state["exp_avg_sq"])]
        contiguous = all(t.dtype is torch.float32 and t.is_cpu and t.is_contiguous() for t in tensors)
        in_step = len({float(state["step"]) for state in states}) == 1
        return NativeAdam(optimizer, parameters) if plain and contiguous and in_step else None

    @torch.no_grad()
    def step(self, max_norm: float) -> float:
        """Takes one step and returns the norm of the gradients; no step is taken if that is not finite."""
        gradients = [p.grad for p in self.parameters]
        if len(self._gradients) != len(gradients) or any(a is not b for a, b in zip(gradients, self._gradients)):
            self._gradients = gradients
            self._contiguous = [_checked(g, p) for g, p in zip(gradients, self.parameters)]
            self._gradient_pointers = _addresses(self._contiguous, self.parameters)
            if any(g is not c for g, c in zip(gradients, self._contiguous)):
                self._gradients = []  # a copy was made: make one of the next step's, too
        beta1, beta2 = self.group["betas"]
        job = _AdamJob(
            len(gradients), self.count + 1, ctypes.addressof(self._sizes),
            *[ctypes.addressof(pointers) for pointers in (*self._pointers, self._gradient_pointers)],
            float(self.group["lr"]), beta1, beta2, self.group["eps"], max_norm, ctypes.addressof(self._norm),
            ctypes.addressof(self._step_pointers),
        )  # fmt: skip
        handle = library.load().handle
        assert handle is not None
        if status := handle.holdfast_adam(ctypes.byref(job)):
            raise library.failure(status, f"{len(gradients)} parameters")
        norm = self._norm.value
        if abs(norm) < float("inf"):
            self.count += 1
        return norm


def _addresses(tensors: list[Tensor], parameters: list[torch.nn.Parameter]) -> ctypes.Array[ctypes.c_void_p]:
    checked = [library.address(t, p.numel(), torch.float32, "Adam's tensor") for t, p in zip(tensors, parameters)]
    return (ctypes.c_void_p * len(tensors))(*checked)


def _checked(gradient: Tensor | None, parameter: Tensor) -> Tensor:
    """The gradient, contiguous."""
    if gradient is None or gradient.shape != parameter.shape:
        raise ValueError(f"a parameter of shape {list(parameter.shape)} has no gradient of its shape")
    return gradient.contiguous()
