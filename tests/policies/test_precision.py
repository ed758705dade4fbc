"""One autocast for everybody: a dtype switches it on, None leaves things alone."""

from __future__ import annotations

import torch

from holdfast.policies.base import autocast


def test_products_are_computed_in_the_given_dtype():
    x = torch.ones(2, 2)
    for device in ("cpu", torch.device("cpu")):
        with autocast(device, torch.bfloat16):
            assert (x @ x).dtype == torch.bfloat16
        with autocast(device, None):
            assert (x @ x).dtype == torch.float32


def test_none_does_not_switch_off_what_the_caller_switched_on():
    x = torch.ones(2, 2)
    with torch.autocast("cpu", torch.bfloat16), autocast("cpu", None):
        assert (x @ x).dtype == torch.bfloat16
