"""What a rollout must have recorded, worked out for one environment at a time with the policy's training leg.

A `ReferenceRollout` plays its own copy of every table next to a training run. It knows each environment's stream of
observations, carries its own states, and forms bootstraps and advantages in plain loops: nothing here is shared with the
collector, its engines, its vector environments or `hf.gae`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

import holdfast as hf
from holdfast.state import State, tree_map
from tables import Table

TOLERANCE = 1e-4
"""Of values and advantages, relative to the largest one; law 1's own tolerance holds for log-probabilities."""
CHECKED = ("resets", "valid", "rewards", "terminated", "truncated", "log_prob", "value", "advantage")


class ReferenceRollout(hf.Callback):
    """A callback that compares every segment. `problem` is "" as long as they agree."""

    def __init__(self, make_table: Callable[[int], Table], settings: dict[str, Any], mode: str) -> None:
        self.envs = [_Environment(make_table(b), settings, mode) for b in range(settings["num_envs"])]
        self.problem = ""
        self.compared = 0

    def on_rollout_end(self, trainer: hf.Trainer, segment: hf.Segment) -> None:
        policy, reward_scale = trainer.policy, trainer.algorithm.reward_scale
        scale = 1.0 if reward_scale is None else reward_scale.value
        with torch.no_grad():
            for b, env in enumerate(self.envs):
                expected = env.play(policy, segment.actions[:, b], scale)
                for name in CHECKED:
                    self._compare(name, b, getattr(segment, name)[:, b], torch.tensor(expected[name]))
        self.compared += 1

    def _compare(self, name: str, b: int, got: torch.Tensor, expected: torch.Tensor) -> None:
        far = (got.double() - expected.double()).abs()
        allowed = 0.0 if got.dtype == torch.bool else TOLERANCE * max(1.0, expected.abs().max().item())
        if not bool((far <= allowed).all()) and not self.problem:
            t = int(far.argmax())
            self.problem = (
                f"rollout {self.compared}, environment {b}, step {t}: {name} is {got[t].item()}, expected "
                f"{expected[t].item()}"
            )


class _Environment:
    """One environment, the state that belongs to it, and what the policy sees next."""

    def __init__(self, table: Table, settings: dict[str, Any], mode: str) -> None:
        self.table, self.mode = table, mode
        self.inputs = settings["inputs"] or ("obs",)
        self.crosses_episodes = settings["reset"] == "never"
        self.gamma, self.gae_lambda = settings["gamma"], 0.95
        self.state: State = None
        self.is_dummy = False
        self._begin()

    def _begin(self, action: torch.Tensor | None = None, reward: float = 0.0) -> None:
        self.obs, self.is_first = self._see(self.table.reset()[0], action, reward), True

    def _see(self, obs: Any, action: torch.Tensor | None, reward: float) -> Any:
        """An observation [1, 1, ...] with the previous action and reward."""
        space = self.table.action_space
        if action is None:
            first = space.start if isinstance(space, spaces.Discrete) else 0
            action = torch.as_tensor(np.full(space.shape, first, space.dtype))
        parts = {"obs": tree_map(torch.as_tensor, obs), "prev_action": action, "prev_reward": torch.tensor(reward)}
        seen = parts["obs"] if self.inputs == ("obs",) else {name: parts[name] for name in self.inputs}
        return tree_map(lambda x: (x.float() if x.dtype == torch.float64 else x)[None, None], seen)

    def _value(self, policy: Any, obs: Any) -> float:
        return float(policy.unroll(obs, self.state, torch.zeros(1, 1, dtype=torch.bool)).value)

    def play(self, policy: Any, actions: torch.Tensor, scale: float) -> dict[str, list[Any]]:
        """The rows of a segment, given the actions that were taken."""
        rows: dict[str, list[Any]] = {name: [] for name in CHECKED}
        next_values: list[float] = []
        if self.state is None:
            self.state = policy.initial_state(1)
        for action in actions:
            mask = None
            if self.table.masks:
                allowed = torch.as_tensor(self.table.action_mask())
                mask = (torch.ones_like(allowed) if self.is_dummy else allowed)[None, None]
            first = torch.tensor([[self.is_first]])
            seen = policy.evaluate(self.obs, action[None, None], self.state, first, action_mask=mask, return_state=True)
            self.state = seen.state
            rows["resets"].append(self.is_first)
            rows["valid"].append(not self.is_dummy)
            rows["log_prob"].append(float(seen.log_prob))
            rows["value"].append(float(seen.value))
            for name, what in zip(("rewards", "terminated", "truncated"), self._advance(policy, action, next_values)):
                rows[name].append(what)
        rows["advantage"] = self._advantages(rows, self._next_values(policy, next_values, rows["value"]), scale)
        return rows

    def _advance(self, policy: Any, action: torch.Tensor, next_values: list[Any]) -> tuple[np.float32, bool, bool]:
        """The environment's step; where an episode was truncated, the value of its last observation."""
        if self.is_dummy:
            self.is_dummy = False
            self._begin()
            next_values.append(0.0)
            return np.float32(0.0), False, False
        taken = action.numpy()
        if isinstance(self.table.action_space, spaces.Box):
            taken = np.clip(taken, self.table.action_space.low, self.table.action_space.high)
        obs, reward, terminated, truncated, _ = self.table.step(taken.astype(self.table.action_space.dtype))
        after = self._see(obs, action, reward)
        next_values.append(None)  # of the step that follows, unless the episode ended
        if terminated or truncated:
            next_values[-1] = 0.0 if terminated else self._value(policy, after)
        if not (terminated or truncated):
            self.obs, self.is_first = after, False
        elif self.mode == "NEXT_STEP":
            self.obs, self.is_first, self.is_dummy = after, False, True
        elif self.crosses_episodes:
            self._begin(action, reward)
        else:
            self._begin()
        return np.float32(reward), terminated, truncated

    def _next_values(self, policy: Any, known: list[Any], values: list[float]) -> list[float]:
        if known[-1] is None:
            known[-1] = self._value(policy, self.obs)
        return [values[t + 1] if value is None else value for t, value in enumerate(known)]

    def _advantages(self, rows: dict[str, list[Any]], next_values: list[float], scale: float) -> list[float]:
        found, later = [], 0.0
        for t in reversed(range(len(next_values))):
            if not rows["valid"][t]:
                later = 0.0
            else:
                error = rows["rewards"][t] * scale + self.gamma * next_values[t] - rows["value"][t]
                ends = rows["terminated"][t] or rows["truncated"][t]
                later = error + (0.0 if ends else self.gamma * self.gae_lambda * later)
            found.append(later)
        return found[::-1]
