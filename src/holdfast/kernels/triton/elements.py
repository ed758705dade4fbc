"""Functions inside the Triton kernels that both cells use."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scale_from_amax(amax_bits):
    """A power of two that brings the amax to [1/16, 1/8), and its inverse; 1 if that is 0 or not finite."""
    exponent = (amax_bits >> 23) & 0xFF
    usable = (exponent > 0) & (exponent < 250)
    scale = tl.where(usable, (250 - exponent) << 23, 127 << 23).to(tl.float32, bitcast=True)
    inverse = tl.where(usable, (exponent + 4) << 23, 127 << 23).to(tl.float32, bitcast=True)
    return scale, inverse


@triton.jit
def tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def load_gate_bias(bias, first, unit, mask):
    """The bias of one gate, [1, HP] fp32; zero if absent."""
    value = tl.zeros(unit.shape, tl.float32)
    if bias is not None:
        value += tl.load(bias + first + unit, mask=mask, other=0.0).to(tl.float32)
    return value[None, :]


@triton.jit
def load_reset_value(values, unit, mask):
    """The state that a reset row starts from, [1, HP] fp32; zeros if absent."""
    value = tl.zeros(unit.shape, tl.float32)
    if values is not None:
        value += tl.load(values + unit, mask=mask, other=0.0).to(tl.float32)
    return value[None, :]
