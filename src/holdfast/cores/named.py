"""Cores by name, as configs and flags give them. A new cell gets its name here."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import groupby
from typing import Any

from holdfast.cores.base import Core
from holdfast.cores.block import Block
from holdfast.cores.chrono import open_forget_gates_
from holdfast.cores.compose import Memoryless, Parallel, Stack
from holdfast.cores.ffm import FFM
from holdfast.cores.gru import GRU
from holdfast.cores.lru import LRU
from holdfast.cores.lstm import LSTM
from holdfast.cores.mingru import MinGRU
from holdfast.cores.mlstm import MLSTM
from holdfast.cores.window import WindowAttention
from holdfast.named_objects import import_named, is_import_name


def blocks(cell: Callable[..., Core]) -> Callable[..., Core]:
    """What makes `num_layers` residual blocks around a cell that has one layer and is linear, or close to it."""

    def make(input_size: int, hidden_size: int, num_layers: int = 1, **options: Any) -> Core:
        sizes = [input_size, *[hidden_size] * (num_layers - 1)]
        made: list[Core] = [Block(cell(size, hidden_size, **options)) for size in sizes]
        return made[0] if num_layers == 1 else Stack(made)

    return make


def bare_or_blocks(cell: Callable[..., Core]) -> Callable[..., Core]:
    """The cell itself as one layer; several layers as blocks, because what such a cell puts out is linear in its state."""

    def make(input_size: int, hidden_size: int, num_layers: int = 1, **options: Any) -> Core:
        if num_layers == 1:
            return cell(input_size, hidden_size, **options)
        return blocks(cell)(input_size, hidden_size, num_layers, **options)

    return make


CORES: dict[str, Callable[..., Any]] = {
    "lstm": LSTM,
    "gru": GRU,
    "mingru": bare_or_blocks(MinGRU),
    "lru": blocks(LRU),
    "ffm": blocks(FFM),
    "mlstm": blocks(MLSTM),
    "window": blocks(WindowAttention),
}
"""name -> make(input_size, hidden_size, num_layers, *, reset)."""


def make_core(
    core: str | type | Core | None,
    input_size: int,
    hidden_size: int,
    num_layers: int,
    reset: str,
    memory_span: int | None = None,
) -> Core:
    """A core by name or class, of your own too; None is the memoryless control: an MLP of the same width, without state.

    A core by name starts as the measured default: an LSTM's forget gates lean to remembering, unlike torch.nn's.
    memory_span: the length of a window, and how many pitches an FFM needs to tell these steps apart. What it means for
    gates and rates is `chrono_init_`'s.
    """
    if isinstance(core, Core):
        if core.input_size != input_size:
            raise ValueError(
                f"the core takes {core.input_size} features, the encoder gives {input_size}; set encoder_sizes"
            )
        return core
    if core is None or core == "none":
        return Memoryless(input_size)
    if isinstance(core, str) and core in CORES:
        options = {} if memory_span is None else _sizes_for(core, memory_span)
        named: Core = CORES[core](input_size, hidden_size, num_layers, reset=reset, **options)
        open_forget_gates_(named)
        return named
    if isinstance(core, str) and not is_import_name(core):
        known = ", ".join(map(repr, CORES))
        raise ValueError(f"unknown core {core!r}; one of {known}, None, a holdfast core, or 'my_module:MyCore'")
    make = import_named(core, kind="core") if isinstance(core, str) else core
    return _make_own(make, str(core), input_size, hidden_size, num_layers, reset)


def made_of(core: Core) -> str:
    """A core in words, with what is inside a Stack, a Parallel and a Block.

    >>> import holdfast as hf
    >>> made_of(hf.Block(hf.LRU(8, 8)))
    "Block of LRU(8, 8, modes=16, reset='zero')"
    """
    if isinstance(core, Parallel):
        return f"Parallel({', '.join(f'{name}={made_of(inside)}' for name, inside in core.cores.items())})"  # type: ignore[arg-type]
    if isinstance(core, Block):
        return f"{type(core).__name__} of {made_of(core.core)}"
    if not isinstance(core, Stack):
        return f"{type(core).__name__}({core.extra_repr()})"
    alike = [(text, len(list(group))) for text, group in groupby(map(made_of, core.cores))]  # type: ignore[arg-type]
    layers = [f"{count} times {text}" if count > 1 else text for text, count in alike]
    return layers[0] if len(layers) == 1 else f"Stack({', '.join(layers)})"


def _sizes_for(core: str, memory_span: int) -> dict[str, int]:
    """Options of the cores whose size depends on how many steps there are to remember."""
    if core == "window":
        if memory_span < 2:
            raise ValueError(f"memory_span {memory_span}: a window remembers nothing unless it has 2 steps or more")
        return {"window": memory_span}
    if core == "ffm":  # C pitches tell 2 C steps apart; beyond 64, rates must help
        return {"memory_size": 16, "context_size": min(32, max(4, memory_span // 2))}
    return {}


def _make_own(make: Any, name: str, input_size: int, hidden_size: int, num_layers: int, reset: str) -> Core:
    """A core of the user's own: make(input_size, hidden_size), with num_layers= and reset= where it takes them."""
    if not callable(make):
        raise ValueError(f"core {name}: expected a class, got a {type(make).__name__}")
    if isinstance(make, type) and not issubclass(make, Core):
        raise ValueError(
            f'core {name}: the class {make.__name__} is no hf.Core; use one by its name, core="lstm", or a class such as hf.LSTM'
        )
    parameters = inspect.signature(make).parameters.values()
    takes = {p.name for p in parameters} | {"**" for p in parameters if p.kind is p.VAR_KEYWORD}
    options: dict[str, Any] = {}
    for option, value, default in (("num_layers", num_layers, 1), ("reset", reset, "zero")):
        if takes & {option, "**"}:
            options[option] = value
        elif value != default:
            raise ValueError(f"core {name} takes no {option}, so {option}={value!r} has no effect; leave it out")
    made = make(input_size, hidden_size, **options)
    if not isinstance(made, Core):
        raise ValueError(f"core {name} made a {type(made).__name__}; a core is a subclass of hf.Core")
    return made
