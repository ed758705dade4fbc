"""Kernels that leave their tensors by one number, with the interpreter's check of memory; prints what it says as JSON.

A script of its own, run by triton_interpreter.run (TRITON_INTERPRET=1, `tests` on the path).
"""

import json
import sys

import torch
import triton
import triton.language as tl

import triton_interpreter


@triton.jit
def copy_kernel(source, target, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(target + i, tl.load(source + i, mask=i < n, other=0.0), mask=i < n)


if __name__ == "__main__":
    triton_interpreter.check_memory()
    room = torch.zeros(3, 16)  # what is next to the tensors exists, so only a check notices
    said = {}
    for name, read, written in (("fits", 7, 7), ("reads", 6, 7), ("writes", 7, 6)):
        try:
            copy_kernel[(1,)](room[0, :read], room[1, :written], 7, BLOCK=8)
            said[name] = ""
        except Exception as error:
            said[name] = str(error)
    json.dump(said, sys.stdout)
