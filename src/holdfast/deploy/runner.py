"""`Runner`: a trained policy in use. It keeps the memory of every environment, so that the caller cannot forget to.

    runner = hf.Runner("policy.onnx")                  # or a .pt2, a run folder, a checkpoint, a policy
    chosen = runner.act(obs, resets)                   # B environments: .action .value, each [B, ...]
    chosen = runner.act(obs, terminated or truncated)  # one environment: an observation without a batch dimension
    chosen = runner.act(obs, first, env_ids="alice")   # ids are anything that can be a key of a dict

`resets[b]` is True when `obs[b]` is the first observation of an episode. Several threads may use one runner; their calls
run one after another. Training is not done here.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from holdfast.checks import check_discrete, check_resets
from holdfast.cores.base import Core
from holdfast.deploy import nonfinite
from holdfast.deploy.export_graph import clip_bounds
from holdfast.deploy.exported_policy import SUFFIXES, ExportedPolicy
from holdfast.deploy.exported_signature import Port, batch_size, nest, observation_ports, sample_observations, take
from holdfast.deploy.feedback import FeedBack, wants_feedback
from holdfast.deploy.known_envs import KnownEnvs, many_ids, one_id
from holdfast.memory import Memory
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

    max_envs: how many environments are remembered. Beyond it, the least recently used are forgotten, and start
    from a fresh state if they come back.

    on_nonfinite: what to do with an environment whose observation, or new state, holds NaN or infinity. "raise": a
    FloatingPointError that names it; memory is unchanged. "skip": act as if the bad numbers were 0, and keep the state
    from before; "reset": the same from a fresh state; both warn once per environment. Tensors on a GPU are checked if
    the result is copied to the host anyway (numpy in, numpy out), or under `hf.debug(True)`.
    """

    def __init__(
        self,
        path_or_policy: str | Path | RecurrentPolicy,
        *,
        observation_space: Any = None,
        device: str = "cpu",
        threads: int = 1,
        max_envs: int = 100_000,
        on_nonfinite: str = "raise",
    ) -> None:
        if on_nonfinite not in nonfinite.POLICIES:
            raise ValueError(f"on_nonfinite is {on_nonfinite!r}, expected one of {', '.join(nonfinite.POLICIES)}")
        model = _open(path_or_policy, observation_space, device, threads)
        self._model: StepModel = FeedBack(model, model.ports or []) if wants_feedback(model.ports) else model
        self.on_nonfinite = on_nonfinite
        self._known = KnownEnvs(max_envs)
        self.memory = Memory(self._model.core, max_envs)
        # While one environment acts alone its state is here, as the model takes it, and its row in memory is stale.
        self._alone: tuple[Hashable, int] | None = None  # id and number
        self._alone_state: Any = None
        self._warned: set[Hashable] = set()
        self._asks_for_mask = model.expects_mask
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        return f"Runner({self._model}, {self.num_envs} environment{'s' * (self.num_envs != 1)})"

    @property
    def num_envs(self) -> int:
        """How many environments are known."""
        with self._lock:
            self._settle()
            return self.memory.num_envs

    def act(
        self,
        obs: Any,
        resets: Any = None,
        env_ids: Any = None,
        *,
        rewards: Any = None,
        deterministic: bool = True,
        action_mask: Any = None,
    ) -> Action:
        """One step: read memory, reset, act, write memory.

        env_ids=None means ids 0..B-1; otherwise one id per row, anything that can be a key of a dict. An observation
        without a batch dimension is of environment `env_ids` alone (0 by default); `resets`, `rewards` and `action_mask`
        then have no batch dimension either. rewards: the reward of each environment's last action, for a policy that
        sees its previous reward; ignored at resets.
        """
        numpy = not isinstance(leaves(obs)[0], Tensor)
        with self._lock:
            if action_mask is None and self._asks_for_mask:
                self._ask_for_mask()
            inputs, batch = self._model.inputs(obs, rewards)
            if batch is None:
                return self._act_alone(inputs, resets, env_ids, action_mask, deterministic, numpy)
            return self._act_together(batch, inputs, resets, env_ids, action_mask, deterministic, numpy)

    def _act_alone(
        self, inputs: Any, resets: Any, env_ids: Any, action_mask: Any, deterministic: bool, numpy: bool
    ) -> Action:
        model, env_id = self._model, self._id_alone(env_ids)
        if self._alone is not None and self._alone[0] == env_id:
            state = self._alone_state
        else:
            self._settle()
            state = model.from_memory(self.memory.read(self._known.numbers([env_id])))
        flags, mask = model.flags(_one_flag(resets), 1), _with_batch(action_mask)
        action, value, raw, state = self._step([env_id], inputs, flags, state, mask, deterministic, numpy)
        if self._alone is None or self._alone[0] != env_id:
            self._use([env_id])
            self._alone = env_id, self._known.numbers([env_id])[0]
        self._alone_state = state
        return Action(*[None if part is None else model.result(part, numpy)[0] for part in (action, value, raw)])

    def _act_together(
        self, batch: int, inputs: Any, resets: Any, env_ids: Any, action_mask: Any, deterministic: bool, numpy: bool
    ) -> Action:
        model = self._model
        self._settle()
        flags = model.flags(resets, batch)
        ids: Sequence[Hashable] = range(batch) if env_ids is None else many_ids(env_ids, self._known)
        stored, numbers = self.memory.take(batch, None if env_ids is None else self._known.numbers(ids))
        state = model.from_memory(stored)
        action, value, raw, state = self._step(ids, inputs, flags, state, action_mask, deterministic, numpy)
        if env_ids is not None or len(self._known) < batch:  # 0..B-1 act together: their order says nothing
            self._use(ids)
        self.memory.put(model.to_memory(state), numbers)
        return Action(*[None if part is None else model.result(part, numpy) for part in (action, value, raw)])

    def _step(
        self, ids: Sequence[Hashable], inputs: Any, flags: Any, state: Any, mask: Any, deterministic: bool, numpy: bool
    ) -> tuple[Any, Any, Any, Any]:
        """The model's step, with what is not finite handled as the user chose."""
        model = self._model
        bad = nonfinite.bad_rows(inputs, numpy)
        if bad is not None:
            self._report(ids, bad, "observation")
            inputs = nonfinite.zeroed(inputs)
            if self.on_nonfinite == "reset":
                flags = nonfinite.flagged(flags, bad, model.core.device())
        action, value, raw, new, logits = model.step(inputs, flags, state, mask, deterministic)
        spoiled = nonfinite.bad_rows(new, numpy)
        if spoiled is not None:
            self._report(ids, spoiled, "new state")
        if nonfinite.bad_rows([raw], numpy) is not None or nonfinite.impossible(logits, numpy):
            raise FloatingPointError("the policy's action holds NaN or infinity; look at its weights")
        if spoiled is None and (bad is None or self.on_nonfinite == "reset"):
            return action, value, raw, new
        kept = spoiled if bad is None else bad if spoiled is None else bad | spoiled
        assert kept is not None
        fresh = model.from_memory(model.core.initial_state(len(kept)))
        if self.on_nonfinite == "skip":  # an episode that began with this step begins all the same
            fresh = nonfinite.where(nonfinite.as_rows(flags, len(kept)), fresh, state)
        after = nonfinite.where(kept, fresh, new)
        if isinstance(model, FeedBack):  # the environment gets this action all the same
            after = model.with_action_of(new, after)
        return action, value, raw, after

    def _ask_for_mask(self) -> None:
        self._asks_for_mask = False
        warnings.warn(
            f"{self._model} was trained or exported with action masks and none came: it may choose forbidden actions. Pass "
            "action_mask=, True where an action is allowed (said once)",
            stacklevel=3,
        )

    def _report(self, ids: Sequence[Hashable], bad: nonfinite.Flags, what: str) -> None:
        which = [ids[int(row)] for row in bad.nonzero()[0]]
        if self.on_nonfinite == "raise":
            more = f" and of {len(which) - 1} more" if len(which) > 1 else ""
            raise FloatingPointError(
                f"the {what} of environment {which[0]!r}{more} holds NaN or infinity; its memory is unchanged. To continue "
                'without it: Runner(..., on_nonfinite="skip") or "reset"'
            )
        for env_id in which:
            if env_id not in self._warned:
                self._warned.add(env_id)
                how = "its memory stays as it was" if self.on_nonfinite == "skip" else "its memory starts afresh"
                warnings.warn(
                    f"the {what} of environment {env_id!r} holds NaN or infinity: {how} (said once per environment)",
                    stacklevel=6,
                )

    def reset(self, env_ids: Any = None) -> None:
        """Make environments start from a fresh state: one id or several; None, or slice(None): all."""
        with self._lock:
            self._settle()
            self.memory.reset(None if env_ids is None else self._known.numbers(self._ids(env_ids)))

    def forget(self, env_ids: Any = None) -> None:
        """Drop environments, so that fewer can continue: one id or several; None, or slice(None): all."""
        with self._lock:
            self._settle()
            if env_ids is None:
                self._known.clear()
                self._warned.clear()
                self.memory.forget(None)
            else:
                ids = self._ids(env_ids)
                self._warned.difference_update(ids)
                self.memory.forget(self._known.drop(ids))

    def state_dict(self) -> dict[str, Any]:
        """A copy of the memory, to continue from in another process; ids are saved as they are, least recently used first."""
        with self._lock:
            self._settle()
            names = self._known.names()
            saved = self.memory.state_dict()
            plain = all(number == name for number, name in names.items()) and list(names) == sorted(names)
            return saved if plain else {**saved, "names": names}

    def load_state_dict(self, d: dict[str, Any]) -> None:
        """Restore a copy from `state_dict`; refused as a whole if it is of another core.

        Of more environments than max_envs, the least recently used are forgotten.
        """
        with self._lock:
            self.memory.load_state_dict(d)
            names = d.get("names", {})
            self.memory.forget(self._known.load(names or {number: number for number in self.memory.env_ids}))
            self._alone = self._alone_state = None

    def _ids(self, env_ids: Any) -> list[Hashable]:
        """Ids of `reset` and `forget`: of several environments, or of one. A tuple is one id if it is known, else several."""
        several = isinstance(env_ids, (list, tuple, range, slice, Tensor, np.ndarray))
        if isinstance(env_ids, tuple) and all(isinstance(part, Hashable) for part in env_ids):
            several = env_ids not in self._known
        return many_ids(env_ids, self._known) if several else [one_id(env_ids)]

    def _id_alone(self, env_id: Any) -> Hashable:
        """The id of the environment that acts alone."""
        if env_id is not None:
            return one_id(env_id)
        if len(self._known) > 1 or (len(self._known) == 1 and 0 not in self._known):
            raise ValueError(
                f"got one observation, but this runner knows other environments than 0 ({self.num_envs} in total): "
                "pass env_ids=ID, or forget() the others"
            )
        return 0

    def _use(self, ids: Sequence[Hashable]) -> None:
        """These environments are the last that acted; what is too much is forgotten."""
        gone = self._known.use(ids)
        if gone:
            self.memory.forget(list(gone.values()))
            self._warned.difference_update(gone)

    def _settle(self) -> None:
        """Write the state of the environment that acts alone to its row."""
        if self._alone is not None:
            self.memory.write(self._model.to_memory(self._alone_state), [self._alone[1]])
            self._alone = self._alone_state = None


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
        space = getattr(policy, "observation_space", None) if observation_space is None else observation_space
        self.observation_space = space
        self.ports = None if space is None else observation_ports(sample_observations(space, 1))
        action_space = getattr(policy, "action_space", None)
        start = getattr(action_space, "start", 0)
        self.first_action = int(start) if np.ndim(start) == 0 else 0
        self._bounds = clip_bounds(action_space)
        dtype = getattr(action_space, "dtype", None)
        self._action_dtype = None if dtype is None else getattr(torch, str(dtype))

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
            if (
                port.dtype == "uint8" and part.is_floating_point()
            ):  # pixels from 0 to 1 would be divided by 255 once more
                raise TypeError(
                    f"{port.name} has dtype {part.dtype}, expected uint8 as in training, pixels from 0 to 255; leave the "
                    "scaling to the policy"
                )
        batch = batch_size(self.ports, [part.shape for part in parts])
        if batch is None:
            parts = [part.unsqueeze(0) for part in parts]
        return nest(self.ports, parts), batch

    def with_parts(self, inputs: Any, parts: dict[Port, Tensor]) -> Any:
        """Inputs with these parts of the observation, at the top, replaced."""
        return {**inputs, **{port.path[0]: part for port, part in parts.items()}}

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
    ) -> tuple[Tensor, Tensor | None, Tensor, State, Any]:
        """(action as the environment takes it, value, raw action, state, logits or None) of B environments."""
        mask = self.policy.as_mask(action_mask)
        with torch.no_grad():
            dist, value, state = self.policy.step(inputs, state, flags, action_mask=mask, checked=True)
            raw = dist.mode if deterministic else dist.sample()
            logits = getattr(getattr(dist, "base_dist", dist), "logits", None)
        action = raw if self._bounds is None else raw.clamp(*(bound.to(raw.device) for bound in self._bounds))
        if self._action_dtype is not None and action.dtype != self._action_dtype:
            action = action.to(self._action_dtype)
        return action, value, raw, state, logits

    def result(self, tensor: Tensor, numpy: bool) -> Any:
        return to_numpy(tensor) if numpy else tensor


def _one_flag(resets: Any) -> list[bool] | None:
    """The flag of one environment, from a bool or an array that holds one."""
    try:
        return None if resets is None else [bool(resets)]
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"got one observation with {len(resets)} resets; expected one flag") from error


def _with_batch(mask: Any) -> Any:
    if mask is None or isinstance(mask, Tensor):
        return mask if mask is None else mask.unsqueeze(0)
    if isinstance(mask, (list, tuple)) and any(m is None or np.ndim(m) for m in mask):  # one per head
        return [_with_batch(part) for part in mask]
    return np.asarray(mask)[None]


def _open(source: Any, observation_space: Any, device: str, threads: int) -> TorchPolicy | ExportedPolicy:
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
