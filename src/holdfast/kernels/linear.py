"""`linear_recurrence`: h[t] = a[t] h[t-1] + b[t] over a sequence with resets, for cells of your own.

>>> import torch
>>> b = torch.ones(4, 1, 2)
>>> resets = torch.tensor([False, False, True, False]).view(4, 1)
>>> h, last = linear_recurrence(torch.tensor([1.0, 0.5]), b, torch.zeros(1, 2), resets)
>>> h[:, 0].tolist()
[[1.0, 1.0], [2.0, 1.5], [1.0, 1.0], [2.0, 1.5]]
"""

from __future__ import annotations

from torch import Tensor

from holdfast.checks import check_resets
from holdfast.kernels import dispatch
from holdfast.kernels.operands import Resets

FORMS = ("real", "complex")


def linear_recurrence(
    a: Tensor,
    b: Tensor,
    h0: Tensor,
    resets: Tensor | None = None,
    fill: Tensor | None = None,
    *,
    form: str = "real",
    detach_at_reset: bool = False,
    kernel: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The state after every step, [T, B, W], and the last one, [B, W]. Differentiable in a, b, h0 and fill.

    a: [T, B, W], or [W] if it is the same for all steps and rows. b: [T, B, W]. h0: [B, W]. resets: bool [T, B]; before
    step t a flagged row's state is replaced by `fill` [W] (None: zeros), or with `detach_at_reset` only its gradient
    stops. form: "real", or "complex" for W / 2 complex numbers, first all real parts, then all imaginary parts.
    kernel: "auto", or a name from `holdfast.kernels.dispatch`.
    """
    if form not in FORMS:
        raise ValueError(f"unknown form {form!r}; 'real' or 'complex'")
    if b.dim() != 3 or b.shape[0] == 0:
        raise ValueError(f"b has shape {tuple(b.shape)}, expected [T, B, W] with at least one step")
    T, B, W = b.shape
    if form == "complex" and W % 2:
        raise ValueError(f"b has {W} features; complex numbers take an even number: real parts, then imaginary parts")
    for name, tensor, shapes in (("a", a, ((T, B, W), (W,))), ("h0", h0, ((B, W),)), ("fill", fill, ((W,),))):
        if tensor is None:
            continue
        if tuple(tensor.shape) not in shapes:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, expected {' or '.join(map(str, shapes))} next to b "
                f"{tuple(b.shape)}"
            )
        if tensor.dtype != b.dtype or tensor.device != b.device:
            raise ValueError(
                f"{name} is {tensor.dtype} on {tensor.device}, b {b.dtype} on {b.device}; convert one of them"
            )
    if resets is not None:
        check_resets(resets, (T, B), b.device)
    return dispatch.choose_linear(kernel, b).sequence(a, b, h0, Resets(resets, fill, None, detach_at_reset), form)
