"""`StepModel`: one step of a policy, whatever it is stored in. `TorchPolicy` is one in torch; `open_model` finds the right one.

`exported_policy.py` has the one for .onnx and .pt2 files. A step model keeps nothing; `runner.py` keeps the memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from holdfast.checks import check_discrete, check_resets
from holdfast.cores.base import Core, reset_mode_of
from holdfast.deploy.export_graph import clip_bounds
from holdfast.deploy.exported_policy import SUFFIXES, ExportedPolicy
from holdfast.deploy.exported_signature import batch_size, nest, observation_ports, sample_observations, take
from holdfast.policies.action_parts import first_action, tree_of
from holdfast.policies.base import RecurrentPolicy, to_numpy
from holdfast.state import State, from_leaves, leaves, ordered_leaves, tree_map


class StepModel(Protocol):
    """One step of a policy, on its own kind of arrays; it keeps nothing."""

    core: Core  # whose rows `hf.Memory` keeps

    def inputs(self, obs: Any, rewards: Any) -> tuple[Any, int | None]: ...
    def flags(self, resets: Any, batch: int) -> Any: ...
    def from_memory(self, state: State) -> Any: ...
    def to_memory(self, state: Any) -> State: ...
    def step(
        self, inputs: Any, flags: Any, state: Any, action_mask: Any, deterministic: bool
    ) -> tuple[Any, Any, Any, Any, Any]: ...
    def result(self, array: Any, numpy: bool) -> Any: ...


class TorchPolicy:
    """One step of a policy in torch; `ExportedPolicy` is the same in numpy."""

    in_numpy = False

    def __init__(self, policy: RecurrentPolicy, observation_space: Any = None, expects_mask: bool = False) -> None:
        self.policy, self.core, self.expects_mask = policy, policy.core, expects_mask
        self.crosses_episodes = reset_mode_of(policy.core) == "never"
        space = getattr(policy, "observation_space", None) if observation_space is None else observation_space
        self.observation_space = space
        self.ports = None if space is None else observation_ports(sample_observations(space, 1))
        self._parts = tree_of(getattr(policy, "action_space", None))
        self.first_action = tree_map(first_action, self._parts)
        self._limits = [(clip_bounds(part), getattr(part, "dtype", None)) for part in leaves(self._parts)]

    def __repr__(self) -> str:
        return type(self.policy).__name__

    def inputs(self, obs: Any, rewards: Any = None) -> tuple[Any, int | None]:
        """Observations as tensors with a batch dimension, and B; None: they came without one."""
        if self.ports is None:
            tensors = self.policy.as_tensors(obs)
            return tensors, int(leaves(tensors)[0].shape[0])
        device = self.core.device()
        if device.type != "cpu":
            check_discrete(obs, self.observation_space)
        parts = [torch.as_tensor(take(obs, port), device=device) for port in self.ports]
        for port, part in zip(self.ports, parts):
            # Pixels from 0 to 1 would be divided by 255 once more.
            if port.dtype == "uint8" and part.is_floating_point():
                raise TypeError(
                    f"{port.name} has dtype {part.dtype}, expected uint8 as in training, pixels from 0 to 255; leave the "
                    "scaling to the policy"
                )
        batch = batch_size(self.ports, [part.shape for part in parts])
        if batch is None:
            parts = [part.unsqueeze(0) for part in parts]
        return nest(self.ports, parts), batch

    def with_parts(self, inputs: Any, parts: dict[str, Any]) -> Any:
        """Inputs with these parts of the observation, at the top, replaced."""
        return {**inputs, **parts}

    def flags(self, resets: Any, batch: int) -> Tensor | None:
        """[B] bool, checked; None: no reset."""
        if resets is None:
            return None
        flags = self.policy.as_flags(resets)
        check_resets(flags, (batch,), self.core.device())
        return flags

    def from_memory(self, state: State) -> State:
        return state

    def to_memory(self, state: State) -> State:
        return state

    def step(
        self, inputs: Any, flags: Tensor | None, state: State, action_mask: Any, deterministic: bool
    ) -> tuple[Any, Tensor | None, Any, State, Any]:
        """(action as the environment takes it, value, raw action, state, logits or None) of B environments."""
        mask = self.policy.as_mask(action_mask)
        with torch.no_grad():
            dist, value, state = self.policy.step(inputs, state, flags, action_mask=mask, checked=True)
            raw = dist.mode if deterministic else dist.sample()
            logits = getattr(getattr(dist, "base_dist", dist), "logits", None)
        played = [_as_played(part, *limits) for part, limits in zip(ordered_leaves(raw, self._parts), self._limits)]
        return from_leaves(played, like=self._parts), value, raw, state, logits

    def result(self, tensors: Any, numpy: bool) -> Any:
        return tree_map(to_numpy, tensors) if numpy else tensors


def _as_played(raw: Tensor, bounds: tuple[Tensor, Tensor] | None, dtype: Any) -> Tensor:
    """A part of an action as the environment takes it."""
    action = raw if bounds is None else raw.clamp(*(bound.to(raw.device) for bound in bounds))
    return action if dtype is None else action.to(getattr(torch, str(dtype)))


def open_model(source: Any, observation_space: Any, device: str, threads: int) -> TorchPolicy | ExportedPolicy:
    """The step model of a policy, a run folder, a checkpoint or an exported file."""
    source = getattr(source, "_orig_mod", source)  # torch.compile's wrapper
    if isinstance(source, RecurrentPolicy):
        return TorchPolicy(source.deployed(), observation_space)
    if not isinstance(source, (str, Path)):
        raise TypeError(
            "a Runner takes a run folder, a checkpoint, an .onnx or .pt2 file, or a policy; "
            f"got a {type(source).__name__}"
        )
    path = Path(source)
    if path.suffix in SUFFIXES and not path.is_dir():
        if torch.device(device).type != "cpu":
            raise ValueError(f"{path} runs on the CPU; for {device} pass the run or the policy")
        return ExportedPolicy(path, threads)
    from holdfast.runs import saved_policy

    policy = saved_policy.load(path, device=device)
    # Only a checkpoint says whether its environment had masks; a shared policy is of no run here.
    masked = policy.trained_in is not None and saved_policy.was_masked(saved_policy.read(path)[1])
    return TorchPolicy(policy.eval().deployed(), observation_space, masked)
