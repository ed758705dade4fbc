"""The specification of each recurrence: a plain loop over time in any dtype, differentiated by autograd.

Every fast kernel computes exactly these functions, with the same arguments, and is tested against them in float64.
Nothing here is meant to be fast.

Shapes of one layer: x [T, B, I]; h0, c0 [B, H]; `Resets` and `Weights` as in `operands`. Returns y [T, B, H] and the
final state.

Resets: before step t, rows with resets.mask[t, b] continue from (resets.h, resets.c) instead of their state. With
`resets.detach` the values go on and only their gradient stops.

Dtypes: x and the weights share one dtype D. The state has dtype S, which is D or wider (autocast: D half, S float32).
Products run in D, the pointwise part and the carried state in S, and y is in D.
"""

from holdfast.kernels.reference import gru, linear, lstm, mlstm, window

__all__ = ["gru", "linear", "lstm", "mlstm", "window"]
