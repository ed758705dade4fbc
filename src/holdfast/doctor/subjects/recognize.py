"""Finds the form of a policy that nobody wrapped: what its methods are called, and what goes in and out when it is called.

Layouts are tried on copies with several numbers of steps and environments: a state grows with the number of environments and not
with the number of steps. What cannot be told apart is not guessed; `choose` then asks for a subject.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.doctor.inference import UnknownObservation, space_of
from holdfast.doctor.observations import Observations, device_of
from holdfast.doctor.subjects.base import Subject
from holdfast.doctor.subjects.cleanrl import CleanRL
from holdfast.doctor.subjects.module import Items, Module
from holdfast.doctor.subjects.puffer import Puffer
from holdfast.doctor.subjects.rllib import RLlib
from holdfast.doctor.subjects.rsl_rl import RslRl
from holdfast.doctor.subjects.skrl import Skrl
from holdfast.doctor.subjects.stateful import Stateful
from holdfast.state import map_tensors, tensors_in

#: names of a parameter that is true at the first step of an episode, and of one that is false there
STARTS = (
    "done", "dones", "reset", "resets", "episode_start", "episode_starts", "is_first", "is_init", "first", "starts",
)  # fmt: skip
GOES_ON = ("mask", "masks", "not_done", "not_dones", "nonterminal", "nonterminals", "continues")
FIRST_STATE = ("initial_state", "get_initial_state", "init_state", "init_hidden", "initial_hidden", "zero_state")
CLEARS = (
    "reset_hidden", "reset_hidden_state", "reset_hidden_states", "reset_state", "reset_states", "reset_memory", "reset",
)  # fmt: skip


def recognize(thing: Any, space: Any = None) -> Subject | None:
    """The subject for a policy of a widespread form, with `recognized_as`; None if it has none."""
    with torch.random.fork_rng(devices=[]):
        subject, options = _recognize(thing, space)
    if subject is not None:
        subject.recognized_as = f"subjects.{type(subject).__name__}({options})"
    return subject


def _recognize(thing: Any, space: Any) -> tuple[Subject | None, str]:
    """A subject, and its options in words."""
    packages = {kind.__module__.partition(".")[0] for kind in type(thing).__mro__}
    if "skrl" in packages and hasattr(thing, "record_transition"):
        return Skrl(thing), "agent"
    if "rsl_rl" in packages and hasattr(thing, "compute_returns"):
        return RslRl(thing), "alg"
    if "ray" in packages and hasattr(thing, "forward_exploration"):
        return RLlib(thing), "module"
    if not isinstance(thing, nn.Module):
        return None, ""
    if hasattr(thing, "get_action_and_value"):
        return CleanRL(thing, _space_of_agent(thing, space)), "agent"
    if hasattr(thing, "forward_eval"):
        return Puffer(thing, space), "policy"
    parameters = _parameters(thing)
    if len(parameters) == 1 or (len(parameters) == 2 and parameters[1] in STARTS):
        return _as_stateful(thing, space, *parameters[1:])
    return _as_module(thing, space, parameters) if 2 <= len(parameters) <= 3 else (None, "")


def _parameters(module: nn.Module) -> list[str]:
    """Names of what `forward` takes, without those behind a star."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, p in inspect.signature(module.forward).parameters.items() if p.kind in kinds]


def _space_of_agent(agent: Any, space: Any) -> Any:
    subject = CleanRL(agent, ())

    def call(obs: Any) -> Any:
        rows = len(tensors_in(obs)[0])
        return agent.get_action_and_value(
            obs, subject.initial_state(rows), torch.zeros(rows, device=device_of([agent]))
        )

    return space_of(agent, space, call)


# --- (x, state) and (x, state, resets) -----------------------------------------------------------------------
@dataclass(frozen=True)
class _Layout:
    """How a module is called. `options` are those of `subjects.Module` that are not the default."""

    options: dict[str, Any]

    def run(self, module: nn.Module, space: Any, steps: int, rows: int) -> list[torch.Size]:
        """Shapes of the state after a call without resets. Raises what the module raises."""
        subject = Module(copy.deepcopy(module), space, **self.options)
        obs = Observations(space).sample(steps * rows, torch.Generator().manual_seed(0), device_of([module]))
        x = map_tensors(lambda leaf: leaf.reshape(steps, rows, *leaf.shape[1:]), obs)
        none = torch.zeros(steps, rows, dtype=torch.bool, device=device_of([module]))
        subject.begin(rows)
        with torch.no_grad():
            _, state = subject.unroll(x, subject.state(), none)
            subject.unroll(x, state, none)
        return [leaf.shape for leaf in tensors_in(state)]


def _as_module(module: nn.Module, space: Any, parameters: list[str]) -> tuple[Subject | None, str]:
    for options in _layouts(module, parameters):
        layout = _Layout(options)
        observed = _observed(module, space, layout)
        if observed is None:
            continue
        batch_dim = _batch_dim(module, observed, layout)
        if batch_dim is None:
            continue
        options = {**options, "state_batch_dim": batch_dim, **_only_repeatable(module, observed, options)}
        shown = ", ".join(f"{key}={_shown(value)}" for key, value in options.items() if key != "output")
        return Module(module, observed, **options), shown
    return None, ""


def _layouts(module: nn.Module, parameters: list[str]) -> Iterator[dict[str, Any]]:
    """Options of `subjects.Module` to try, the most widespread first."""
    firsts: list[dict[str, Any]] = [{}]
    maker = next((getattr(module, name) for name in FIRST_STATE if callable(getattr(module, name, None))), None)
    if maker is not None:
        firsts = [{"initial_state": maker}, {}]
    flags: list[dict[str, Any]] = [{}]
    if len(parameters) == 3:
        if parameters[2] in GOES_ON:
            flags = [{"flags": goes_on}]
        elif parameters[2] in STARTS:
            flags = [{}, {"flags": as_numbers}]
        else:
            return
    returns: list[dict[str, Any]] = [{}, {"returns": "state first"}]
    orders: list[dict[str, Any]] = [{}, {"batch_first": True}]
    if flags[0] and (zeros := _Zeros.of(module)) is not None:
        orders.append({"flattened": True, "initial_state": zeros})
    orders.append({"one_step": True})
    for parts in itertools.product(returns, orders, firsts, flags):
        yield {key: value for part in parts for key, value in part.items()}


class _Zeros:
    """The state `[B, H]` that a caller passes first, where H is the module's `recurrent_hidden_state_size` or that of its layer."""

    def __init__(self, module: nn.Module, size: int) -> None:
        self.module, self.size = module, size

    @classmethod
    def of(cls, module: nn.Module) -> _Zeros | None:
        size = getattr(module, "recurrent_hidden_state_size", None)
        layers = [part for part in module.modules() if isinstance(part, (nn.RNNBase, nn.RNNCellBase))]
        sizes = {
            part.hidden_size * (1 + isinstance(part, (nn.LSTM, nn.LSTMCell))) for part in layers
        }  # (h, c) side by side
        found = {size} if isinstance(size, int) else sizes
        return cls(module, next(iter(found))) if len(found) == 1 else None

    def __call__(self, num_envs: int) -> Tensor:
        return next(self.module.parameters()).new_zeros(num_envs, self.size)

    def __repr__(self) -> str:
        return f"zeros of size {self.size}"


def as_numbers(resets: Tensor) -> Tensor:
    """Flags as 0.0 and 1.0."""
    return resets.float()


def goes_on(resets: Tensor) -> Tensor:
    """1.0 where an episode goes on."""
    return 1.0 - resets.float()


def _observed(module: nn.Module, space: Any, layout: _Layout) -> Any:
    """What the module observes, if it can be called in this layout; None otherwise."""
    probed = copy.deepcopy(module)
    subject = Module(probed, (), **layout.options)

    def call(obs: Any) -> None:
        rows = len(tensors_in(obs)[0])
        subject.begin(rows)
        none = torch.zeros(1, rows, dtype=torch.bool, device=device_of([probed]))
        subject.unroll(map_tensors(lambda leaf: leaf[None], obs), subject.state(), none)

    try:
        return space_of(probed, space, call)
    except UnknownObservation:
        return None


def _batch_dim(module: nn.Module, space: Any, layout: _Layout) -> int | None:
    """The dimension of all state tensors that is the number of environments; None if this is not how it is called."""
    try:
        shapes, longer, wider = (layout.run(module, space, steps, rows) for steps, rows in ((2, 3), (4, 3), (2, 7)))
    except Exception:
        return None
    if not shapes or longer != shapes or len(wider) != len(shapes):
        return None
    dims = {tuple(d for d in range(len(a)) if a[d] != b[d]) for a, b in zip(shapes, wider) if len(a) == len(b)}
    only = next(iter(dims), ())
    if len(dims) != 1 or len(only) != 1 or any((a[only[0]], b[only[0]]) != (3, 7) for a, b in zip(shapes, wider)):
        return None
    return only[0]


def _only_repeatable(module: nn.Module, space: Any, options: dict[str, Any]) -> dict[str, Any]:
    """`output=` without the items that differ from call to call, such as sampled actions; empty if none or all do."""
    calls: list[list[Any]] = []

    def keep(result: Any) -> Any:
        calls.append(list(result) if isinstance(result, (tuple, list)) else [result])
        return result

    for seed in (1, 2):
        torch.manual_seed(seed)
        _Layout({**options, "output": keep}).run(copy.deepcopy(module).eval(), space, 1, 64)
    half = len(calls) // 2
    items = range(len(calls[0]))
    same = [i for i in items if all(_equal(a[i], b[i]) for a, b in zip(calls[:half], calls[half:]))]
    return {"output": Items(same, len(items))} if 0 < len(same) < len(items) else {}


def _equal(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(tensors_in(one), tensors_in(other)))


def _shown(value: Any) -> str:
    return getattr(value, "__name__", repr(value))


# --- a state of its own --------------------------------------------------------------------------------------
def _as_stateful(module: nn.Module, space: Any, flag: str | None = None) -> tuple[Subject | None, str]:
    def call(policy: nn.Module, obs: Any) -> Any:
        none = torch.zeros(len(tensors_in(obs)[0]), dtype=torch.bool, device=device_of([module]))
        return policy(obs) if flag is None else policy(obs, none)

    probed = copy.deepcopy(module)
    try:
        observed = space_of(probed, space, lambda obs: call(probed, obs))
        hidden = _attributes_that_move(module, observed, call)
    except Exception:
        return None, ""
    if not hidden:
        return None, ""
    reset = flag or next((name for name in CLEARS if callable(getattr(module, name, None))), None)
    subject = Stateful(module, hidden=hidden, reset=reset, observation_space=observed)
    return subject, f"hidden={hidden}, reset={reset!r}"


def _attributes_that_move(module: nn.Module, space: Any, call: Callable[[nn.Module, Any], Any]) -> tuple[str, ...]:
    """Attributes and buffers of the module whose tensors a step replaces."""
    played = copy.deepcopy(module)
    names = [*(n for n in vars(played) if not n.startswith("_")), *(n for n, _ in played.named_buffers(recurse=False))]
    obs = Observations(space).sample(3, torch.Generator().manual_seed(0), device_of([module]))
    before = {name: [x.clone() for x in tensors_in(getattr(played, name))] for name in names}
    with torch.no_grad():
        call(played, obs)
        call(played, obs)
    after = {name: tensors_in(getattr(played, name)) for name in names}

    def moved(name: str) -> bool:
        old, new = before[name], after[name]
        return bool(new) and not (len(old) == len(new) and all(torch.equal(a, b) for a, b in zip(old, new)))

    return tuple(name for name in names if moved(name))
