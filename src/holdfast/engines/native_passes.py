"""The passes of an `ActorCritic`'s parts as lists of prepared calls of C, in the order in which they run.

Everything stays where it is: a pass reads what its inputs hold when it runs, and writes where the next one reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from holdfast.cores import Core, Parallel
from holdfast.cores.gated import GatedCore
from holdfast.kernels.cpu import recurrence as native
from holdfast.kernels.cpu.perceptron import Perceptron, layers_of
from holdfast.kernels.operands import Gradients

Passes = list[Callable[[], object]]
GradientOf = Mapping[Tensor, Tensor]
"""Where the gradient of each parameter goes."""


def cores_by_head(core: Core) -> dict[str, Core]:
    """The cores by the name of the head that reads them; "" is read by both."""
    return dict(core.cores.items()) if isinstance(core, Parallel) else {"": core}  # type: ignore[arg-type]


class LayerPasses:
    """Linear layers, one after another; identity where there are none. x [N, I] -> out [N, O]."""

    def __init__(self, x: Tensor, passes: Passes, *modules: nn.Module) -> None:
        layers = [layer for module in modules for layer in layers_of(module) or []]
        self.parameters = [p for linear, _ in layers for p in (linear.weight, linear.bias)]
        self._prepared = Perceptron(layers).prepare(x) if layers else None
        self.out = x
        if self._prepared is not None:
            self.out = self._prepared.out
            passes.append(self._prepared.forward)

    def backward(self, d_out: Tensor, gradient_of: GradientOf, need_dx: bool, passes: Passes) -> Tensor | None:
        """Where the gradient of x will be, if needed."""
        if self._prepared is None:
            return d_out
        dx = self._prepared.prepare_backward(d_out, [gradient_of[p] for p in self.parameters], need_dx)
        passes.append(self._prepared.backward)
        return dx


class CorePasses:
    """The layers of an LSTM or a GRU; identity for a `Memoryless`. x [T, B, I] -> out [T, B, O]."""

    def __init__(self, core: Core, x: Tensor, state: Tensor | None, resets: Tensor, passes: Passes) -> None:
        self.core, self.out = core, x
        self._kept: list[native.Kept] = []
        if not isinstance(core, GatedCore):
            return
        assert state is not None  # [leaves, layers, B, H]
        for layer in range(core.num_layers):
            h, *c = state[:, layer].unbind()
            masked, weights = core.kernel_resets(layer, resets), core.weights(layer, x.dtype)
            kept, call = native.prepare_forward(self.out, h, c[0] if c else None, masked, weights)
            passes.append(call)
            self._kept.append(kept)
            self.out = kept.y

    def backward(self, d_out: Tensor, gradient_of: GradientOf, need_dx: bool, passes: Passes) -> Tensor | None:
        """Where the gradient of x will be, if needed."""
        core, d = self.core, d_out
        if not isinstance(core, GatedCore):
            return d
        for layer in reversed(range(core.num_layers)):
            kept = self._kept[layer]
            dx = torch.empty_like(kept.x) if need_dx or layer > 0 else None
            learned = [gradient_of[getattr(core, f"initial_{leaf}")][layer] for leaf in _learned(core)]
            reset_h, reset_c = [*learned, None, None][:2]
            of_weights = [gradient_of[getattr(core, name)] for name in core.parameter_names(layer)]
            w_ih, w_hh, b_ih, b_hh = [*of_weights, None, None][:4]
            gradients = Gradients(dx, None, None, reset_h, reset_c, w_ih, w_hh, b_ih, b_hh)
            passes.append(native.prepare_backward(d, kept, gradients))
            if dx is not None:
                d = dx
        return d if need_dx else None


def _learned(core: GatedCore) -> tuple[str, ...]:
    return core.leaf_names if core.reset == "learned" else ()


def sum_of(a: Tensor | None, b: Tensor | None, passes: Passes) -> Tensor | None:
    """Where the sum will be; None counts as 0."""
    if a is None or b is None:
        return b if a is None else a
    out = torch.empty_like(a)
    passes.append(lambda: torch.add(a, b, out=out))
    return out
