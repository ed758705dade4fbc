"""Policies on TensorDicts: `env_obs`, `dones`, `truncateds`, `training_env_ids` in, actions and values out."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.doctor.columns import columns
from holdfast.doctor.inference import space_of
from holdfast.doctor.observations import device_of
from holdfast.doctor.subjects.base import NotOffered, RecordedSegment, Replay, Subject, SubjectStep
from holdfast.doctor.subjects.holdfast import carries
from holdfast.state import map_tensors


class TensorDictPolicy(Subject):
    """`policy(td)` steps with the policy's own memory; `policy(td, state=start, action=actions)` is the training leg.

    The training TensorDict is `[B, TT]`. `start_state(td)`, `reset_memory()`, `get_memory()` and `set_memory()` are
    used if the policy has them; in a policy without `reset_memory`, the plain attributes it began with are restored.
    """

    framework = "tensordict"
    takes_env_ids = True
    flags_optional = True

    def __init__(
        self,
        policy: nn.Module,
        observation_space: Any = None,
        *,
        obs_key: str = "env_obs",
        num_envs: int = 5,
        name: str | None = None,
    ) -> None:
        super().__init__(space_of(policy, observation_space), name=name or type(policy).__name__)
        self.policy: Any = policy
        self.obs_key, self.num_envs = obs_key, num_envs
        self.carries_across_episodes = carries(policy)
        self._empty = self._memory_now()
        self._plain = {} if hasattr(policy, "reset_memory") else _plain_attributes(policy)
        self._rows = 0

    def begin(self, num_envs: int) -> None:
        self._rows = num_envs
        for name, value in self._plain.items():
            setattr(self.policy, name, copy.deepcopy(value))
        if self._empty is not None:
            self.policy.set_memory(self._empty)
        if hasattr(self.policy, "reset_memory"):
            self.policy.reset_memory()

    def step(self, obs: Any, terminated: Any, truncated: Any, env_ids: Tensor) -> SubjectStep:
        td = self._tensordict([len(env_ids)], obs, env_ids)
        if terminated is not None:
            td["dones"], td["truncateds"] = terminated, truncated
        with torch.no_grad():
            td = self.policy(td)
        return SubjectStep(self._columns(td, "values", len(env_ids)), td["actions"], td["act_log_prob"])

    def mark(self) -> Any:
        if not hasattr(self.policy, "start_state"):
            return None
        return self.policy.start_state(self._tensordict([self._rows], None, torch.arange(self._rows)))

    def state(self) -> Any:
        return self.mark()

    def replay(self, segment: RecordedSegment) -> Replay:
        steps, rows = segment.terminated.shape
        ids = torch.arange(rows).unsqueeze(1).expand(rows, steps)
        td = self._tensordict([rows, steps], _swap(segment.obs), ids)
        td["dones"], td["truncateds"] = segment.resets.T, segment.truncated.T
        td = self.policy(td, state=segment.start, action=_swap(segment.actions))
        output = self._columns(td, "value", rows * steps).reshape(rows, steps, -1).transpose(0, 1)
        return Replay(output, td["act_log_prob"].reshape(rows, steps).T)

    def reset_memory(self) -> None:
        if not hasattr(self.policy, "reset_memory"):
            raise NotOffered("the policy has no reset_memory")
        self.policy.reset_memory()

    def save(self) -> Any:
        if self._empty is None:
            raise NotOffered("the policy has no get_memory")
        return self._memory_now()

    def load(self, checkpoint: Any) -> None:
        self.policy.set_memory(checkpoint)

    def _memory_now(self) -> Any:
        return self.policy.get_memory() if hasattr(self.policy, "get_memory") else None

    def _tensordict(self, shape: list[int], obs: Any, env_ids: Tensor) -> Any:
        try:
            from tensordict import TensorDict
        except ModuleNotFoundError as error:
            hint = f"{error}; install it with: pip install 'holdfast[tensordict]'"
            raise ModuleNotFoundError(hint, name=error.name) from error

        td = TensorDict({}, shape, device=device_of([self.policy]))
        if obs is not None:
            td[self.obs_key] = TensorDict(obs, shape) if isinstance(obs, dict) else obs
        td["training_env_ids"] = env_ids
        return td

    def _columns(self, td: Any, value: str, rows: int) -> Tensor:
        full = td.get("full_log_probs", None)
        parts = [] if full is None else [full.reshape(rows, -1).clamp(min=-100.0)]
        return columns([*parts, td[value].reshape(rows, 1)], rows)


def _plain_attributes(policy: nn.Module) -> dict[str, Any]:
    """The attributes that may hold memory, as they are before any step, of a policy without a reset call."""
    kinds = (dict, list, tuple, Tensor, int, float, type(None))
    return {
        key: copy.deepcopy(value) for key, value in vars(policy).items() if key[0] != "_" and isinstance(value, kinds)
    }


def _swap(tree: Any) -> Any:
    """Time first to batch first."""
    return map_tensors(lambda x: x.transpose(0, 1), tree)
