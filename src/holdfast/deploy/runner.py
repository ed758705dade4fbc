"""`Runner`: a trained policy in use. It keeps the memory of every environment, so that the caller cannot forget to.

    runner = hf.Runner("policy.onnx")                  # or a .pt2, a run folder, a checkpoint, a policy
    chosen = runner.act(obs, resets)                   # B environments: .action .value, each [B, ...]
    chosen = runner.act(obs, terminated or truncated)  # one environment: an observation without a batch dimension

`resets[b]` is True when `obs[b]` is the first observation of an episode. Training is not done here.
"""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from holdfast.checks import check_resets
from holdfast.cores.base import Core
from holdfast.deploy.export_graph import clip_bounds
from holdfast.deploy.exported_policy import SUFFIXES, ExportedPolicy
from holdfast.deploy.exported_signature import batch_size, nest, observation_ports, sample_observations, take
from holdfast.memory import EnvIds, Memory
from holdfast.policies.base import RecurrentPolicy, to_numpy
from holdfast.state import State, leaves


class Action(NamedTuple):
    """What `Runner.act` returns: each [B, ...], or without B if the observation came without it."""

    action: Any
    """As the environment takes it: clipped to the bounds of a Box."""
    value: Any
    """None if the policy has no critic."""
    raw_action: Any
    """Before clipping: what a policy that sees its previous action was trained on."""


class Runner:
    """Acts with a trained policy: a run folder, a checkpoint, a policy, or an exported .onnx or .pt2 file.

    numpy in, numpy out; tensors in, tensors out. observation_space: for your own policy if it has none, so that
    observations without a batch dimension are recognized. device: where a policy from a run or checkpoint goes.
    threads: of onnxruntime.
    """

    def __init__(
        self,
        path_or_policy: str | Path | RecurrentPolicy,
        *,
        observation_space: Any = None,
        device: str = "cpu",
        threads: int = 1,
    ) -> None:
        self._model: StepModel = _open(path_or_policy, observation_space, device, threads)
        self.memory = Memory(self._model.core)
        # While one environment acts alone its state is here, as the model takes it, and its row in memory is stale.
        self._alone: int | None = None
        self._alone_state: Any = None

    def __repr__(self) -> str:
        return f"Runner({self._model}, {self.num_envs} environments)"

    @property
    def num_envs(self) -> int:
        """How many environments are known."""
        self._settle()
        return self.memory.num_envs

    def act(
        self,
        obs: Any,
        resets: Any = None,
        env_ids: EnvIds = None,
        *,
        deterministic: bool = True,
        action_mask: Any = None,
    ) -> Action:
        """One step: read memory, reset, act, write memory.

        env_ids=None means ids 0..B-1. An observation without a batch dimension is of environment `env_ids` alone (0 by
        default); `resets` and `action_mask` then have no batch dimension either.
        """
        model = self._model
        inputs, batch = model.inputs(obs)
        numpy = not isinstance(leaves(obs)[0], Tensor)
        if batch is None:
            env_id, state = self._state_alone(env_ids)
            flags, mask = model.flags(_one_flag(resets), 1), _with_batch(action_mask)
            action, value, raw, state = model.step(inputs, flags, state, mask, deterministic)
            self._alone, self._alone_state = env_id, state
            parts = [None if part is None else model.result(part, numpy)[0] for part in (action, value, raw)]
            return Action(*parts)
        self._settle()
        flags = model.flags(resets, batch)
        stored, ids = self.memory.take(batch, env_ids)
        action, value, raw, state = model.step(inputs, flags, model.from_memory(stored), action_mask, deterministic)
        self.memory.put(model.to_memory(state), ids)
        return Action(*[None if part is None else model.result(part, numpy) for part in (action, value, raw)])

    def reset(self, env_ids: EnvIds = None) -> None:
        """Make environments start from a fresh state; None: all."""
        self._settle()
        self.memory.reset(env_ids)

    def forget(self, env_ids: EnvIds = None) -> None:
        """Drop environments, so that fewer can continue; None: all."""
        self._settle()
        self.memory.forget(env_ids)

    def state_dict(self) -> dict[str, Any]:
        """A copy of the memory, to continue from in another process."""
        self._settle()
        return self.memory.state_dict()

    def load_state_dict(self, d: dict[str, Any]) -> None:
        """Take over a copy from `state_dict`; refused as a whole if it is of another core."""
        self.memory.load_state_dict(d)
        self._alone = self._alone_state = None

    def _state_alone(self, env_id: Any) -> tuple[int, Any]:
        """The id of the environment that acts alone, and its state."""
        if env_id is None:
            if self.memory.num_rows > 1 or self._alone not in (None, 0):
                raise ValueError(
                    f"one observation came, but this runner knows other environments than 0 ({self.num_envs} in all): "
                    "pass env_ids=ID, or forget() the others"
                )
            env_id = 0
        try:
            env_id = operator.index(env_id)
        except TypeError as error:
            raise ValueError(
                f"one observation came with env_ids={env_id!r}; pass the number of its environment"
            ) from error
        if self._alone == env_id:
            return env_id, self._alone_state
        self._settle()
        return env_id, self._model.from_memory(self.memory.read([env_id]))

    def _settle(self) -> None:
        """Write the state of the environment that acts alone to its row."""
        if self._alone is not None:
            self.memory.write(self._model.to_memory(self._alone_state), [self._alone])
            self._alone = self._alone_state = None


class StepModel(Protocol):
    """One step of a policy, on its own kind of arrays; it keeps nothing."""

    core: Core  # whose rows `hf.Memory` keeps

    def inputs(self, obs: Any) -> tuple[Any, int | None]: ...
    def flags(self, resets: Any, batch: int) -> Any: ...
    def from_memory(self, state: State) -> Any: ...
    def to_memory(self, state: Any) -> State: ...
    def step(
        self, inputs: Any, flags: Any, state: Any, action_mask: Any, deterministic: bool
    ) -> tuple[Any, Any, Any, Any]: ...
    def result(self, array: Any, numpy: bool) -> Any: ...


class TorchPolicy:
    """One step of a policy in torch; `ExportedPolicy` is the same in numpy."""

    def __init__(self, policy: RecurrentPolicy, observation_space: Any = None) -> None:
        self.policy, self.core = policy, policy.core
        space = getattr(policy, "observation_space", None) if observation_space is None else observation_space
        self._ports = None if space is None else observation_ports(sample_observations(space, 1))
        action_space = getattr(policy, "action_space", None)
        self._bounds = clip_bounds(action_space)
        dtype = getattr(action_space, "dtype", None)
        self._action_dtype = None if dtype is None else getattr(torch, str(dtype))

    def __repr__(self) -> str:
        return type(self.policy).__name__

    def inputs(self, obs: Any) -> tuple[Any, int | None]:
        """Observations as tensors with a batch dimension, and B; None: they came without one."""
        if self._ports is None:
            tensors = self.policy.as_tensors(obs)
            return tensors, int(leaves(tensors)[0].shape[0])
        device = self.core.device()
        parts = [torch.as_tensor(take(obs, port), device=device) for port in self._ports]
        batch = batch_size(self._ports, [part.shape for part in parts])
        if batch is None:
            parts = [part.unsqueeze(0) for part in parts]
        return nest(self._ports, parts), batch

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
    ) -> tuple[Tensor, Tensor | None, Tensor, State]:
        """(action as the environment takes it, value, raw action, state) of B environments."""
        mask = self.policy.as_mask(action_mask)
        with torch.no_grad():
            dist, value, state = self.policy.step(inputs, state, flags, action_mask=mask, checked=True)
            raw = dist.mode if deterministic else dist.sample()
        action = raw if self._bounds is None else raw.clamp(*(bound.to(raw.device) for bound in self._bounds))
        if self._action_dtype is not None and action.dtype != self._action_dtype:
            action = action.to(self._action_dtype)
        return action, value, raw, state

    def result(self, tensor: Tensor, numpy: bool) -> Any:
        return to_numpy(tensor) if numpy else tensor


def _one_flag(resets: Any) -> list[bool] | None:
    """The flag of one environment, from a bool or an array that holds one."""
    try:
        return None if resets is None else [bool(resets)]
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"one observation came with {len(resets)} resets; expected one flag") from error


def _with_batch(mask: Any) -> Any:
    if mask is None or isinstance(mask, Tensor):
        return mask if mask is None else mask.unsqueeze(0)
    if isinstance(mask, (list, tuple)) and not all(isinstance(m, (bool, int)) for m in mask):
        return [_with_batch(part) for part in mask]
    return np.asarray(mask)[None]


def _open(source: Any, observation_space: Any, device: str, threads: int) -> TorchPolicy | ExportedPolicy:
    source = getattr(source, "_orig_mod", source)  # torch.compile's wrapper
    if isinstance(source, RecurrentPolicy):
        return TorchPolicy(source, observation_space)
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
    from holdfast.runs.saved_policy import load

    return TorchPolicy(load(path, device=device).eval(), observation_space)
