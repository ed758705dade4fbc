"""LSTM and GRU over a whole sequence in plain torch, for any device and float dtype. Needs no compiler.

The input projection is one product for all T. The loop over time holds only what is recurrent and writes into
preallocated tensors. The backward is written by hand: everything that does not depend on the recurrence is done for many
steps at once, and each weight gradient is one product. `reference/` specifies what is computed.
"""

from holdfast.kernels.portable import gru, linear, lstm, mlstm, window

__all__ = ["gru", "linear", "lstm", "mlstm", "window"]
