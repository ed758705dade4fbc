"""Modules that keep their hidden state as an attribute: `self.lstm_hidden = ...` in `forward`."""

from __future__ import annotations

import contextlib
import copy
import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.doctor.columns import columns
from holdfast.doctor.inference import space_of
from holdfast.doctor.subjects.base import NotOffered, RecordedSegment, Replay, Subject, SubjectStep
from holdfast.state import map_tensors, tensors_in

_ABOUT_RESETS = re.compile(r"(is_)?(episode_)?(reset|done|first|start|init|terminal|mask)s?(_mask|_flags?)?s?")


class Stateful(Subject):
    """A module that keeps its own state.

    `act`: the method called with `[B, ...]` observations at each step. `hidden`: the attribute (or attributes) with the
    state. `reset`: how it learns of a new episode: the name of a keyword of `act` that takes a `[B]` bool mask, or of a
    method of the module. The method is called with the mask; if it takes no argument, it is called when every
    environment starts an episode. `train`: the method for a stored segment, called with `[T, B, ...]` observations and,
    if a parameter is named for them (`resets`, `dones`, `episode_starts`, ...), `[T, B]` resets; None, or the name of `act`
    with a reset method, steps through `act`.
    `detach`: a method called between segments. `forget`: a method that clears all memory. `no_grad`: True if the project
    always steps under `torch.no_grad()`; otherwise the doctor also trains through live steps, segment after segment, as
    such scripts do.
    """

    framework = "stateful"
    makes_own_state = True
    trains_apart = False

    def __init__(
        self,
        module: nn.Module,
        act: str = "forward",
        hidden: str | tuple[str, ...] = "lstm_hidden",
        reset: str | None = None,
        *,
        observation_space: Any = None,
        train: str | None = None,
        detach: str | None = None,
        forget: str | None = None,
        no_grad: bool | None = None,
        output: Callable[[Any], Any] | None = None,
        num_envs: int = 5,
        name: str | None = None,
    ) -> None:
        super().__init__(space_of(module, observation_space), name=name or type(module).__name__)
        self.module = module
        self.act, self.train, self.detach, self.forget = act, train, detach, forget
        self.hidden = (hidden,) if isinstance(hidden, str) else hidden
        self.reset, self.no_grad, self.output, self.num_envs = reset, no_grad, output, num_envs
        for attribute in (act, train, reset if not self._is_keyword(act) else None, detach, forget):
            if attribute is not None and not hasattr(module, attribute):
                raise AttributeError(f"{type(module).__name__} has no `{attribute}`, which the subject names")
        if not self.takes_mask:
            self.num_envs = 1
        self._initial = {key: _copy(getattr(module, key, None)) for key in self.hidden}

    @property
    def takes_mask(self) -> bool:
        """A reset method without arguments cannot reset one environment of several."""
        return self.reset is None or self._is_keyword(self.act) or self._count(self.reset) > 0

    def begin(self, num_envs: int) -> None:
        for key, value in self._initial.items():
            setattr(self.module, key, _copy(value))

    def change_batch(self, num_envs: int) -> None:
        if self.forget is not None:
            getattr(self.module, self.forget)()

    def step(self, obs: Any, terminated: Tensor, truncated: Tensor, env_ids: Tensor) -> SubjectStep:
        with torch.no_grad() if self.no_grad is not False else contextlib.nullcontext():
            return self.live_step(obs, terminated, truncated, env_ids)

    def live_step(self, obs: Any, terminated: Tensor, truncated: Tensor, env_ids: Tensor) -> SubjectStep:
        with torch.no_grad() if self.no_grad else contextlib.nullcontext():
            result = self._call(self.act, obs, terminated | truncated)
        return SubjectStep(self._columns(result, len(terminated)))

    def mark(self) -> Any:
        return {key: _copy(getattr(self.module, key, None)) for key in self.hidden}

    def state(self) -> Any:
        return [getattr(self.module, key, None) for key in self.hidden]

    def replay(self, segment: RecordedSegment) -> Replay:
        for key, value in segment.start.items():
            setattr(self.module, key, _copy(value))
        if self.detach is not None:
            getattr(self.module, self.detach)()
        resets = segment.terminated | segment.truncated
        steps, rows = resets.shape
        with torch.enable_grad():
            if self.train is not None and (self.train != self.act or self._is_keyword(self.act) or self.reset is None):
                result = self._call(self.train, segment.obs, resets)
                return Replay(self._columns(result, steps * rows).reshape(steps, rows, -1))
            outputs = []
            for t in range(steps):
                obs = map_tensors(lambda x, t=t: x[t], segment.obs)
                outputs.append(self._columns(self._call(self.act, obs, resets[t]), rows))
        return Replay(torch.stack(outputs))

    def end_segment(self) -> None:
        if self.detach is not None:
            getattr(self.module, self.detach)()

    def poison(self, row: int) -> None:
        for tensor in (x for x in tensors_in(self.state()) if x.is_floating_point()):
            batch = 1 if tensor.dim() == 3 else 0
            with torch.no_grad():
                tensor.select(batch, row).fill_(float("nan"))

    def reset_memory(self) -> None:
        if self.forget is None:
            raise NotOffered("no method that clears its memory was named (forget=)")
        getattr(self.module, self.forget)()

    def _call(self, method: str, obs: Any, resets: Tensor) -> Any:
        if self.reset is None:
            return getattr(self.module, method)(obs)
        if self._is_keyword(method):
            return getattr(self.module, method)(obs, **{self.reset: resets})
        if method == self.train and method != self.act:
            return getattr(self.module, method)(obs, **self._resets_for_training(resets))
        if not self.takes_mask:
            if bool(resets.all()):
                getattr(self.module, self.reset)()
        elif bool(resets.any()):
            getattr(self.module, self.reset)(resets)
        return getattr(self.module, method)(obs)

    def _resets_for_training(self, resets: Tensor) -> dict[str, Tensor]:
        """The parameter of the training method that is about resets, if it has one."""
        _, *others = inspect.signature(getattr(self.module, str(self.train))).parameters.values()
        for parameter in others:
            if _ABOUT_RESETS.fullmatch(parameter.name):
                return {parameter.name: resets}
            if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD:
                raise TypeError(
                    f"{type(self.module).__name__}.{self.train} needs `{parameter.name}`, and the doctor gives observations and "
                    "resets: use subjects.Loop, whose functions pass what your training takes"
                )
        return {}

    def _columns(self, result: Any, rows: int) -> Tensor:
        return columns(self.output(result) if self.output is not None else result, rows)

    def _is_keyword(self, method: str) -> bool:
        return self.reset in inspect.signature(getattr(self.module, method)).parameters

    def _count(self, method: str) -> int:
        return len(inspect.signature(getattr(self.module, method)).parameters)


def _copy(value: Any) -> Any:
    tensors = map_tensors(lambda x: x.detach().clone(), value)
    return tensors if value is not tensors else copy.copy(value)
