"""TorchRL's Triton LSTM as a contender of `gpu_recurrence.py`, where TorchRL is installed.

Its kernels are called directly, without TensorDict. Its first call tunes for a minute or two.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class TorchRL:
    """Forward, and forward + backward, of one LSTM layer with resets; inputs as in `gpu_problem.Contender`."""

    def __init__(self, shape: tuple[int, int, int], rate: float) -> None:
        from torchrl.modules.tensordict_module._rnn_triton import lstm_triton

        B, T, H = shape
        torch.manual_seed(0)
        module = torch.nn.LSTM(H, H).cuda()
        weights = [module.weight_ih_l0, module.weight_hh_l0, module.bias_ih_l0, module.bias_hh_l0]
        x = torch.randn(B, T, H, device="cuda", requires_grad=True)
        start = torch.zeros(B, T, H, device="cuda")  # what each reset resets to
        resets = torch.rand(B, T, device="cuda") < rate
        self.inputs, self.gradient = [x, *weights], torch.randn(B, T, H, device="cuda")
        self.forward: Callable[[], Tensor] = lambda: lstm_triton(
            x, start, start, *weights, resets, input_precision="tf32"
        )[0]

    def both(self) -> tuple[Tensor, ...]:
        """Gradients of the input and all weights."""
        return torch.autograd.grad(self.forward(), self.inputs, self.gradient)


def torchrl_contender(shape: tuple[int, int, int], rate: float) -> TorchRL | None:
    """None where TorchRL is not installed or has no such kernels."""
    try:
        return TorchRL(shape, rate)
    except ImportError:
        return None
