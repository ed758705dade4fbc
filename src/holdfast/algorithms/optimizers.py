"""Optimizers and schedules of learning rates, by name: how every algorithm makes, steps, saves and checks them.

A name `module:Name` is called with groups of parameters, `[{"params": [...], "lr": 3e-4}, ...]`, as the classes of torch.optim are; a
schedule with the part of the run that is done, from 0 to 1, and gives what learning rates are multiplied by.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast import plain_checks as check
from holdfast.config import RunConfig
from holdfast.named_objects import import_named, is_import_name

SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1 - done,
    "cosine": lambda done: 0.5 * (1 + math.cos(done * math.pi)),
}
CAPTURABLE = ("adam", "adamw")
"""Optimizers whose step follows the schedule in a CUDA graph, and needs no look at the device."""


Groups = list[dict[str, Any]]
"""Parameters ("params") with a learning rate each ("lr"), as torch.optim takes them."""


def groups_of(parameters: Iterable[nn.Parameter], core: nn.Module, rate: float, config: RunConfig) -> Groups:
    """Those of the core have the learning rate of the memory. In their order, so that saved states fit whatever the rates are."""
    of_core = {id(p) for p in core.parameters()}
    memory = config.learning_rate if config.memory_learning_rate is None else config.memory_learning_rate
    parts = groupby(parameters, lambda p: memory if id(p) in of_core else rate)
    return [{"params": list(part), "lr": its_rate} for its_rate, part in parts]


def make_optimizer(groups: Groups, config: RunConfig) -> Optimizer:
    """The optimizer that a config names."""
    match config.optimizer:
        case "adam":
            return _adam(torch.optim.Adam, groups, config)
        case "adamw":
            return _adamw(groups, config)
        case "muon":
            return MuonAndAdamW(groups, config)
    made = import_named(config.optimizer, kind="optimizer")(groups)
    if not isinstance(made, Optimizer):
        raise TypeError(
            f"optimizer {config.optimizer!r} made a {type(made).__name__}, expected a torch.optim.Optimizer"
        )
    return made


def _adam(kind: type[Optimizer], groups: Groups, config: RunConfig) -> Optimizer:
    """Fused; on a GPU rates are tensors, so that a captured step reads the current ones."""
    device = groups[0]["params"][0].device
    on_gpu = device.type == "cuda"
    if on_gpu:
        groups = [{**group, "lr": torch.tensor(group["lr"], device=device)} for group in groups]
    return kind(groups, eps=config.adam_eps, fused=True, capturable=on_gpu)  # type: ignore[call-arg]


def _adamw(groups: Groups, config: RunConfig) -> Optimizer:
    """Biases, gates' rates and other vectors do not decay: what a memory forgets hangs on them."""
    decaying, others = _split(groups, lambda p: p.dim() > 1)
    decaying = [{**group, "weight_decay": config.weight_decay} for group in decaying]
    return _adam(torch.optim.AdamW, decaying + [{**group, "weight_decay": 0.0} for group in others], config)


def _split(groups: Groups, chosen: Callable[[Tensor], bool]) -> tuple[Groups, Groups]:
    """Groups of the parameters that are chosen, and of the others."""
    parts = [
        [{**g, "params": [p for p in g["params"] if chosen(p) is wanted]} for g in groups] for wanted in (True, False)
    ]
    first, second = ([group for group in part if group["params"]] for part in parts)
    return first, second


class MuonAndAdamW(Optimizer):
    """Muon for matrices and AdamW for the rest. One rate fits both: Muon's steps are scaled to the size of Adam's."""

    def __init__(self, groups: Groups, config: RunConfig) -> None:
        matrices, others = _split(groups, lambda p: p.dim() == 2)
        muon = dict(weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw")
        self._parts: list[Optimizer] = [torch.optim.Muon(matrices, **muon)] if matrices else []  # type: ignore[arg-type]
        self._parts += [_adamw(others, config)] if others else []
        super().__init__([group for part in self._parts for group in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        begin = 0
        for part in self._parts:
            end = begin + len(part.param_groups)
            part.param_groups, part.state = self.param_groups[begin:end], self.state  # loading replaces both
            part.step()
            begin = end


def clipped_step(optimizer: Any, norm: Tensor, max_norm: float, skipped: Tensor) -> None:
    """Step with gradients of this norm scaled down to `max_norm`; no step if `skipped` is not 0.

    Fused optimizers divide by `grad_scale` as they go and take no step where `found_inf` is set: no extra pass over the parameters
    and no look at a number on the device.
    """
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.grad_scale, optimizer.found_inf = (norm / max_norm).clamp(min=1.0), skipped
    elif skipped:
        return
    else:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    optimizer.step()


class LearningRates:
    """Those of all groups of a run's optimizers, as its schedule moves them."""

    def __init__(self, optimizers: list[Optimizer], config: RunConfig) -> None:
        self.optimizers, self.config = optimizers, config
        self.factor = SCHEDULES.get(config.lr_schedule) or import_named(config.lr_schedule, kind="schedule")
        self._own = [group["lr"] for group in self._groups()]  # on a GPU tensors, which captured steps read
        self._first = [float(rate) for rate in self._own]

    def _groups(self) -> Groups:
        """Those of now: loading an optimizer's state replaces them."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def set(self, fraction: float) -> float:
        """At a fraction of the run; gives what `learning_rate` has become."""
        factor = self.factor(fraction)
        if not isinstance(factor, (int, float)) or not 0 <= factor < math.inf:
            where = f"schedule {self.config.lr_schedule!r} gave {factor!r:.40} at {fraction:.3g}"
            raise ValueError(f"{where}, expected a number from 0 on that rates are multiplied by")
        for group, first, own in zip(self._groups(), self._first, self._own):
            group["lr"] = own.fill_(first * factor) if isinstance(own, Tensor) else first * factor
        return float(self.config.learning_rate * factor)


# --- saving -----------------------------------------------------------------------------------------------------------


def restore(optimizer: Optimizer, saved: dict[str, Any], config: RunConfig) -> None:
    """Continue from a `state_dict`. Options are this run's own: on a GPU the rate is a tensor there that captured steps read. An
    optimizer of the user's may move numbers in its groups, so these come back, but for the rates."""
    own = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    if is_import_name(config.optimizer) and len(saved["param_groups"]) == len(own):
        own = [{**theirs, "lr": mine["lr"]} for mine, theirs in zip(own, saved["param_groups"])]
    optimizer.load_state_dict({**saved, "param_groups": optimizer.state_dict()["param_groups"]})
    for group, options in zip(optimizer.param_groups, own):
        group.update({name: value for name, value in options.items() if name != "params"})


def check_state(saved: Any, optimizer: Optimizer, config: RunConfig) -> None:
    """Raise ValueError unless a `state_dict` is that of such an optimizer of the same parameters."""
    check.mapping(saved, "optimizer", "state", "param_groups")
    groups = check.sequence(saved["param_groups"], "param_groups")
    order = [index for group in groups for index in check.mapping(group, "param_groups", "params")["params"]]
    kept = _kept_after_a_step(optimizer, config)
    if order != list(range(len(kept))):
        raise ValueError("the optimizer is of another policy: its groups hold other parameters")
    for index, state in check.mapping(saved["state"], "optimizer state").items():
        check.integer(index, "parameter of the optimizer", 0, len(kept) - 1)
        check.mapping(state, f"optimizer state {index}", *kept[index])
        for name, mine in kept[index].items():
            where = f"optimizer state {index} {name}"
            if isinstance(mine, Tensor):
                check.tensor(state[name], where, mine.shape, mine.dtype)
            if name == "step":
                check.number(float(state[name]), where, 0, 2**53)


def _kept_after_a_step(optimizer: Optimizer, config: RunConfig) -> list[dict[str, Any]]:
    """What such an optimizer keeps for each parameter: of copies that take a step."""
    groups: Groups = [
        {"params": [nn.Parameter(p.detach().clone()) for p in group["params"]], "lr": float(group["lr"])}
        for group in optimizer.param_groups
    ]
    parameters = [p for group in groups for p in group["params"]]
    other: Any = make_optimizer(groups, config)
    for p in parameters:
        p.grad = torch.zeros_like(p)
    other.step()
    return [other.state[p] for p in parameters]
