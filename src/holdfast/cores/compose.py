"""Cores made of cores: `Stack` (one after another), `Parallel` (side by side), `Memoryless` (none at all)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.cores.base import Core
from holdfast.state import State


def _require_core(core: object, where: str) -> Core:
    if not isinstance(core, Core):
        raise TypeError(f"{where} takes cores (hf.LSTM, hf.GRU, ...), got a {type(core).__name__}")
    return core


class Stack(Core):
    """Cores one after another; the state is a tuple of theirs.

    residual: a core whose input and output size agree adds its input to its output.
    """

    def __init__(self, cores: Iterable[Core], residual: bool = False) -> None:
        super().__init__()
        self.cores = nn.ModuleList([_require_core(core, "Stack") for core in cores])
        if not self.cores:
            raise ValueError("Stack needs at least one core")
        for i, (a, b) in enumerate(zip(list(self.cores)[:-1], list(self.cores)[1:])):
            if a.output_size != b.input_size:
                raise ValueError(f"core {i} gives {a.output_size} features, core {i + 1} takes {b.input_size}")
        self.residual = residual
        self.input_size: int = self.cores[0].input_size  # type: ignore[assignment]
        self.output_size: int = self.cores[-1].output_size  # type: ignore[assignment]

    def _dtype_and_device(self) -> tuple[torch.dtype, torch.device]:
        return self.cores[0]._dtype_and_device()  # type: ignore[operator]

    def row_shapes(self) -> State:
        return tuple(core.row_shapes() for core in self.cores)  # type: ignore[operator]

    def _initial_state(self, batch_size: int) -> State:
        return tuple(core._initial_state(batch_size) for core in self.cores)  # type: ignore[operator]

    def _run(self, method: str, x: Tensor, state: State, resets: Tensor | None) -> Any:
        results = []
        for core, core_state in zip(self.cores, state):
            y, *states = getattr(core, method)(x, core_state, resets)
            x = x + y if self.residual and core.input_size == core.output_size else y
            results.append(states)
        return x, *[tuple(states) for states in zip(*results)]

    def _step(self, x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor, State]:
        return self._run("_step", x, state, resets)

    def _sequence(self, x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor, State]:
        return self._run("_sequence", x, state, resets)

    def _trace(self, x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor, State, State]:
        return self._run("_trace", x, state, resets)


class Parallel(Core):
    """Named cores side by side on one input; outputs are concatenated in the order given, the state is a dict.

    >>> core = Parallel(actor=Memoryless(4), critic=Memoryless(4))
    >>> core.output_size, core.slices["critic"]
    (8, slice(4, 8, None))
    """

    def __init__(self, **cores: Core) -> None:
        super().__init__()
        if not cores:
            raise ValueError(
                "Parallel needs at least one core, e.g. Parallel(actor=hf.LSTM(64, 128), critic=hf.LSTM(64, 128))"
            )
        self.cores = nn.ModuleDict({name: _require_core(core, "Parallel") for name, core in cores.items()})
        sizes = {name: core.input_size for name, core in cores.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"all cores read the same input, but their input sizes differ: {sizes}")
        self.input_size = next(iter(sizes.values()))
        self.slices: dict[str, slice] = {}
        end = 0
        for name, core in cores.items():
            self.slices[name] = slice(end, end + core.output_size)
            end += core.output_size
        self.output_size = end

    def _dtype_and_device(self) -> tuple[torch.dtype, torch.device]:
        return next(iter(self.cores.values()))._dtype_and_device()  # type: ignore[operator]

    def row_shapes(self) -> State:
        return {name: core.row_shapes() for name, core in self.cores.items()}  # type: ignore[operator]

    def _initial_state(self, batch_size: int) -> State:
        return {name: core._initial_state(batch_size) for name, core in self.cores.items()}  # type: ignore[operator]

    def _run(self, method: str, x: Tensor, state: State, resets: Tensor | None) -> Any:
        ys, results = [], []
        for name, core in self.cores.items():
            y, *states = getattr(core, method)(x, state[name], resets)
            ys.append(y)
            results.append(states)
        return torch.cat(ys, dim=-1), *[dict(zip(self.cores, states)) for states in zip(*results)]

    def _step(self, x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor, State]:
        return self._run("_step", x, state, resets)

    def _sequence(self, x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor, State]:
        return self._run("_sequence", x, state, resets)

    def _trace(self, x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor, State, State]:
        return self._run("_trace", x, state, resets)


class Memoryless(Core):
    """Remembers nothing and passes its input on: the control that shows what memory is worth."""

    def __init__(self, input_size: int) -> None:
        super().__init__()
        self.input_size = self.output_size = input_size
        # The module follows .to(...) without any parameter.
        self.register_buffer("_like", torch.empty(0), persistent=False)

    def row_shapes(self) -> State:
        return {}

    def _step(self, x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor, State]:
        return x, {}

    def _sequence(self, x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor, State]:
        return x, {}
