"""The recurrences: one readable reference, and one folder per way to run it. `dispatch` chooses between them.

`reference/` is the specification and `portable/` runs anywhere; `cpu/` is C, `gpu/` is CUDA C++ (linear: Triton). Each folder
has one module per recurrence, `lstm`, `gru` and `linear`, with the function `sequence` and, where it is faster, `step`.
`operands` names their arguments; `operators` gives them autograd, through `gated_operator` and `linear_operator`. `linear.py` holds
`linear_recurrence` for cells of your own.
"""
