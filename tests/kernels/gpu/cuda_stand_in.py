"""Stands in for `holdfast.kernels.cuda.gated_layer` without a GPU: the reference on a CPU, in any dtype."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from holdfast.kernels import reference
from holdfast.kernels.cuda.padding import padded_size
from holdfast.kernels.cuda.plans import Saved, kept_layout
from holdfast.kernels.operands import Gradients, Resets, Weights


class StandIn:
    """Has the functions of the module. A forward's arguments are remembered by the tensor it keeps for its backward."""

    def __init__(self) -> None:
        self.sizes: list[int] = []  # hidden sizes of the forwards
        self._kept: dict[int, tuple[Tensor, Any]] = {}

    def forward(
        self, x: Tensor, h0: Tensor, c0: Tensor | None, resets: Resets, weights: Weights, save: bool
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        gate_rows, hidden = weights.w_hh.shape
        assert hidden == padded_size(hidden) and not resets.detach
        self.sizes.append(hidden)
        steps, batch, inputs = x.shape
        with torch.no_grad():
            y, h_n, *c_n = _run(x, h0, c0, resets, weights)
        kept = None
        if save:
            size = kept_layout(steps * batch, inputs, hidden, gate_rows // hidden)[2]
            kept = torch.zeros(size, dtype=torch.float16)
            self._kept[kept.data_ptr()] = kept, (x, h0, c0, resets, weights)
        return y, h_n.clone(), c_n[0].clone() if c_n else None, kept

    def backward(
        self,
        dy: Tensor | None,
        dh_n: Tensor | None,
        dc_n: Tensor | None,
        saved: Saved,
        need_x: bool,
        need_state: bool,
        need_reset: bool,
    ) -> Gradients:
        x, h0, c0, resets, weights = self._kept.pop(saved.kept.data_ptr())[1]
        if resets.mask is None and saved.mask is not None:  # the reset mode is "detach"
            resets = Resets(saved.mask, detach=True)
        bias = torch.zeros_like(weights.w_hh[:, 0])
        given = [x, h0, c0, resets.h, resets.c, weights.w_ih, weights.w_hh, weights.b_ih, weights.b_hh]
        given[7:] = [bias if b is None else b for b in given[7:]]
        leaves = [None if t is None else t.detach().clone().requires_grad_() for t in given]
        x, h0, c0, reset_h, reset_c, *rest = leaves
        wanted = [leaf for leaf in leaves if leaf is not None]

        def differentiate() -> tuple[Tensor | None, ...]:
            outputs = _run(x, h0, c0, resets._replace(h=reset_h, c=reset_c), Weights(*rest))
            used = [(o, d) for o, d in zip(outputs, (dy, dh_n, dc_n)) if d is not None]
            return torch.autograd.grad([o for o, _ in used], wanted, [d for _, d in used], allow_unused=True)

        with ThreadPoolExecutor(1) as thread:  # inside an operator, a thread has no autograd
            found = iter(thread.submit(differentiate).result())
        grads = [None if leaf is None else _or_zeros(next(found), leaf) for leaf in leaves]
        needs = (need_x, need_state, need_state, need_reset, need_reset, True, True, True, True)
        return Gradients(*[grad if need else None for grad, need in zip(grads, needs)])


def _run(x: Tensor, h0: Tensor, c0: Tensor | None, resets: Resets, weights: Weights) -> tuple[Tensor, ...]:
    if c0 is None:
        return reference.gru.sequence(x, h0, resets, weights)
    return reference.lstm.sequence(x, h0, c0, resets, weights)


def _or_zeros(grad: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if grad is None else grad
