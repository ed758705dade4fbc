"""Policies of your own, from a class, a function, or the name of one (`my_module:MyPolicy`).

What a config describes is made by its algorithm; an instance needs nothing from here.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from holdfast.config import RunConfig
from holdfast.named_objects import OWN_POLICY, import_named, name_of, stands_for_object
from holdfast.policies.base import RecurrentPolicy


def build(policy: Any, observation_space: Any, action_space: Any, config: RunConfig) -> RecurrentPolicy:
    """The policy that a class or function makes. It is given the arguments it names out of `observation_space`,
    `action_space` and `config`."""
    if isinstance(policy, str) and stands_for_object(policy):
        raise ValueError(
            f"this run was trained with a policy that Trainer(policy=...) was given ({policy.removeprefix(OWN_POLICY)}) and that "
            "cannot be made from its name: pass it again with policy=, or name it with --policy module:Name"
        )
    make = import_named(policy, kind="policy") if isinstance(policy, str) else policy
    name = policy if isinstance(policy, str) else getattr(policy, "__qualname__", repr(policy))
    expected = "expected a class or function that makes an hf.RecurrentPolicy"
    if isinstance(policy, nn.Module):
        raise TypeError(f"the policy is an nn.Module of type {type(make).__name__}, {expected}, or a RecurrentPolicy")
    if isinstance(make, nn.Module) or not callable(make):
        raise TypeError(f"policy {name} is of type {type(make).__name__}, {expected}")
    offered = {"observation_space": observation_space, "action_space": action_space, "config": config}
    parameters = _parameters(make)
    unknown = [key for key, p in parameters.items() if key not in offered and p.default is p.empty and p.kind in _NAMED]
    if unknown:
        raise TypeError(
            f"policy {name} needs the argument {unknown[0]!r}; it can have {', '.join(offered)}, and defaults for the others"
        )
    made = make(**{key: value for key, value in offered.items() if key in parameters})
    if not isinstance(made, RecurrentPolicy):
        raise TypeError(f"policy {name} made an object of type {type(made).__name__}, {expected}")
    return made


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except ValueError:  # some classes of C modules do not say
        return {}


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def recorded_name(policy: Any) -> str:
    """What a run's config says about what was passed as a policy: `module:Name` if another program can find it there."""
    if isinstance(policy, str):
        return policy
    if not isinstance(policy, RecurrentPolicy) and callable(policy):
        with contextlib.suppress(ValueError, AttributeError):
            name = name_of(policy)
            if not name.startswith("__main__:"):  # another program has another main module
                return name
        return OWN_POLICY + getattr(policy, "__name__", type(policy).__name__).strip("<>")
    return OWN_POLICY + type(policy).__name__
