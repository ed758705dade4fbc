"""Watches a live training loop for a state whose graph reaches back past an optimizer step.

Such a state works once. The next backward pass ends in "backward through the graph a second time"; with
`retain_graph=True`, the graph grows until memory is full.
"""

from __future__ import annotations

import warnings
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.doctor.credit_probes import is_recurrent
from holdfast.doctor.report.findings import Finding, make_finding
from holdfast.state import tensors_in

#: how many operations back from a state to look: a mask, a copy and the layer's own output are a few
_DEPTH = 12


class StaleGraphWarning(UserWarning):
    """A recurrent layer received a state that still holds the graph of an earlier update."""


class watch:
    """`with watch(module, optimizer) as watching: ...` around a training loop; `watching.findings` lists what was found.

    Each recurrent layer of `module` is reported once, with a `StaleGraphWarning`; `error=True` raises a RuntimeError
    instead. Layers are torch's RNN, GRU, LSTM and their cells, and Holdfast's cores.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, *, error: bool = False) -> None:
        self.module, self.optimizer, self.error = module, optimizer, error
        self.findings: list[Finding] = []
        self._handles: list[Any] = []
        self._reported: set[str] = set()
        self._updates = 0
        self._last_update = -1

    def __enter__(self) -> watch:
        layers = [(name, layer) for name, layer in self.module.named_modules() if is_recurrent(layer)]
        if not layers:
            raise TypeError(
                f"{type(self.module).__name__} has no recurrent layer to watch (torch.nn's RNN, GRU, LSTM and cells, "
                "or a Holdfast core)"
            )
        for name, layer in layers:
            hook = self._check_states(name or type(layer).__name__)
            self._handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
        self._handles.append(self.optimizer.register_step_post_hook(self._after_update))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _after_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._updates += 1
        self._last_update = _next_sequence_number()

    def _check_states(self, name: str) -> Any:
        def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._last_update < 0 or name in self._reported:
                return
            for state in tensors_in([*args[1:], *kwargs.values()]):
                depth = _depth_of_older_graph(state, self._last_update)
                if depth is not None:
                    self._report(name, state, depth)
                    return

        return hook

    def _report(self, name: str, state: Tensor, depth: int) -> None:
        self._reported.add(name)
        evidence = (
            f"layer `{name}` received a state {tuple(state.shape)} whose graph ({type(state.grad_fn).__name__}, "
            f"{depth} operations back) was made before update {self._updates}"
        )
        found = make_finding("bounded-graph", "graph-kept", evidence)
        self.findings.append(found)
        message = f"{evidence}. {found.fix} See {found.url}"
        if self.error:
            raise RuntimeError(message)
        warnings.warn(message, StaleGraphWarning, stacklevel=3)


def _next_sequence_number() -> int:
    """The number that autograd gives to an operation made now; it only grows."""
    with torch.enable_grad():
        node: Any = torch.zeros((), requires_grad=True).clone().grad_fn
    return int(node._sequence_nr())


def _depth_of_older_graph(state: Tensor, limit: int) -> int | None:
    """How many operations back from `state` one was made before `limit`; None if there is none nearby."""
    layer: list[Any] = [state.grad_fn] if state.grad_fn is not None else []
    seen = set(layer)
    for depth in range(_DEPTH):
        following = []
        for node in layer:
            # Leaves (AccumulateGrad) are parameters, as old as the model.
            if "AccumulateGrad" in type(node).__name__:
                continue
            if node._sequence_nr() < limit:
                return depth
            for parent, _ in node.next_functions:
                if parent is not None and parent not in seen:
                    seen.add(parent)
                    following.append(parent)
        layer = following
    return None
