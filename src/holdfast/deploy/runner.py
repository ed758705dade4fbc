"""`Runner`: a trained policy in use. It keeps the memory of every environment for the caller.

    runner = hf.Runner("policy.onnx")                  # or a .pt2, a run folder, a checkpoint, a policy
    chosen = runner.act(obs, resets)                   # B environments: .action .value, each [B, ...]
    chosen = runner.act(obs, terminated or truncated)  # one environment: an observation without a batch dimension
    chosen = runner.act(obs, first, env_ids="alice")   # ids are anything that can be a key of a dict

`resets[b]` is True when `obs[b]` is the first observation of an episode. Several threads may use one runner; their calls
run one after another. It does not train.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Hashable, Iterable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from holdfast.deploy import nonfinite
from holdfast.deploy.feedback import FeedBack, wants_feedback
from holdfast.deploy.keyed_memory import KeyedMemory, many_ids, one_id
from holdfast.deploy.step_model import StepModel, open_model
from holdfast.policies.action_parts import with_batch
from holdfast.policies.base import RecurrentPolicy
from holdfast.state import leaves, tree_map


class Action(NamedTuple):
    """What `Runner.act` returns: each [B, ...], or without B if the observation came without it."""

    action: Any
    """As the environment takes it: clipped to the bounds of a Box; a dict or tuple for a Dict or Tuple action space."""
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
        model = open_model(path_or_policy, observation_space, device, threads)
        self._asks_for_mask = model.expects_mask
        self._model: StepModel = FeedBack(model, model.ports or []) if wants_feedback(model.ports) else model
        self._step = GuardedStep(self._model, on_nonfinite)
        self.memory = KeyedMemory(self._model.core, max_envs)
        # While one environment acts alone: [its id], and its state as the model takes it. Its row in memory is stale.
        self._alone: tuple[list[Any], Any] | None = None
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        return f"Runner({self._model}, {self.num_envs} environment{'s' * (self.num_envs != 1)})"

    @property
    def on_nonfinite(self) -> str:
        """As given."""
        return self._step.on_nonfinite

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
        sees its previous reward; ignored at resets, unless the memory crosses them (reset="never").
        """
        numpy = not isinstance(leaves(obs)[0], Tensor)
        with self._lock:
            if action_mask is None and self._asks_for_mask:
                self._ask_for_mask()
            inputs, batch = self._model.inputs(obs, rewards)
            if batch is None:
                return self._act_alone(inputs, resets, env_ids, action_mask, deterministic, numpy)
            return self._act_together(batch, inputs, resets, env_ids, action_mask, deterministic, numpy)

    def reset(self, env_ids: Any = None) -> None:
        """Make environments start from a fresh state: one id or several; None, or slice(None): all."""
        with self._lock:
            self._settle()
            self.memory.reset(None if env_ids is None else self._ids(env_ids))

    def forget(self, env_ids: Any = None) -> None:
        """Drop environments, so that fewer can continue: one id or several; None, or slice(None): all."""
        with self._lock:
            self._settle()
            ids = None if env_ids is None else self._ids(env_ids)
            self.memory.forget(ids)
            self._step.forget(ids)

    def state_dict(self) -> dict[str, Any]:
        """A copy of the memory, to continue from in another process; ids are saved as they are, least recently used first."""
        with self._lock:
            self._settle()
            return self.memory.state_dict()

    def load_state_dict(self, d: dict[str, Any]) -> None:
        """Restore a copy from `state_dict`; refused as a whole if it is of another core.

        Of more environments than max_envs, the least recently used are forgotten.
        """
        with self._lock:
            self.memory.load_state_dict(d)
            self._alone = None

    # --- inside ------------------------------------------------------------------------------------------------------

    def _act_alone(
        self, inputs: Any, resets: Any, env_ids: Any, action_mask: Any, deterministic: bool, numpy: bool
    ) -> Action:
        model, ids = self._model, [self._id_alone(env_ids)]
        alone = self._alone if self._alone is not None and self._alone[0] == ids else None
        if alone is None:
            self._settle()
        state = model.from_memory(self.memory.read(ids)) if alone is None else alone[1]
        flags, mask = model.flags(_one_flag(resets), 1), with_batch(action_mask)
        action, value, raw, state = self._step(ids, inputs, flags, state, mask, deterministic, numpy)
        if alone is None:
            self._use(ids)
        self._alone = ids, state
        found = [None if part is None else model.result(part, numpy) for part in (action, value, raw)]
        return Action(*[None if part is None else tree_map(itemgetter(0), part) for part in found])

    def _act_together(
        self, batch: int, inputs: Any, resets: Any, env_ids: Any, action_mask: Any, deterministic: bool, numpy: bool
    ) -> Action:
        model = self._model
        self._settle()
        flags = model.flags(resets, batch)
        stored, keys = self.memory.take(batch, env_ids)
        ids: Sequence[Hashable] = range(batch) if keys is None else keys
        state = model.from_memory(stored)
        action, value, raw, state = self._step(ids, inputs, flags, state, action_mask, deterministic, numpy)
        if keys is not None or len(self.memory.used) < batch:  # 0..B-1 are always used together
            self._use(ids)
        self.memory.put(model.to_memory(state), keys)
        return Action(*[None if part is None else model.result(part, numpy) for part in (action, value, raw)])

    def _use(self, ids: Sequence[Hashable]) -> None:
        gone = self.memory.use(ids)
        if gone:
            self._step.forget(gone)

    def _settle(self) -> None:
        """Write the state of the environment that acts alone to its row."""
        if self._alone is not None:
            ids, state = self._alone
            self.memory.write(self._model.to_memory(state), ids)
            self._alone = None

    def _ids(self, env_ids: Any) -> list[Any]:
        """Ids of `reset` and `forget`: of several environments, or of one. A tuple is one id if it is known, else several."""
        several = isinstance(env_ids, (list, tuple, range, slice, Tensor, np.ndarray))
        if isinstance(env_ids, tuple) and all(isinstance(part, Hashable) for part in env_ids):
            several = env_ids not in self.memory.used
        return many_ids(env_ids, self.memory) if several else [one_id(env_ids)]

    def _id_alone(self, env_id: Any) -> Any:
        """The id of the environment that acts alone."""
        if env_id is not None:
            return one_id(env_id)
        used = self.memory.used
        if len(used) > 1 or (len(used) == 1 and 0 not in used):
            raise ValueError(
                f"got one observation, but this runner knows other environments than 0 ({self.num_envs} in total): "
                "pass env_ids=ID, or forget() the others"
            )
        return 0

    def _ask_for_mask(self) -> None:
        self._asks_for_mask = False
        warnings.warn(
            f"{self._model} was trained or exported with action masks and none came: it may choose forbidden actions. Pass "
            "action_mask=, True where an action is allowed (said once)",
            stacklevel=3,
        )


def _one_flag(resets: Any) -> list[bool] | None:
    """The flag of one environment, from a bool or an array that holds one."""
    try:
        return None if resets is None else [bool(resets)]
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"got one observation with {len(resets)} resets; expected one flag") from error


# --- numbers that are not finite -------------------------------------------------------------------------------------
# `GuardedStep`: a model's step, with NaN and infinity handled as the user of a `Runner` chose.


class GuardedStep:
    """on_nonfinite: "raise", "skip" or "reset"; `hf.Runner` says what they mean."""

    def __init__(self, model: StepModel, on_nonfinite: str) -> None:
        if on_nonfinite not in nonfinite.POLICIES:
            raise ValueError(f"on_nonfinite is {on_nonfinite!r}, expected one of {', '.join(nonfinite.POLICIES)}")
        self.model, self.on_nonfinite = model, on_nonfinite
        self._warned: set[Hashable] = set()

    def __call__(
        self, ids: Sequence[Hashable], inputs: Any, flags: Any, state: Any, mask: Any, deterministic: bool, numpy: bool
    ) -> tuple[Any, Any, Any, Any]:
        """(action, value, raw action, new state) of the environments `ids`."""
        model = self.model
        bad_obs = nonfinite.bad_rows(inputs, numpy)
        if bad_obs is not None:
            self._report(ids, bad_obs, "observation")
            inputs = nonfinite.zeroed(inputs)
            if self.on_nonfinite == "reset":
                flags = nonfinite.flagged(flags, bad_obs, model.core.device())
        action, value, raw, new, logits = model.step(inputs, flags, state, mask, deterministic)
        bad_state = nonfinite.bad_rows(new, numpy)
        if bad_state is not None:
            self._report(ids, bad_state, "new state")
        if nonfinite.bad_rows([raw], numpy) is not None or nonfinite.impossible(logits, numpy):
            raise FloatingPointError("the policy's action holds NaN or infinity; look at its weights")
        if bad_state is None and (bad_obs is None or self.on_nonfinite == "reset"):
            return action, value, raw, new
        replaced = bad_state if bad_obs is None else bad_obs if bad_state is None else bad_obs | bad_state
        assert replaced is not None
        fresh = model.from_memory(model.core.initial_state(len(replaced)))
        if self.on_nonfinite == "skip":  # an episode that started with this step has started
            fresh = nonfinite.where(nonfinite.as_rows(flags, len(replaced)), fresh, state)
        after = nonfinite.where(replaced, fresh, new)
        if isinstance(model, FeedBack):  # the environment was given this action
            after = model.with_action_of(new, after)
        return action, value, raw, after

    def forget(self, ids: Iterable[Hashable] | None) -> None:
        """Warn again if these environments come back; None: all."""
        self._warned.clear() if ids is None else self._warned.difference_update(ids)

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
                    stacklevel=5,
                )
