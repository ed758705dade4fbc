"""Traces one step of a policy into a graph of plain tensor operations, with memory as inputs and outputs.

The step is `policy.step` and the most likely action, in float32 on the CPU. Fast kernels are custom operators that
other programs do not have, so the cores run their readable reference here. `export.py` writes the files.
"""

from __future__ import annotations

import copy
import functools
import inspect
import io
import logging
import operator
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from holdfast.cores import Core
from holdfast.deploy.exported_signature import (
    Port,
    Signature,
    action_suffixes,
    nest,
    next_name,
    observation_ports,
    unique_names,
)
from holdfast.engines.cuda_graph import unchecked_distributions
from holdfast.policies import heads
from holdfast.policies.action_parts import has_parts, mask_sizes
from holdfast.policies.base import RecurrentPolicy
from holdfast.state import KeyPath, from_leaves, leaves, map_tensors, ordered_leaves, paths


class ExportError(ValueError):
    """A policy that a format cannot hold, and what to change."""


class StepGraph(nn.Module):
    """One step of `policy` as a function of named tensors that returns named tensors."""

    def __init__(self, policy: RecurrentPolicy, signature: Signature, action_space: Any = None) -> None:
        super().__init__()
        self.policy, self.signature, self.action_space = policy, signature, action_space
        self.action: dict[str, Any] = {}  # filled in by the first step

        def forward(**inputs: Tensor) -> dict[str, Tensor]:
            return self.step(inputs)

        # torch.export names a graph's inputs by the signature of forward.
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        names = [inspect.Parameter(port.name, kind) for port in signature.inputs()]
        forward.__signature__ = inspect.Signature(names)  # type: ignore[attr-defined]
        self.forward = forward

    def step(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        policy, signature = self.policy, self.signature
        obs = nest(signature.observations, [inputs[port.name] for port in signature.observations])
        shapes = policy.core.row_shapes()
        state = from_leaves([inputs[port.name] for port in signature.states], like=shapes)
        masks = [inputs[port.name] for port in signature.masks]
        mask = None if not masks else masks[0] if len(masks) == 1 else masks
        dist, value, state = policy.step(obs, state, inputs["resets"], action_mask=mask, checked=True)
        try:
            action = dist.mode
        except (NotImplementedError, AttributeError) as error:
            base = dist.base_dist if isinstance(dist, torch.distributions.Independent) else dist
            raise ExportError(
                f"the distribution {type(base).__name__} has no most likely action; let decode return a subclass of it with a "
                "property `mode`, or hf.heads.SquashedGaussian in place of a normal distribution through a tanh"
            ) from error
        self.action, parameters = distribution_parameters(dist, self.action_space)
        out = {}
        for (path, suffix), part in zip(action_suffixes(action), leaves(action)):
            bounds = clip_bounds(_part_of(self.action_space, path))
            out[f"action{suffix}"] = part if bounds is None else part.clamp(*bounds)
        if value is not None:
            out["value"] = value
        for port, leaf in zip(signature.states, ordered_leaves(state, shapes)):
            out[next_name(port.name)] = leaf
        return {**out, **parameters}


def clip_bounds(space: Any) -> tuple[Tensor, Tensor] | None:
    """The (low, high) to which the environment's Box clips actions; None if it does not."""
    low, high = getattr(space, "low", None), getattr(space, "high", None)
    if low is None or high is None or not (np.isfinite(low).any() or np.isfinite(high).any()):
        return None
    # In the precision of the bounds: 0.1 in float32 is more than 0.1.
    return torch.as_tensor(low), torch.as_tensor(high)


def _part_of(space: Any, path: KeyPath) -> Any:
    return None if space is None else functools.reduce(operator.getitem, path, space)


def distribution_parameters(dist: Any, space: Any = None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What is needed to sample: a description of the distribution, and its tensors by name. space: that of the actions."""
    if isinstance(dist, heads.Factored):
        described: list[dict[str, Any]] = []
        tensors: dict[str, Tensor] = {}
        for (path, suffix), inner in zip(action_suffixes(dist.parts), leaves(dist.parts)):
            about, own = distribution_parameters(inner)
            part = _part_of(space, path)
            described.append({"path": path, "suffix": suffix, "choices": mask_sizes(part), **about, **_bounds(part)})
            tensors |= {f"{name}{suffix}": tensor for name, tensor in own.items()}
        return {"kind": "factored", "parts": described}, tensors
    if isinstance(dist, heads.Greedy):
        return {"kind": "greedy", "start": dist.start}, {"q": dist.allowed}
    if isinstance(dist, heads.Categorical):
        return {"kind": "categorical", "start": dist.start}, {"logits": dist.logits}
    if isinstance(dist, heads.MultiCategorical):
        # A head that depends on another's choice is masked when that choice is known.
        parts = [
            dist.head(j, []).logits if m is None or m.dim() == 2 else dist.logits[j] for j, m in enumerate(dist.masks)
        ]
        parents = [[j, dist.parents.get(j, j - 1)] for j, m in enumerate(dist.masks) if m is not None and m.dim() == 3]
        return {"kind": "multi_categorical", "nvec": dist.nvec, "parents": parents}, {"logits": torch.cat(parts, -1)}
    if isinstance(dist, heads.SquashedGaussian):  # mean and std of what the tanh gets
        shape, size = (-1, *dist.shape), dist.mean.shape[-1]
        limits = {name: getattr(dist, name).expand(size) for name in ("center", "half_range")}
        return {"kind": "squashed_gaussian", **limits}, {
            "mean": dist.mean.view(shape),
            "std": dist.log_std.exp().reshape(shape),
        }
    if isinstance(dist, heads.Gaussian):
        shape = (-1, *dist.shape)
        return {"kind": "gaussian"}, {"mean": dist.mean.float().view(shape), "std": dist.log_std.exp().reshape(shape)}
    inner = dist.base_dist if isinstance(dist, torch.distributions.Independent) else dist
    if isinstance(inner, torch.distributions.Normal):
        return {"kind": "gaussian"}, {"mean": inner.mean.clone(), "std": inner.stddev.clone()}
    if isinstance(inner, torch.distributions.Categorical) and inner is dist:
        return {"kind": "categorical", "start": 0}, {"logits": inner.logits}
    if isinstance(inner, (heads.Bernoulli, torch.distributions.Bernoulli)):
        return {"kind": "bernoulli"}, {"logits": inner.logits}
    return {"kind": None, "name": type(dist).__name__}, {}


def trace(
    policy: RecurrentPolicy, examples: Any, *, masks: bool, action_space: Any
) -> tuple[torch.export.ExportedProgram, Signature]:
    """The graph of one step of a `plain_copy`, and its inputs and outputs. `examples`: nested arrays [N, ...]."""
    portable = _without_custom_operators(policy)
    signature = Signature(
        observations=observation_ports(examples),
        states=_state_ports(portable),
        masks=_mask_ports(portable, action_space) if masks else [],
    )
    graph = StepGraph(portable, signature, action_space).eval()
    inputs = example_inputs(signature, examples, batch=3)
    batch = torch.export.Dim("batch")
    with torch.no_grad(), unchecked_distributions():
        outputs = list(graph.step(dict(inputs)))  # what is wrong with the policy itself shows here
        about = map_tensors(Tensor.tolist, graph.action)
        try:
            with quietly("torch.fx", "torch.export"):
                program = torch.export.export(
                    graph, (), kwargs=inputs, dynamic_shapes={name: {0: batch} for name in inputs}, strict=False
                )
        except Exception as error:
            raise ExportError(_cannot_trace(policy, error)) from error
    _refuse_foreign_operators(program, policy)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # would put folder names of this machine into the file
    action = about if has_parts(action_space) else {**about, **_bounds(action_space)}
    return program, Signature(signature.observations, signature.states, signature.masks, outputs, action)


def example_inputs(signature: Signature, examples: Any, batch: int) -> dict[str, Tensor]:
    """Inputs of a batch that is neither 0 nor 1, which torch.export would take for constants."""
    rows = np.arange(batch) % len(paths(examples)[0][1])
    inputs = {
        port.name: torch.as_tensor(leaf[rows]) for port, (_, leaf) in zip(signature.observations, paths(examples))
    }
    for port in signature.inputs()[len(inputs) :]:
        dtype = getattr(torch, port.dtype)
        fill = torch.ones if port in signature.masks else torch.zeros
        inputs[port.name] = fill((batch, *port.shape), dtype=dtype)
    return inputs


def plain_copy(policy: RecurrentPolicy) -> RecurrentPolicy:
    """A copy in float32 on the CPU, in evaluation mode."""
    try:
        return copy.deepcopy(policy).cpu().float().eval()
    except Exception as error:
        raise ExportError(f"{type(policy).__name__} cannot be copied ({error}); remove what holds a graph") from error


def _without_custom_operators(policy: RecurrentPolicy) -> RecurrentPolicy:
    twin = copy.deepcopy(policy).requires_grad_(False)  # otherwise the carried state would carry a graph
    for module in twin.modules():
        if isinstance(module, Core) and hasattr(module, "kernel"):
            module.kernel = "reference"  # type: ignore[assignment]
    return twin


def _state_ports(policy: RecurrentPolicy) -> list[Port]:
    """One input per leaf of the state, in the leaf's own dtype."""
    found = [(path, leaf[0].detach()) for path, leaf in paths(policy.initial_state(1))]  # one fresh row
    ports = []
    for name, (path, row) in zip(unique_names("state", [path for path, _ in found]), found):
        if row.dtype == torch.bfloat16:
            raise ExportError(f"{name} is bfloat16, which numpy lacks; let this leaf of the core's state be float32")
        start = row.tolist() if bool(row.any()) else None
        ports.append(Port(name, tuple(row.shape), str(row.dtype).removeprefix("torch."), path, start))
    return ports


def _mask_ports(policy: RecurrentPolicy, space: Any) -> list[Port]:
    from gymnasium import spaces

    if not policy.decode_takes_mask:
        raise ExportError(f"{type(policy).__name__}.decode takes no action_mask; export it without masks")
    if isinstance(space, spaces.Discrete):
        return [Port("action_mask", (int(space.n),), "bool")]
    if has_parts(space) and (total := sum(leaves(mask_sizes(space)))):  # the parts side by side
        return [Port("action_mask", (total,), "bool")]
    if isinstance(space, spaces.MultiBinary):
        return [Port("action_mask", tuple(space.shape), "bool")]
    if isinstance(space, spaces.MultiDiscrete):
        nvec = [int(n) for n in space.nvec]
        parents: dict[int, int] = getattr(policy, "mask_parents", None) or {}
        if not parents:
            return [Port("action_mask", (sum(nvec),), "bool")]
        shapes = [(nvec[parents[j]], n) if j in parents else (n,) for j, n in enumerate(nvec)]
        return [Port(f"action_mask_{j}", shape, "bool") for j, shape in enumerate(shapes)]
    raise ExportError(f"there are no action masks for the action space {space}; export it without masks")


def _bounds(space: Any) -> dict[str, Any]:
    """Of a Box: nested lists, None where there is no bound (JSON has no infinity). And the dtype of actions."""
    if space is None:
        return {}
    out: dict[str, Any] = {"dtype": str(space.dtype)}
    for name in ("low", "high"):
        if hasattr(space, name):
            bound = np.asarray(getattr(space, name), dtype=np.float64)
            out[name] = np.where(np.isfinite(bound), bound, None).tolist()  # type: ignore[call-overload]
    return out


@contextmanager
def quietly(*loggers: str) -> Iterator[None]:
    """Silence what torch's exporters print and warn about; their errors say what is needed."""
    logs = [logging.getLogger(name) for name in loggers]
    levels = [log.level for log in logs]
    try:
        for log in logs:
            log.setLevel(logging.CRITICAL)
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for log, level in zip(logs, levels):
            log.setLevel(level)


def _refuse_foreign_operators(program: torch.export.ExportedProgram, policy: RecurrentPolicy) -> None:
    """Refuse operators that torch itself does not have: other programs could not run the file."""
    called = {node.target for node in program.graph.nodes if isinstance(node.target, torch._ops.OpOverload)}
    foreign = sorted({op.name().partition(".")[0] for op in called if op.namespace not in ("aten", "prim", "prims")})
    if foreign:
        raise ExportError(
            f"{type(policy).__name__} uses the custom operator {', '.join(foreign)}, which no exported file can hold; "
            "use plain torch operations in encode, decode and the core's _step while torch.compiler.is_exporting()"
        )


def _cannot_trace(policy: RecurrentPolicy, error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[0] if lines else "no message"
    return (
        f"{type(policy).__name__} cannot be traced into a graph ({type(error).__name__}: {said}). encode, decode and "
        "the core's _step must be tensor operations that do not depend on values: no .item(), .numpy(), print of a "
        "tensor or `if tensor`, and no fixed batch size"
    )
