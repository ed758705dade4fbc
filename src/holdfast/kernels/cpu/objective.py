"""PPO's clipped objective for a categorical policy and its gradient, in one call of C instead of forty torch operations.

Computes the loss of `algorithms/ppo.py` with the distribution of `policies/heads.py`.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.cpu import library

_POINTERS = ("logits", "chosen", "value", "old_log_prob", "old_value", "advantage", "returns", "valid")
_UNKNOWN_ACTION = 2  # a status, see c/job.h
_NUMBERS = ("clip_range", "clip_value", "entropy_coef", "value_coef")


class _ObjectiveJob(ctypes.Structure):
    """`Objective` in c/job.h, field by field."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "actions")),
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_double) for name in _NUMBERS),
        *((name, ctypes.c_void_p) for name in ("d_logits", "d_value", "terms")),
    ]


class StoredSteps(NamedTuple):
    """What the rollout stored, [N] each. `valid` None: every step counts."""

    log_prob: Tensor
    value: Tensor
    advantage: Tensor
    returns: Tensor
    valid: Tensor | None


def clipped(
    logits: Tensor,
    chosen: Tensor,
    value: Tensor,
    old: StoredSteps,
    coefficients: tuple[float, float | None, float, float],
) -> tuple[Tensor, Tensor, Tensor]:
    """logits [N, A], chosen [N] int64 from 0, value [N] -> d_logits, d_value, and loss, policy loss, value loss, entropy,
    KL and the fraction clipped in one tensor [6]. If the loss is not finite, neither is the gradient.

    coefficients: clip_range, clip_value, entropy_coef, value_coef.
    """
    call = PreparedObjective(logits, chosen, value, old, coefficients)
    call()
    return call.d_logits, call.d_value, call.terms


class PreparedObjective:
    """`clipped` as a call that can be repeated, if its tensors are contiguous and stay where they are."""

    def __init__(
        self,
        logits: Tensor,
        chosen: Tensor,
        value: Tensor,
        old: StoredSteps,
        coefficients: tuple[float, float | None, float, float],
    ) -> None:
        clip_range, clip_value, entropy_coef, value_coef = coefficients
        rows, actions = logits.shape
        tensors = [tensor.contiguous() for tensor in (logits, chosen, value, *old) if tensor is not None]
        pointers = []
        for name, tensor in zip(_POINTERS, tensors):
            elements = rows * actions if name == "logits" else rows
            dtype = {"chosen": torch.int64, "valid": torch.bool}.get(name, torch.float32)
            pointers.append(library.address(tensor, elements, dtype, name))
        self.d_logits, self.d_value = torch.empty_like(tensors[0]), torch.empty_like(tensors[2])
        self.terms, self._kept = logits.new_empty(6), tensors
        self._job = _ObjectiveJob(
            rows, actions, *pointers, *[None] * (len(_POINTERS) - len(pointers)), clip_range,
            -1.0 if clip_value is None else clip_value, entropy_coef, value_coef, self.d_logits.data_ptr(),
            self.d_value.data_ptr(), self.terms.data_ptr(),
        )  # fmt: skip

    def __call__(self) -> None:
        handle = library.load().handle
        assert handle is not None
        rows, actions = self._job.rows, self._job.actions
        status = handle.holdfast_objective(ctypes.byref(self._job))
        if status == _UNKNOWN_ACTION:
            raise IndexError(f"an action is not among the {actions} that the policy has")
        if status:
            raise library.failure(status, f"{rows} rows of {actions} actions")
