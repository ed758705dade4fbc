"""A chain of linear layers with activations on a CPU in float32: one call of C forward, one backward.

For small batches, where torch spends most of its time in calls. There is no autograd here; `engines/native.py` calls
both passes itself.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from holdfast.kernels.cpu import library

MAX_LAYERS = 8
ACTIVATIONS: dict[type[nn.Module], int] = {nn.Identity: 0, nn.Tanh: 1, nn.ReLU: 2}

_Pointers = ctypes.c_void_p * MAX_LAYERS


class _PerceptronJob(ctypes.Structure):
    """`Perceptron` in c/job.h, field by field."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "layers", "threads")),
        ("sizes", ctypes.c_int64 * (MAX_LAYERS + 1)),
        ("activation", ctypes.c_int64 * MAX_LAYERS),
        ("x", ctypes.c_void_p),
        *((name, _Pointers) for name in ("w", "b", "out")),
        *((name, ctypes.c_void_p) for name in ("d_out", "dx")),
        *((name, _Pointers) for name in ("dw", "db")),
    ]


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
    """Runs layers as `layers_of` returns them; at least one."""

    def __init__(self, layers: Sequence[tuple[nn.Linear, int]]) -> None:
        self.linears = [linear for linear, _ in layers]
        self.sizes = [self.linears[0].in_features, *[linear.out_features for linear in self.linears]]
        self._sizes = (ctypes.c_int64 * (MAX_LAYERS + 1))(*self.sizes)
        self._codes = (ctypes.c_int64 * MAX_LAYERS)(*[code for _, code in layers])
        self._products = sum(a * b for a, b in zip(self.sizes, self.sizes[1:]))

    def forward(self, x: Tensor) -> list[Tensor]:
        """x [N, sizes[0]] -> the output of every layer; the last is the result."""
        job, kept = self._job(x)
        outputs = [x.new_empty(x.shape[0], size) for size in self.sizes[1:]]
        job.out = _Pointers(*[out.data_ptr() for out in outputs])
        self.call("forward", job)
        del kept
        return outputs

    def backward(self, d_out: Tensor, x: Tensor, outputs: list[Tensor], need_dx: bool) -> Tensor | None:
        """The gradient of x, if needed. Gradients of the layers are written to their parameters' `grad`."""
        job, kept = self._job(x)
        rows = x.shape[0]
        if len(outputs) != len(self.linears):
            raise ValueError(f"{len(outputs)} outputs came for {len(self.linears)} layers")
        d_out, outputs = d_out.contiguous(), [out.contiguous() for out in outputs]
        job.out = _Pointers(*[_address(out, rows * size, "an output") for out, size in zip(outputs, self.sizes[1:])])
        job.d_out = _address(d_out, rows * self.sizes[-1], "d_out")
        dx = x.new_empty(x.shape) if need_dx else None  # contiguous, whatever x is
        job.dx = None if dx is None else dx.data_ptr()
        dw = [torch.empty_like(linear.weight, memory_format=torch.contiguous_format) for linear in self.linears]
        db = [torch.empty_like(linear.bias) for linear in self.linears]
        job.dw, job.db = _Pointers(*[d.data_ptr() for d in dw]), _Pointers(*[d.data_ptr() for d in db])
        self.call("backward", job)
        del kept
        for linear, of_weight, of_bias in zip(self.linears, dw, db):
            linear.weight.grad, linear.bias.grad = of_weight, of_bias
        return dx

    def prepare(self, x: Tensor) -> PreparedPerceptron:
        """Passes over an x [N, sizes[0]], contiguous, that stays where it is."""
        return PreparedPerceptron(self, *self._job(x))

    def _job(self, x: Tensor) -> tuple[_PerceptronJob, list[Tensor]]:
        """The sizes and inputs of a call, and the tensors that must live as long as the call."""
        rows = x.shape[0]
        kept = [x.contiguous()]
        pointers = [_address(kept[0], rows * self.sizes[0], "x")]
        for number, linear in enumerate(self.linears):
            size = self.sizes[number + 1]
            weight, bias = linear.weight.contiguous(), linear.bias.contiguous()
            kept += [weight, bias]
            pointers += [_address(weight, self.sizes[number] * size, "weight"), _address(bias, size, "bias")]
        threads = library.threads_for(rows // 32, rows * self._products)
        job = _PerceptronJob(rows, len(self.linears), threads, self._sizes, self._codes, pointers[0])
        job.w, job.b = _Pointers(*pointers[1::2]), _Pointers(*pointers[2::2])
        return job, kept

    def call(self, which: str, job: _PerceptronJob) -> None:
        """Run a pass, "forward" or "backward"."""
        handle = library.load().handle
        assert handle is not None
        if status := getattr(handle, f"holdfast_perceptron_{which}")(ctypes.byref(job)):
            raise library.failure(status, f"{job.rows} rows of layers {self.sizes}")


class PreparedPerceptron:
    """Passes that can be repeated: all tensors stay where they are. `out` is the output of the last layer."""

    def __init__(self, perceptron: Perceptron, job: _PerceptronJob, kept: list[Tensor]) -> None:
        x = kept[0]
        outputs = [x.new_empty(job.rows, size) for size in perceptron.sizes[1:]]
        job.out = _Pointers(*[out.data_ptr() for out in outputs])
        self.out, self._x = outputs[-1], x
        self._perceptron, self._job, self._kept = perceptron, job, [*kept, *outputs]

    def forward(self) -> None:
        self._perceptron.call("forward", self._job)

    def prepare_backward(self, d_out: Tensor, gradients: Sequence[Tensor], need_dx: bool) -> Tensor | None:
        """Where `backward` will find the gradient of `out`, and where it leaves those of weights and biases, in the order of
        the layers. Returns where it leaves the gradient of x, if needed."""
        sizes, job = self._perceptron.sizes, self._job
        dx = torch.empty_like(self._x) if need_dx else None
        job.d_out = _address(d_out, job.rows * sizes[-1], "d_out")
        job.dx = None if dx is None else dx.data_ptr()
        counts = [count for a, b in itertools.pairwise(sizes) for count in (a * b, b)]
        addresses = [_address(g, count, "a gradient") for g, count in zip(gradients, counts, strict=True)]
        job.dw, job.db = _Pointers(*addresses[::2]), _Pointers(*addresses[1::2])
        self._kept += [d_out, *gradients]
        return dx

    def backward(self) -> None:
        self._perceptron.call("backward", self._job)


def _address(tensor: Tensor, elements: int, name: str) -> int:
    return library.address(tensor, elements, torch.float32, name)
