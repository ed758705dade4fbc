"""Runs the Triton linear recurrence in Triton's interpreter on the CPU and prints its errors as JSON.

A script of its own, run by triton_interpreter.run (TRITON_INTERPRET=1, `tests` on the path). It does not set the variable itself,
because pytest imports this file to look for doctests.
"""

import json
import sys

import torch

import triton_interpreter
from holdfast.kernels import gpu
from kernels.linear_problems import FORMS, Problem

CASES = {
    "no resets": {"size": (5, 3, 6), "resets": None},
    "lanes that fill no program": {"size": (9, 7, 22), "resets": 0.3},
    "one step, one row": {"size": (1, 1, 2), "resets": 0.5},
    "reset at every step": {"size": (6, 2, 4), "resets": 1.0},
    "learned start": {"size": (8, 3, 6), "resets": 0.4, "learned": True},
    "detached gradients": {"size": (7, 3, 6), "resets": 0.4, "detach": True},
}

if __name__ == "__main__":
    triton_interpreter.accept_arrays_as_numbers()
    triton_interpreter.check_memory()
    torch.set_num_threads(1)
    errors = {}
    for form, per_channel in FORMS:
        for name, case in CASES.items():
            worst = Problem(form, per_channel, **case).worst_error(gpu.linear.sequence, torch.float32)
            errors[f"{form} {per_channel}: {name}"] = worst
    json.dump(errors, sys.stdout)
