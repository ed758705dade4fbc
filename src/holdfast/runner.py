"""`Runner`: a trained policy in use. Memory is kept for every environment, and cannot be forgotten.

    runner = hf.Runner("policy.onnx")                  # or a .pt2, a run folder, a checkpoint, a policy
    step = runner.act(obs, resets)                     # B environments: .action .value, each [B, ...]
    step = runner.act(obs, terminated or truncated)    # one environment: an observation without a batch dimension

`resets[b]` is True when `obs[b]` is the first observation of an episode. Training is not done here.
"""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from holdfast.checks import check_resets
from holdfast.export_graph import clipped
from holdfast.exported_policy import SUFFIXES, ExportedPolicy
from holdfast.exported_signature import Port, observation_ports, sample_observations, take
from holdfast.memory import EnvIds, Memory
from holdfast.policy import RecurrentPolicy
from holdfast.state import State, leaves, tree_map


class Action(NamedTuple):
    """What `Runner.act` returns: [B, ...] each, or without B for an observation without it."""

    action: Any
    """As the environment takes it: a Box's clipped to its bounds."""
    value: Any
    raw_action: Any
    """Before clipping: what a policy that sees its previous action was trained on."""


class TorchPolicy:
    """One step of a policy in torch, without a memory of its own."""

    def __init__(self, policy: RecurrentPolicy, observation_space: Any = None) -> None:
        self.policy, self.core = policy, policy.core
        space = getattr(policy, "observation_space", None) if observation_space is None else observation_space
        self.observations: list[Port] | None = None
        if space is not None:
            self.observations = observation_ports(sample_observations(space, 1))
        self.action_space = getattr(policy, "action_space", None)
        self.action_dtype = None if self.action_space is None else str(self.action_space.dtype)

    @property
    def device(self) -> torch.device:
        return self.core.device()

    @torch.no_grad()
    def step(
        self, obs: Any, resets: Tensor | None, state: State, action_mask: Any, deterministic: bool
    ) -> tuple[Any, Any, Any, State]:
        """(action as the environment takes it, raw action, value, state) of B environments."""
        policy = self.policy
        y, state = policy.core(policy._encode(policy._tensors(obs)), state, resets)
        dist, value = policy._decode(y, policy._mask(action_mask))
        raw = dist.mode if deterministic else dist.sample()
        return clipped(raw, self.action_space), raw, value, state


class Runner:
    """Acts with a trained policy: a run folder, a checkpoint, a policy, or an exported .onnx or .pt2 file.

    numpy in, numpy out; tensors in, tensors out. observation_space: for a policy of your own that has none, so that
    observations without a batch dimension are known as such. device: where a policy from a run or checkpoint goes.
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
        self._model = _open(path_or_policy, observation_space, device, threads)
        self.memory = Memory(self._model.core)
        # While one environment acts alone its state is here, and memory's row of it is old.
        self._alone: int | None = None
        self._alone_state: State = None

    def __repr__(self) -> str:
        return f"Runner({self.num_envs} environments, {type(self._model).__name__})"

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

        env_ids=None means ids 0..B-1. An observation without a batch dimension is environment `env_ids` (0 unless
        said otherwise) alone; `resets` and `action_mask` then have no batch dimension either.
        """
        numpy_in = not isinstance(leaves(obs)[0], Tensor)
        batch = self._batch(obs)
        if batch is None:
            obs, action_mask = tree_map(_add_batch, obs), None if action_mask is None else _add_batch(action_mask)
            state, flags = self._state_alone(env_ids), self._flags(resets, 1)
            *out, self._alone_state = self._model.step(obs, flags, state, action_mask, deterministic)
        else:
            self._settle()
            state, ids = self.memory._take(batch, env_ids)
            flags = self._flags(resets, batch)
            *out, state = self._model.step(obs, flags, state, action_mask, deterministic)
            self.memory._put(state, ids)
        action, raw, value = out
        if batch is None:
            action, raw, value = action[0], raw[0], value[0]
        if not numpy_in:
            return Action(action, value, raw)
        return Action(self._for_env(action), value.cpu().numpy()[()], raw.cpu().numpy()[()])

    def reset(self, env_ids: EnvIds = None) -> None:
        """Make environments start afresh; None: all."""
        self._settle()
        self.memory.reset(env_ids)

    def forget(self, env_ids: EnvIds = None) -> None:
        """Drop environments, so that fewer can go on; None: all."""
        self._settle()
        self.memory.forget(env_ids)

    def state_dict(self) -> dict[str, Any]:
        """A copy of the memory, to go on from in another process."""
        self._settle()
        return self.memory.state_dict()

    def load_state_dict(self, d: dict[str, Any]) -> None:
        """Take over a copy from `state_dict`; refused whole if it is of another core."""
        self.memory.load_state_dict(d)
        self._alone = self._alone_state = None

    # --- inside -----------------------------------------------------------------------------------------------------

    def _state_alone(self, env_id: Any) -> State:
        """The state of one environment, kept outside memory until another one acts."""
        if env_id is None:
            env_id = 0
            if self.memory.num_rows > 1:
                raise ValueError(
                    f"one observation came, but this runner knows {self.memory.num_rows} environments: "
                    "pass env_ids=ID, or forget() the others"
                )
        elif not hasattr(env_id, "__index__"):
            raise ValueError(f"one observation came with env_ids={env_ids_text(env_id)}; pass one number, or a batch")
        env_id = operator.index(env_id)
        if self._alone != env_id:
            self._settle()
            state = self.memory.read([env_id])
            self._alone, self._alone_state = env_id, state
        return self._alone_state

    def _settle(self) -> None:
        """Write the state of the environment that acts alone to its row."""
        if self._alone is not None:
            self.memory.write(self._alone_state, [self._alone])
            self._alone = self._alone_state = None

    def _batch(self, obs: Any) -> int | None:
        """How many environments these observations are of; None: one, without a batch dimension."""
        ports = self._model.observations
        if ports is None:
            return int(leaves(obs)[0].shape[0])
        batches: set[int | None] = set()
        for port in ports:
            shape = tuple(np.shape(take(obs, port)))
            if shape == port.shape:
                batches.add(None)
            elif shape[1:] == port.shape and shape:
                batches.add(shape[0])
            else:
                raise ValueError(
                    f"an observation ({port.name}) of shape {shape} came, expected {port.shape}, or "
                    f"{('B', *port.shape)} for B environments"
                )
        if len(batches) > 1:
            raise ValueError(f"the parts of the observation are of different batch sizes: {batches}")
        return batches.pop()

    def _flags(self, resets: Any, batch: int) -> Tensor | None:
        if resets is None:
            return None
        device = self._model.device
        flags = resets if isinstance(resets, Tensor) else torch.as_tensor(np.asarray(resets), device=device)
        if batch == 1 and flags.dim() == 0:
            flags = flags.view(1)
        check_resets(flags, (batch,), device)
        return flags

    def _for_env(self, action: Tensor) -> Any:
        array, dtype = action.cpu().numpy(), self._model.action_dtype
        return (array if dtype is None else array.astype(dtype, copy=False))[()]


def env_ids_text(env_ids: Any) -> str:
    text = repr(env_ids)
    return text if len(text) < 60 else f"{text[:57]}..."


def _add_batch(part: Any) -> Any:
    return part.unsqueeze(0) if isinstance(part, Tensor) else np.asarray(part)[None]


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
            raise ValueError(f"{path} runs on the CPU; for {device} give the run or the policy")
        return ExportedPolicy(path, threads)
    from holdfast.saved_policy import load

    return TorchPolicy(load(path, device=device).eval(), observation_space)
