"""Copies of agents that hold more than a policy: optimizers, buffers, the distribution of their last call."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, TypeVar

import torch

from holdfast.doctor.subjects.base import Subject, memo_without_graphs

Kind = TypeVar("Kind", bound=Subject)


def copy_without(subject: Kind, dropped: Iterable[Any], shared: Iterable[Any] = ()) -> Kind:
    """A deep copy. `dropped` becomes None, and so does the last distribution of each module, which may hold a graph.

    `shared`: what the copy never writes to.
    """
    memo = memo_without_graphs(subject)
    held = [x for model in subject.modules() for m in model.modules() for x in vars(m).values()]
    last = [x for x in held if isinstance(x, torch.distributions.Distribution)]
    memo.update({id(x): None for x in (*last, *dropped) if x is not None})
    memo.update({id(x): x for x in shared})
    return copy.deepcopy(subject, memo)
