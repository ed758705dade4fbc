"""Cores made of cores: `Stack` (one after another), `Parallel` (side by side), `Memoryless` (none at all)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.cores.base import Core
from holdfast.state import State


def require_core(core: object, where: str) -> Core:
    if not isinstance(core, Core):
        raise TypeError(f"{where} takes cores (hf.LSTM, hf.GRU, ...), got a {type(core).__name__}")
    return core


class CompositeCore(Core):
    """What cores made of cores share: each form of the call is the same form of the parts' calls.

    `advance_` is offered if it saves any of the parts a copy; the others step, and their new state is copied.
    """

    def _run(self, form: str, x: Tensor, state: State, resets: Tensor | None) -> Any:
        """`form`: the method of a part to call. Returns y and one state in the form of `state`, two for a
        trace, none for a step in place or an output alone."""
        raise NotImplementedError

    def _step(self, x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor, State]:
        return self._run("step_unchecked", x, state, resets)

    def _sequence(self, x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor, State]:
        return self._run("sequence_unchecked", x, state, resets)

    def _trace(self, x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor, State, State]:
        return self._run("trace_unchecked", x, state, resets)

    def output_unchecked(self, x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor]:
        return (self._run("output_unchecked", x, state, resets)[0],)

    def advance_(self, x: Tensor, state: State, resets: Tensor | None) -> Tensor:
        if not self.supports_advance:
            return super().advance_(x, state, resets)
        return self._run("advance_or_copy_", x, state, resets)[0]


class Stack(CompositeCore):
    """Cores one after another; the state is a tuple of theirs.

    residual: a core whose input and output size agree adds its input to its output.
    """

    def __init__(self, cores: Iterable[Core], residual: bool = False) -> None:
        super().__init__()
        self.cores = nn.ModuleList([require_core(core, "Stack") for core in cores])
        if not self.cores:
            raise ValueError("Stack needs at least one core")
        for i, (a, b) in enumerate(zip(list(self.cores)[:-1], list(self.cores)[1:])):
            if a.output_size != b.input_size:
                raise ValueError(f"core {i} gives {a.output_size} features, core {i + 1} takes {b.input_size}")
        self.residual = residual
        self.supports_advance = any(core.supports_advance for core in self.cores)
        self.input_size: int = self.cores[0].input_size  # type: ignore[assignment]
        self.output_size: int = self.cores[-1].output_size  # type: ignore[assignment]

    def dtype_and_device(self) -> tuple[torch.dtype, torch.device]:
        return self.cores[0].dtype_and_device()  # type: ignore[operator]

    def row_shapes(self) -> State:
        return tuple(core.row_shapes() for core in self.cores)  # type: ignore[operator]

    def context(self) -> int | None:
        parts = [core.context() for core in self.cores]  # type: ignore[operator]
        return None if None in parts else sum(parts)

    def initial_state(self, batch_size: int) -> State:
        return tuple(core.initial_state(batch_size) for core in self.cores)  # type: ignore[operator]

    def _run(self, form: str, x: Tensor, state: State, resets: Tensor | None) -> Any:
        results = []
        for core, core_state in zip(self.cores, state):
            y, *states = getattr(core, form)(x, core_state, resets)
            x = x + y if self.residual and core.input_size == core.output_size else y
            results.append(states)
        return x, *[tuple(states) for states in zip(*results)]


class Parallel(CompositeCore):
    """Named cores side by side; outputs are concatenated in the order given, the state is a dict.

    Every core reads the whole input, unless `inputs` gives it a slice of the features.

    >>> core = Parallel(actor=Memoryless(4), critic=Memoryless(4))
    >>> core.output_size, core.slices["critic"]
    (8, slice(4, 8, None))
    >>> Parallel(actor=Memoryless(4), critic=Memoryless(6), inputs={"actor": slice(0, 4)}).input_size
    6
    """

    def __init__(self, *, inputs: Mapping[str, slice] | None = None, **cores: Core) -> None:
        super().__init__()
        if isinstance(inputs, Core):
            raise TypeError("Parallel(inputs=...) takes slices of the features by core; give the core another name")
        if not cores:
            raise ValueError(
                "Parallel needs at least one core, e.g. Parallel(actor=hf.LSTM(64, 128), critic=hf.LSTM(64, 128))"
            )
        self.cores = nn.ModuleDict({name: require_core(core, "Parallel") for name, core in cores.items()})
        self.supports_advance = any(core.supports_advance for core in cores.values())
        self.inputs: dict[str, slice] = _checked_inputs(inputs or {}, cores)
        self.input_size = _input_size(self.inputs, cores)
        self.slices: dict[str, slice] = {}
        end = 0
        for name, core in cores.items():
            self.slices[name] = slice(end, end + core.output_size)
            end += core.output_size
        self.output_size = end

    def dtype_and_device(self) -> tuple[torch.dtype, torch.device]:
        return next(iter(self.cores.values())).dtype_and_device()  # type: ignore[operator]

    def row_shapes(self) -> State:
        return {name: core.row_shapes() for name, core in self.cores.items()}  # type: ignore[operator]

    def context(self) -> int | None:
        parts = [core.context() for core in self.cores.values()]  # type: ignore[operator]
        return None if None in parts else max(parts)

    def initial_state(self, batch_size: int) -> State:
        return {name: core.initial_state(batch_size) for name, core in self.cores.items()}  # type: ignore[operator]

    def _run(self, form: str, x: Tensor, state: State, resets: Tensor | None) -> Any:
        ys, results = [], []
        for name, core in self.cores.items():
            part = x[..., self.inputs[name]] if name in self.inputs else x
            y, *states = getattr(core, form)(part, state[name], resets)
            ys.append(y)
            results.append(states)
        return torch.cat(ys, dim=-1), *[dict(zip(self.cores, states)) for states in zip(*results)]


def _checked_inputs(inputs: Mapping[str, slice], cores: Mapping[str, Core]) -> dict[str, slice]:
    """The slices with a start and an end, each as wide as its core's input."""
    unknown = [name for name in inputs if name not in cores]
    if unknown:
        raise ValueError(f"inputs names {', '.join(map(repr, unknown))}, but the cores are {', '.join(cores)}")
    checked = {}
    for name, part in inputs.items():
        start = part.start or 0 if isinstance(part, slice) else None
        if start is None or not isinstance(part.stop, int) or part.step not in (None, 1) or not 0 <= start < part.stop:
            raise ValueError(f"inputs[{name!r}] is {part!r}, expected a slice of the features, e.g. slice(0, 64)")
        if part.stop - start != cores[name].input_size:
            raise ValueError(
                f"inputs[{name!r}] gives {part.stop - start} features ({start} to {part.stop}), "
                f"but core {name!r} takes {cores[name].input_size}"
            )
        checked[name] = slice(start, part.stop)
    return checked


def _input_size(inputs: Mapping[str, slice], cores: Mapping[str, Core]) -> int:
    """What the cores without a slice take; if all have one, up to the end of the last slice."""
    whole = {name: core.input_size for name, core in cores.items() if name not in inputs}
    if len(set(whole.values())) > 1:
        raise ValueError(
            f"all cores read the same input, but their input sizes differ: {whole}; give each its features with inputs="
        )
    needed = max((part.stop for part in inputs.values()), default=0)
    if not whole:
        return needed
    size = next(iter(whole.values()))
    if needed > size:
        raise ValueError(
            f"inputs reaches up to feature {needed}, but {', '.join(map(repr, whole))} reads all of the input and "
            f"takes {size} features"
        )
    return size


class Memoryless(Core):
    """Has no memory and returns its input: the control for comparing with and without memory."""

    def __init__(self, input_size: int) -> None:
        super().__init__()
        self.input_size = self.output_size = input_size

    def row_shapes(self) -> State:
        return {}

    def _step(self, x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor, State]:
        return x, {}

    def _sequence(self, x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor, State]:
        return x, {}
