"""A recurrent policy behind TensorDicts: one `forward` for the rollout and the training leg.

    td_policy = TensorDictPolicy(policy)
    start = td_policy.start_state(td)                 # before the rollout: what to keep for training
    td_policy(td)                                     # rollout: actions, act_log_prob, values, full_log_probs
    td_policy(batch, state=start, action=actions)     # training: act_log_prob, entropy, value, full_log_probs

`entries.py` says what the entries mean. Policies written around `_manage_lstm_state` use `LSTMWrapper`. Needs the extra
`tensordict`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from holdfast.integrations import entries
from holdfast.integrations.lstm_wrapper import LSTMWrapper
from holdfast.memory import EnvIds, Memory
from holdfast.policies.action_parts import has_parts
from holdfast.policies.base import RecurrentPolicy
from holdfast.policies.heads import entropy_of
from holdfast.state import State, map_tensors, tree_map

if TYPE_CHECKING:
    from tensordict import TensorDictBase

__all__ = ["LSTMWrapper", "TensorDictPolicy"]


class TensorDictPolicy(nn.Module):
    """An `hf.RecurrentPolicy` behind TensorDicts. Results are written into the TensorDict, which is returned.

    obs_key: the entry with the observation ("env_obs", then "observation"); a nested one becomes a dict.
    mask_key: the entry that holds action masks, used when it is there.
    `full_log_probs` is written when the action distribution has it (discrete actions).
    """

    def __init__(self, policy: RecurrentPolicy, *, obs_key: Any = None, mask_key: Any = "action_mask") -> None:
        super().__init__()
        if not isinstance(policy, RecurrentPolicy):
            raise TypeError(f"TensorDictPolicy takes an hf.RecurrentPolicy, got a {type(policy).__name__}")
        if has_parts(getattr(policy, "action_space", None)):
            raise TypeError(
                "TensorDictPolicy takes policies whose action is one tensor, and this one plays a Dict or Tuple"
            )
        self.policy = policy
        self.obs_key, self.mask_key = obs_key, mask_key

    def forward(
        self,
        td: TensorDictBase,
        state: State = None,
        action: Tensor | None = None,
        *,
        bptt: int | None = None,
        deterministic: bool = False,
    ) -> TensorDictBase:
        """`action=None`: one step per environment, with memory. With `action`: a segment from `state`.

        Training shapes: batch dimensions [B, TT], or [B*TT] (batch-major) with `bptt=TT`; `action` is
        [B, TT, ...] or [B*TT, ...]. `state=None` is the initial state; every row's first step must
        then be a reset. `deterministic` takes the most likely action in a rollout.
        """
        if action is not None:
            return self._train(td, state, action, bptt)
        if state is not None or (bptt or 1) != 1:
            raise ValueError("state= and bptt= belong to training, which needs action=; a rollout step uses the memory")
        return self._rollout(td, deterministic)

    @torch.no_grad()
    def _rollout(self, td: TensorDictBase, deterministic: bool) -> TensorDictBase:
        batch, memory = entries.rollout_batch(td), self.policy.memory
        obs, mask, resets = self._inputs(td, batch, 1)
        ids = entries.env_ids(td, batch)
        memory.expect(batch, ids)
        state, ids = memory.take(batch, ids)
        first = None if resets is None else resets[0]  # [B]
        dist, value, state = self.policy.step(obs, state, first, action_mask=mask)
        action = dist.mode if deterministic else dist.sample()
        results = {"actions": action, "act_log_prob": dist.log_prob(action), "values": value, **_full(dist)}
        self._write(td, results, batch, 1)
        memory.put(state, ids)  # last, so that an error above leaves memory as it was
        return td

    def _train(self, td: TensorDictBase, state: State, action: Tensor, bptt: int | None) -> TensorDictBase:
        batch, steps = entries.training_shape(td, bptt, state)
        obs, mask, resets = self._inputs(td, batch, steps)
        state = entries.start_of_segment(self.policy.core, state, resets, batch)

        def time_major(rows: Tensor) -> Tensor:
            """[B * TT, ...] -> [TT, B, ...]"""
            return rows.unflatten(0, (batch, steps)).transpose(0, 1)

        def batch_major(rows: Tensor) -> Tensor:
            """[TT * B, ...] -> [B * TT, ...]"""
            return rows.unflatten(0, (steps, batch)).transpose(0, 1).flatten(0, 1)

        obs, mask = tree_map(time_major, obs), map_tensors(time_major, mask)
        dist, value, _ = self.policy.unroll(obs, state, resets, action_mask=mask)
        log_prob = dist.log_prob(time_major(_flat_actions(action, td)).flatten(0, 1))
        results = {"act_log_prob": log_prob, "entropy": entropy_of(dist), "value": value.flatten(), **_full(dist)}
        self._write(td, {name: batch_major(rows) for name, rows in results.items()}, batch, steps)
        return td

    def start_state(self, td: TensorDictBase) -> State:
        """What the environments of `td` remember now: before a rollout, the `state` to train from."""
        return entries.snapshot(self.policy.memory, td)

    def _inputs(self, td: TensorDictBase, batch: int, steps: int) -> tuple[Any, Any, Tensor | None]:
        """Observations and mask with one leading dimension [B * TT], flags [TT, B], on the policy's device."""
        dims, device = td.batch_dims, self.policy.core.device()

        def rows(entry: Tensor) -> Tensor:
            return (entry.flatten(0, dims - 1) if dims > 1 else entry).to(device)

        resets = entries.resets(td, batch, steps)
        obs, mask = entries.observation(td, self.obs_key), td.get(self.mask_key, None)
        return tree_map(rows, obs), map_tensors(rows, mask), None if resets is None else resets.to(device)

    def _write(self, td: TensorDictBase, results: dict[str, Tensor], batch: int, steps: int) -> None:
        """Set results [B * TT, ...] with the batch dimensions of `td`."""
        shape = tuple(td.batch_size)
        for name, value in results.items():
            td.set(name, value if len(shape) == 1 else value.view(*shape, *value.shape[1:]))
        entries.write_shape(td, batch, steps, self.policy.core.device())

    # --- memory ---------------------------------------------------------------------------------------------

    @property
    def memory(self) -> Memory:
        return self.policy.memory

    def has_memory(self) -> bool:
        return self.policy.has_memory()

    def get_memory(self) -> dict[str, Any]:
        return self.policy.get_memory()

    def set_memory(self, m: Memory | dict[str, Any]) -> None:
        self.policy.set_memory(m)

    def reset_memory(self) -> None:
        self.policy.reset_memory()

    def reset_env_memory(self, env_id: int | EnvIds) -> None:
        self.policy.reset_env_memory(env_id)


def _full(dist: Any) -> dict[str, Tensor]:
    full = full_log_probs(dist)
    return {} if full is None else {"full_log_probs": full}


def full_log_probs(dist: Any) -> Tensor | None:
    """The log-probability of every discrete action, [N, actions], of Holdfast's and torch's distributions."""
    full = getattr(dist, "full_log_probs", None)
    if full is None and isinstance(dist, torch.distributions.Categorical):
        full = dist.logits
    return full


def _flat_actions(action: Tensor, td: TensorDictBase) -> Tensor:
    """[B, TT, ...] or [B*TT, ...] -> [B*TT, ...]"""
    shape = tuple(td.batch_size)
    total = td.batch_size.numel()
    if tuple(action.shape[: len(shape)]) == shape:
        return action.flatten(0, len(shape) - 1) if len(shape) > 1 else action
    if action.shape[0] == total:
        return action
    if action.dim() > 1 and action.shape[:2].numel() == total:
        return action.flatten(0, 1)
    raise ValueError(f"action has shape {tuple(action.shape)}, expected {list(shape)} or [{total}] in front")
