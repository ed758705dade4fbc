"""The boundary to C: a wrong call is refused in Python, and by C itself where it can tell."""

from __future__ import annotations

import ctypes
import re
from typing import Any

import pytest
import torch

from holdfast.kernels.cpu import build, library, linear, update

pytestmark = pytest.mark.skipif(library.load().handle is None, reason="no native kernel")

T, B, I, H = 3, 2, 5, 4


def arguments(cell: str = "lstm") -> dict[str, torch.Tensor]:
    gates = 4 if cell == "lstm" else 3
    tensors = dict(x=torch.randn(T, B, I), h0=torch.randn(B, H), w_ih=torch.randn(gates * H, I))
    tensors |= dict(w_hh=torch.randn(gates * H, H), y=torch.empty(T, B, H), h_n=torch.empty(B, H))
    return tensors | (dict(c0=torch.randn(B, H), c_n=torch.empty(B, H)) if cell == "lstm" else {})


WRONG = {
    "too small": lambda t: t.flatten()[:-1],
    "too large": lambda t: torch.cat([t.flatten(), t.flatten()]),
    "double": lambda t: t.double(),
    "not contiguous": lambda t: torch.stack([t, t], -1)[..., 0],
    "elsewhere": lambda t: t.to("meta"),
}


@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("wrong", WRONG)
def test_an_array_of_another_size_dtype_device_or_layout_never_reaches_c(cell: str, wrong: str):
    library.PreparedCall("forward", False, arguments(cell))()
    for name in arguments(cell):
        if name in ("x", "w_hh") and wrong.startswith("too"):
            continue  # they say what the sizes are
        tensors = arguments(cell)
        tensors[name] = WRONG[wrong](tensors[name])
        with pytest.raises(ValueError, match="the native kernel takes"):
            library.PreparedCall("forward", False, tensors)


@pytest.mark.parametrize("call", ["forward", "backward", "step"])
def test_a_missing_array_is_named(call: str):
    for name in ("x", "h0", "w_ih", "w_hh", "y"):
        tensors = arguments()
        del tensors[name]
        with pytest.raises(ValueError, match=rf"the native kernel's {call} needs {name}"):
            library.PreparedCall(call, False, tensors)


JOBS: dict[str, Any] = {
    "forward": library._RecurrenceJob, "backward": library._RecurrenceJob, "step": library._RecurrenceJob,
    "perceptron_forward": update._PerceptronJob, "perceptron_backward": update._PerceptronJob,
    "linear_forward": linear._LinearJob, "linear_backward": linear._LinearJob,
    "objective": update._ObjectiveJob, "adam": update._AdamJob,
}  # fmt: skip
INVALID_JOB = 3


def test_every_function_of_c_refuses_a_job_without_arrays_or_with_negative_sizes():
    exported = re.findall(r"^EXPORT int (?:holdfast_)(\w+)\(", (build.SOURCES / "holdfast.c").read_text(), re.M)
    assert set(exported) == JOBS.keys()
    handle = library.load().handle
    for name, kind in JOBS.items():
        sizes = [field for field, c_type in kind._fields_ if c_type is ctypes.c_int64]
        for size in (-1, 1, 5):
            job = kind()
            for field in sizes:
                setattr(job, field, size)
            assert getattr(handle, f"holdfast_{name}")(ctypes.byref(job)) == INVALID_JOB, (name, size)


def test_the_gradient_of_a_perceptrons_input_is_right_for_an_input_that_is_not_contiguous():
    linear = torch.nn.Linear(4, 3)
    chain = update.Perceptron([(linear, 0)], torch.randn(4, 6).t())
    gradients = [torch.empty_like(p) for p in linear.parameters()]
    dx = chain.prepare_backward(torch.ones(6, 3), gradients, need_dx=True)
    chain.forward()
    chain.backward()
    torch.testing.assert_close(dx, torch.ones(6, 3) @ linear.weight.detach())
    with pytest.raises(ValueError, match=r"zip\(\) argument 2 is longer"):
        chain.prepare_backward(torch.ones(6, 3), gradients[:1], need_dx=True)
    with pytest.raises(ValueError, match="d_out is"):
        chain.prepare_backward(torch.ones(2, 3), gradients, need_dx=True)
