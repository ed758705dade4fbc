"""A recurrent policy that speaks TensorDict: one `forward` for the rollout and the training leg.

    td_policy = TensorDictPolicy(policy)
    start = td_policy.start_state(td)                 # before the rollout: what to keep for training
    td_policy(td)                                     # rollout: actions, act_log_prob, values, full_log_probs
    td_policy(batch, state=start, action=actions)     # training: act_log_prob, entropy, value, full_log_probs

What the entries mean is in `entries.py`. Policies written around `_manage_lstm_state` take `LSTMWrapper`.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from holdfast.integrations import entries
from holdfast.integrations.lstm_wrapper import LSTMWrapper
from holdfast.memory import EnvIds, Memory
from holdfast.policies.base import RecurrentPolicy
from holdfast.state import State, tree_map

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
        policy, batch = self.policy, entries.rollout_batch(td)
        x = policy._encode(self._rows(td, entries.observation(td, self.obs_key)))
        flags = entries.resets(td, batch, 1)
        memory = policy.memory
        ids = entries.env_ids(td, batch)
        memory.expect(batch, ids)
        state, ids = memory.take(batch, ids)
        y, state = policy.core(x, state, None if flags is None else flags[0].to(x.device))
        dist, value = policy._decode(y, self._mask(td))
        action = dist.mode if deterministic else dist.sample()
        self._write(td, {"actions": action, "act_log_prob": dist.log_prob(action), "values": value}, dist)
        entries.write_shape(td, batch, 1, x.device)
        memory.put(state, ids)  # last, so that an error above leaves memory as it was
        return td

    def _train(self, td: TensorDictBase, state: State, action: Tensor, bptt: int | None) -> TensorDictBase:
        policy = self.policy
        batch, steps = entries.training_shape(td, bptt, state)
        x = policy._encode(self._rows(td, entries.observation(td, self.obs_key)))
        flags = entries.resets(td, batch, steps)
        state = entries.start_of_segment(policy.core, state, flags, batch)
        x = x.view(batch, steps, -1).transpose(0, 1)  # [TT, B, I]
        y, _ = policy.core(x, state, None if flags is None else flags.to(x.device))
        dist, value = policy._decode(y.transpose(0, 1).flatten(0, 1), self._mask(td))  # [B*TT]
        log_prob = dist.log_prob(_flat_actions(action, td))
        self._write(td, {"act_log_prob": log_prob, "entropy": dist.entropy(), "value": value}, dist)
        entries.write_shape(td, batch, steps, x.device)
        return td

    def start_state(self, td: TensorDictBase) -> State:
        """What the environments of `td` remember now: before a rollout, the `state` to train from."""
        return entries.snapshot(self.policy.memory, td)

    def _rows(self, td: TensorDictBase, tree: Any) -> Any:
        """Entries with the batch dimensions of `td` as one leading dimension, on the policy's device."""
        dims, device = td.batch_dims, self.policy.core.device()
        return tree_map(lambda o: (o.flatten(0, dims - 1) if dims > 1 else o).to(device), tree)

    def _mask(self, td: TensorDictBase) -> Any:
        mask = td.get(self.mask_key, None)
        return None if mask is None else self._rows(td, mask)

    def _write(self, td: TensorDictBase, results: dict[str, Tensor], dist: Any) -> None:
        full = full_log_probs(dist)
        if full is not None:
            results["full_log_probs"] = full
        shape = tuple(td.batch_size)
        for name, value in results.items():
            td.set(name, value if len(shape) == 1 else value.view(*shape, *value.shape[1:]))

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
