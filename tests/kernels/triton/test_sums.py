"""Sums of products in fp32 stay sums: what Triton's compiler makes of the kernels, without a GPU."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")

POINTERS = {"obs": "*i64", "actions": "*i64", "columns": "*i64", "part": "*i32", "choice": "*i32", "bounds": "*i32"}
NUMBERS = {"rows": "i32", "size": "i32", "batch": "i32", "start": "i32", "value_coef": "fp32", "clip_value": "fp32"}


def products(kernel: Any, warps: int, **constants: Any) -> int:
    """How many products on tensor cores the compiled kernel has. Constants include the arguments that are None."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {**POINTERS, **NUMBERS}
    signature = {name: "constexpr" if name in constants else types.get(name, "*fp32") for name in kernel.arg_names}
    compiled = triton.compile(
        ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}
    )
    return compiled.asm["ttgir"].count("tt.dot") + compiled.asm["ttgir"].count("warp_group_dot")


def first_layer(few: bool, rows: int, warps: int, features: int = 128) -> int:
    from holdfast.kernels.triton.first_layer import backward_kernel

    return products(
        backward_kernel, warps, shift=None, scale=None, obs2=None, part2=None, choice2=None, shift2=None, scale2=None, D=4,
        DP=4 if few else 16, PARTS=1, ONE_HOT=True, D2=0, PARTS2=0, ONE_HOT2=False, F=features, FP=features, ACTIVATION=0,
        FEW=few, BLOCK=rows,
    )  # fmt: skip


def loss(few: bool, rows: int, warps: int, outputs: int = 4) -> int:
    from holdfast.kernels.triton.outputs import loss_kernel

    return products(
        loss_kernel, warps, log_std=None, center=None, half_range=None, valid=None, F=128, FP=128, A=outputs,
        KP=8 if few else 16, HEADS=1, KIND=0, CLIP_VALUE=False, FEW=few, MANY=False, BLOCK=rows,
    )  # fmt: skip


def act(few: bool, rows: int, warps: int) -> int:
    from holdfast.kernels.triton.outputs import act_kernel

    return products(
        act_kernel, warps, log_std=None, center=None, half_range=None, value_mean=None, value_std=None, F=128, FP=128, A=4,
        KP=8 if few else 16, HEADS=1, KIND=0, FEW=few, MANY=False, BLOCK=rows,
    )  # fmt: skip


@pytest.mark.parametrize(("kernel", "rows"), [(first_layer, 8), (loss, 4), (act, 8)])
def test_few_columns_are_summed_without_tensor_cores(kernel: Any, rows: int):
    assert kernel(True, rows, 1) == 0
    assert kernel(False, 16, 4) > 0, "the test sees products where there are some"


def test_a_tile_that_the_compiler_would_make_a_product_of_is_refused():
    from holdfast.kernels.triton.tiles import Tile

    assert Tile(8, 1).for_sums() == Tile(8, 1)
    with pytest.raises(ValueError, match="a tile of sums has 16 rows; it must have fewer than 16"):
        Tile(16, 2).for_sums()
