"""The parts of an update in C, without autograd, on a CPU in float32: linear layers, PPO's objective, Adam with clipping.

For small batches, where torch spends most of its time in calls: a chain of layers is one call forward and one backward; the
clipped objective of a categorical policy and its gradient (`algorithms/ppo.py`) one call instead of forty operations; clipping
and `torch.optim.Adam`'s step one call. `engines/native.py` calls them.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from holdfast.kernels.cpu import library

MAX_LAYERS = library.MAX_LAYERS
ACTIVATIONS: dict[type[nn.Module], int] = {nn.Identity: 0, nn.Tanh: 1, nn.ReLU: 2}

_Pointers = ctypes.c_void_p * MAX_LAYERS


_PerceptronJob = library.struct("Perceptron")


def layers_of(module: nn.Module) -> list[tuple[nn.Linear, int]] | None:
    """The linear layers of `module`, each with the code of the activation after it; None if it is not supported.
    Supported: what `encoders.mlp` builds, and a single linear layer."""
    parts = list(module) if type(module) is nn.Sequential else [module]
    layers: list[tuple[nn.Linear, int]] = []
    for part in parts:
        if type(part) is nn.Linear and part.bias is not None:
            layers.append((part, 0))
        elif type(part) in ACTIVATIONS and layers and layers[-1][1] == 0:
            layers[-1] = (layers[-1][0], ACTIVATIONS[type(part)])
        else:
            return None
    return layers if len(layers) <= MAX_LAYERS else None


class Perceptron:
    """Passes of layers, as `layers_of` returns them (at least one), over an x [N, I], contiguous. They can be repeated: all tensors
    stay where they are. `out` is the output of the last layer.
    """

    def __init__(self, layers: Sequence[tuple[nn.Linear, int]], x: Tensor) -> None:
        linears = [linear for linear, _ in layers]
        rows, self.sizes = x.shape[0], [linears[0].in_features, *[linear.out_features for linear in linears]]
        outputs = [x.new_empty(rows, size) for size in self.sizes[1:]]
        self.out, self._x = outputs[-1], x.contiguous()
        weights, biases = (
            [linear.weight.contiguous() for linear in linears],
            [linear.bias.contiguous() for linear in linears],
        )
        self._kept = [self._x, *weights, *biases, *outputs]  # C knows only their addresses
        products = [a * b for a, b in itertools.pairwise(self.sizes)]
        job = self._job = _PerceptronJob(rows, len(linears), library.threads_for(rows // 32, rows * sum(products)))
        job.sizes[: len(self.sizes)] = self.sizes
        job.activation[: len(layers)] = [code for _, code in layers]
        job.x = _address(self._x, rows * self.sizes[0], "x")
        job.w = _Pointers(*[_address(w, count, "weight") for w, count in zip(weights, products)])
        job.b = _Pointers(*[_address(b, count, "bias") for b, count in zip(biases, self.sizes[1:])])
        job.out = _Pointers(*[out.data_ptr() for out in outputs])

    def forward(self) -> None:
        self._call("forward")

    def prepare_backward(self, d_out: Tensor, gradients: Sequence[Tensor], need_dx: bool) -> Tensor | None:
        """Where `backward` will find the gradient of `out`, and where it leaves those of weights and biases, in the order of
        the layers. Returns where it leaves the gradient of x, if needed."""
        sizes, job = self.sizes, self._job
        dx = torch.empty_like(self._x) if need_dx else None
        job.d_out = _address(d_out, job.rows * sizes[-1], "d_out")
        job.dx = None if dx is None else dx.data_ptr()
        counts = [count for a, b in itertools.pairwise(sizes) for count in (a * b, b)]
        addresses = [_address(g, count, "a gradient") for g, count in zip(gradients, counts, strict=True)]
        job.dw, job.db = _Pointers(*addresses[::2]), _Pointers(*addresses[1::2])
        self._kept += [d_out, *gradients]
        return dx

    def backward(self) -> None:
        self._call("backward")

    def _call(self, which: str) -> None:
        handle = library.load().handle
        assert handle is not None
        if status := getattr(handle, f"holdfast_perceptron_{which}")(ctypes.byref(self._job)):
            raise library.failure(status, f"{self._job.rows} rows of layers {self.sizes}")


def _address(tensor: Tensor, elements: int, name: str) -> int:
    return library.address(tensor, elements, torch.float32, name)


_POINTERS = ("logits", "chosen", "value", "old_log_prob", "old_value", "advantage", "returns", "valid")
_UNKNOWN_ACTION = 2  # a status, see c/job.h
_ObjectiveJob = library.struct("Objective")


class StoredSteps(NamedTuple):
    """What the rollout stored, [N] each. `valid` None: every step counts."""

    log_prob: Tensor
    value: Tensor
    advantage: Tensor
    returns: Tensor
    valid: Tensor | None


class PreparedObjective:
    """PPO's objective as a call that can be repeated, if its tensors are contiguous and stay where they are.

    logits [N, A], chosen [N] int64 from 0, value [N] -> `d_logits`, `d_value`, and in `terms` [6] loss, policy loss, value loss,
    entropy, KL and the fraction clipped. If the loss is not finite, neither is the gradient.
    coefficients: clip_range, clip_value, entropy_coef, value_coef.
    """

    def __init__(
        self,
        logits: Tensor,
        chosen: Tensor,
        value: Tensor,
        old: StoredSteps,
        coefficients: tuple[float, float | None, float, float],
    ) -> None:
        clip_range, clip_value, entropy_coef, value_coef = coefficients
        rows, actions = logits.shape
        tensors = [tensor.contiguous() for tensor in (logits, chosen, value, *old) if tensor is not None]
        pointers = []
        for name, tensor in zip(_POINTERS, tensors):
            elements = rows * actions if name == "logits" else rows
            dtype = {"chosen": torch.int64, "valid": torch.bool}.get(name, torch.float32)
            pointers.append(library.address(tensor, elements, dtype, name))
        self.d_logits, self.d_value = torch.empty_like(tensors[0]), torch.empty_like(tensors[2])
        self.terms, self._kept = logits.new_empty(6), tensors
        self._job = _ObjectiveJob(
            rows, actions, *pointers, *[None] * (len(_POINTERS) - len(pointers)), clip_range,
            -1.0 if clip_value is None else clip_value, entropy_coef, value_coef, self.d_logits.data_ptr(),
            self.d_value.data_ptr(), self.terms.data_ptr(),
        )  # fmt: skip

    def __call__(self) -> None:
        handle = library.load().handle
        assert handle is not None
        rows, actions = self._job.rows, self._job.actions
        status = handle.holdfast_objective(ctypes.byref(self._job))
        if status == _UNKNOWN_ACTION:
            raise IndexError(f"an action is not among the {actions} that the policy has")
        if status:
            raise library.failure(status, f"{rows} rows of {actions} actions")


# With more parameters torch's threads save more than its bookkeeping costs.
_MAX_PARAMETERS = 4_000_000


_AdamJob = library.struct("Adam")


class NativeAdam:
    """Steps for an optimizer with one parameter group that has taken its first step, so that its state exists."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter]) -> None:
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
    def try_create(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter]) -> NativeAdam | None:
        """None unless it is plain Adam on contiguous float32 tensors that have all taken the same number of steps."""
        states = [optimizer.state.get(p, {}) for p in parameters]
        other = type(optimizer) is not torch.optim.Adam or len(optimizer.param_groups) != 1
        if other or not all(states) or sum(p.numel() for p in parameters) > _MAX_PARAMETERS:
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
