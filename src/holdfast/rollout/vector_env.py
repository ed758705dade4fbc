"""`VectorEnvAdapter`: one way to drive any gymnasium vector environment, whatever its autoreset mode and array library.

It holds what the policy sees next (`obs`, `resets`, `action_mask`) and whether the next step is a real one (`valid`),
and turns the three autoreset modes into one form. It does not act and keeps no statistics.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import create_empty_array
from torch import Tensor

from holdfast.checks import check_discrete, refuse_text
from holdfast.envs.base import TorchVectorEnv
from holdfast.policies.action_parts import first_action, joined_mask, mask_sizes, part_spaces, tree_of
from holdfast.policies.base import to_numpy
from holdfast.policies.encoders import seen_of, without_text
from holdfast.policies.heads import nested_leaves
from holdfast.rollout.env_arrays import arrays_to_tensors, masks_of, tensors_to_arrays, where_mask
from holdfast.rollout.segment import Turn
from holdfast.state import leaves, rows_mask, tree_map


class EnvStep(NamedTuple):
    """The result of one step, each [B]; invalid (dummy) steps have zero rewards and no ends."""

    rewards: Tensor
    terminated: Tensor
    truncated: Tensor
    final_obs: Any
    """What the policy would have seen next in episodes that were truncated, all rows; None if there is none, or if the
    next step plays it (NEXT_STEP)."""
    failed: bool = False
    """The environments failed in this step and were rebuilt, so no episode ended by itself."""
    trial_returns: Any = None
    """[B, episodes]: of the episodes of the trials that ended (`envs.Trials`); None if none did."""


def autoreset_mode(env: Any) -> AutoresetMode:
    """The mode an environment declares; one that does not say is refused."""
    metadata = getattr(env, "metadata", None) or {}
    mode = metadata.get("autoreset_mode")
    copies = getattr(env, "unwrapped", env)
    if isinstance(copies, (SyncVectorEnv, AsyncVectorEnv)) and copies.metadata is metadata:
        # Before gymnasium 1.4 this is the metadata of the copies' class: the vector environment made last wrote its mode there.
        mode = getattr(copies, "autoreset_mode", mode)
    if isinstance(mode, AutoresetMode):
        return mode
    if isinstance(mode, str):
        for known in AutoresetMode:
            if mode.upper().replace("-", "_") in (known.name, known.value.upper()):
                return known
    raise ValueError(
        f"{type(env).__name__} does not say how it resets (metadata['autoreset_mode'] is {mode!r}). "
        'Add to the environment: self.metadata["autoreset_mode"] = gymnasium.vector.AutoresetMode.SAME_STEP '
        "(or NEXT_STEP, DISABLED)"
    )


def input_space(observation_space: spaces.Space[Any], action_space: spaces.Space[Any], inputs: tuple[str, ...]) -> Any:
    """The space of what the policy sees: the environment's without texts, or a Dict of `inputs`."""
    observation_space = without_text(observation_space)
    if tuple(inputs) == ("obs",):
        return observation_space
    parts = {"obs": observation_space, "prev_action": action_space, "prev_reward": spaces.Box(-np.inf, np.inf, ())}
    return spaces.Dict({name: parts[name] for name in inputs})


def make_adapter(
    env: Any, device: torch.device | str, inputs: tuple[str, ...], crosses_episodes: bool = False
) -> VectorEnvAdapter:
    """The adapter for an environment that answers all at once, or in batches."""
    if getattr(env, "is_asynchronous", False):
        from holdfast.rollout.batch_env import BatchEnvAdapter

        return BatchEnvAdapter(env, device, inputs)
    return VectorEnvAdapter(env, device, inputs, crosses_episodes)


class VectorEnvAdapter:
    """Observations, flags and masks of a vector environment as tensors on `device`.

    crosses_episodes: the memory does (`reset="never"`), and so do previous action and reward. In NEXT_STEP mode the step that plays
    the reset shows them, so they are 0 after it in any case.
    """

    def __init__(
        self,
        env: Any,
        device: torch.device | str = "cpu",
        inputs: tuple[str, ...] = ("obs",),
        crosses_episodes: bool = False,
    ) -> None:
        for attribute in ("num_envs", "single_observation_space", "single_action_space"):
            if not hasattr(env, attribute):
                raise TypeError(
                    f"{type(env).__name__} is not a gymnasium vector environment (it has no {attribute}); "
                    "use gymnasium.make_vec(...) or gymnasium.vector.SyncVectorEnv([...])"
                )
        refuse_text(without_text(env.single_observation_space))
        self.env, self.device, self.inputs = env, torch.device(device), tuple(inputs)
        self.mode = autoreset_mode(env)
        self._crosses_episodes = crosses_episodes and self.mode != AutoresetMode.NEXT_STEP
        self.num_envs: int = env.num_envs
        self.observation_space = input_space(env.single_observation_space, env.single_action_space, self.inputs)
        self._seen_space = without_text(env.single_observation_space)
        self._skips_text = self._seen_space is not env.single_observation_space
        self.action_space = env.single_action_space
        self._parts = tree_of(self.action_space)
        self._mask_sizes = mask_sizes(self.action_space)
        self._first_action = tree_map(first_action, self._parts)
        self._bounds = tree_map(self._bounds_of, self._parts)  # made once: a captured rollout cannot copy from the host
        self._unchecked_steps = CHECKED_STEPS
        self._has_absent_rows = bool(getattr(env, "has_absent_rows", False))
        self.has_dummy_steps = self._has_absent_rows or self.mode == AutoresetMode.NEXT_STEP
        self._masks = masks_of(env)
        self._returns_tensors = False
        self.takes_every_final_obs = (
            False  # where they are tensors for all rows: without a look at the flags on the device
        )
        self._can_truncate = bool(getattr(env, "can_truncate", True))
        self._never_overwrites = isinstance(env, TorchVectorEnv)
        self._goes_to_gpu = self.device.type != "cpu" and not isinstance(env, TorchVectorEnv)
        self.obs: Any = None
        self.resets: Tensor = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        self.valid: Tensor = self._all_true()
        self.action_mask: Any = None

    def start(self, seed: int | None = None) -> None:
        """Reset every environment."""
        obs, info = self.env.reset(seed=seed)
        self._returns_tensors = isinstance(leaves(obs)[0], Tensor)
        self.resets, self.valid = self._all_true(), self._present(info)
        self.action_mask = self._read_mask(info)
        self.obs = self.compose(self._tensors(obs, "reset"), None, None)

    def turns(self, steps: int) -> Iterator[Turn]:
        """Who acts when in a rollout: all environments, step by step."""
        return (Turn(t) for t in range(steps))

    def seen(self, rows: Tensor | None) -> tuple[Any, Tensor, Tensor, Any]:
        """What the environments in `rows` (None: all) show before they act: observations, resets, valid, action mask."""
        return self.obs, self.resets, self.valid, self.action_mask

    def step_turn(self, action: Any, turn: Turn) -> list[tuple[Turn, EnvStep]]:
        """Take the actions of a turn. Returns what came back, and of which turn it is the result."""
        return [(turn, self.step(action))]

    def step(self, action: Any) -> EnvStep:
        """Take an action in every environment and advance to the next observations."""
        obs, rewards, terminated, truncated, info = self.env.step(self.to_env(action))
        rewards = self._per_env("rewards", rewards, torch.float32)
        terminated = self._per_env("terminated", terminated, torch.bool)
        truncated = self._per_env("truncated", truncated, torch.bool)
        obs = self._tensors(obs, "step")
        final: Any = None
        if self.mode == AutoresetMode.NEXT_STEP:
            played = self.valid
            terminated, truncated = terminated & played, truncated & played
            rewards = rewards.masked_fill(~played, 0.0)
            self.resets, self.valid = ~played, ~(terminated | truncated)
        else:
            played = self.valid
            if self._has_absent_rows:
                terminated, truncated = terminated & played, truncated & played
                rewards = rewards.masked_fill(~played, 0.0)
                self.valid = self._present(info)
            done = terminated | truncated
            if self._can_truncate and (self._gives_every_final_obs(info) or self._any(truncated)):
                raw = obs if self.mode == AutoresetMode.DISABLED else self._final_obs(obs, info, truncated)
                final = self.compose(raw, action, rewards, fresh=None)
            self.resets = done | ~played if self._has_absent_rows else done
        mask = self._read_mask(info)
        if self.mode == AutoresetMode.DISABLED and self._any(done):
            obs, info = self.env.reset(options={"reset_mask": done.cpu().numpy()})
            obs, mask = self._tensors(obs, "reset"), where_mask(done, self._read_mask(info), mask)
        if self.has_dummy_steps and mask is not None:
            # After its end an episode may allow nothing. A dummy step's action is ignored, so allow all.
            mask = mask | ~self.valid.view(-1, *(1,) * (mask.dim() - 1))
        self.action_mask = mask
        self.obs = self.compose(obs, action, rewards, fresh=None if self._crosses_episodes else self.resets)
        ended = info.get("final_info")
        trial_returns = (ended if isinstance(ended, dict) else info).get("trial_returns")
        return EnvStep(rewards, terminated, truncated, final, bool(info.get("env_failure", False)), trial_returns)

    def to_env(self, action: Any) -> Any:
        """The action as the environment takes it: clipped to its Box, numpy unless it returns tensors; nested as its space is."""
        if self._unchecked_steps:
            check_actions(action, self.action_space)
            self._unchecked_steps -= 1
        return tree_map(self._part_to_env, self._parts, action, self._bounds)

    def _part_to_env(self, space: spaces.Space[Any], action: Tensor, bounds: tuple[Tensor, Tensor] | None) -> Any:
        action = action if bounds is None else action.clamp(*bounds)
        if self._returns_tensors:
            return _as_in_space(space, action, bounds)
        array = action.cpu().numpy()
        return array.astype(space.dtype, copy=False) if space.dtype is not None else array

    def _bounds_of(self, space: spaces.Space[Any]) -> tuple[Tensor, Tensor] | None:
        if not isinstance(space, spaces.Box):
            return None
        return torch.as_tensor(space.low, device=self.device), torch.as_tensor(space.high, device=self.device)

    # --- saving ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What is pending, and the environment's own state where it offers one (None otherwise). After `start` only."""
        offers = hasattr(self.env, "state_dict") and hasattr(self.env, "load_state_dict")
        return {
            "env": arrays_to_tensors(self.env.state_dict()) if offers else None,
            "speaks_torch": self._returns_tensors,
            "obs": tree_map(lambda o: o.cpu().clone(), self.obs),
            "resets": self.resets.cpu().clone(),
            "valid": self.valid.cpu().clone(),
            "action_mask": None if self.action_mask is None else self.action_mask.cpu().clone(),
        }

    def load_state_dict(self, d: dict[str, Any]) -> bool:
        """Continue from there; False if the environment cannot and must be restarted."""
        if d["env"] is None or not hasattr(self.env, "load_state_dict"):
            return False
        self.env.load_state_dict(tensors_to_arrays(d["env"]))
        self._returns_tensors = d["speaks_torch"]
        self.obs = tree_map(lambda o: o.to(self.device), d["obs"])
        self.resets, self.valid = d["resets"].to(self.device), d["valid"].to(self.device)
        self.action_mask = None if d["action_mask"] is None else d["action_mask"].to(self.device)
        return True

    # --- inside ------------------------------------------------------------------------------------------------------

    def _all_true(self) -> Tensor:
        return torch.ones(self.num_envs, dtype=torch.bool, device=self.device)

    def _present(self, info: dict[str, Any]) -> Tensor:
        """Rows that have an agent, [B]; the steps of the others are dummy steps."""
        if not self._has_absent_rows:
            return self._all_true()
        return ~self._per_env("info['absent']", info["absent"], torch.bool)

    def _gives_every_final_obs(self, info: dict[str, Any]) -> bool:
        """Whether the last observations are taken of all rows."""
        final = info.get("final_obs")
        wanted = self.takes_every_final_obs and self.mode == AutoresetMode.SAME_STEP
        return wanted and final is not None and isinstance(leaves(final)[0], Tensor)

    def _any(self, flags: Tensor) -> bool:
        return bool(flags.any())

    def _tensor(self, x: Any, dtype: torch.dtype | None = None) -> Tensor:
        t = torch.as_tensor(x, dtype=dtype, device=self.device)
        # Segments keep these; an environment may overwrite its arrays in the next step.
        return t if self._never_overwrites else t.clone()

    def _per_env(self, what: str, x: Any, dtype: torch.dtype, count: int | None = None) -> Tensor:
        """Numbers or flags [B] that `step` returned, or `count` of them."""
        count = self.num_envs if count is None else count
        try:
            t = self._tensor(x, dtype)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"{self._name()}.step returned {what} of type {type(x).__name__} that are not numbers ({error}); "
                f"return an array of shape ({count},)"
            ) from error
        if t.shape != (count,):
            raise ValueError(
                f"{self._name()}.step returned {what} of shape {tuple(t.shape)}, expected ({count},): one per environment"
            )
        return t

    def _tensors(self, obs: Any, source: str, count: int | None = None) -> Any:
        """Observations as tensors, `count` rows (all by default). source: where they came from, for errors."""
        count = self.num_envs if count is None else count
        obs = seen_of(obs, self._seen_space) if self._skips_text else obs
        if self._goes_to_gpu:
            check_discrete(obs, self.env.single_observation_space)

        def convert(o: Any) -> Tensor:
            t = self._tensor(o)
            if t.shape[:1] != (count,):
                raise ValueError(
                    f"{self._name()}.{source} returned observations of shape {tuple(t.shape)}, expected {count} rows: "
                    "one per environment"
                )
            return t.float() if t.dtype == torch.float64 else t

        return tree_map(convert, obs)

    def _name(self) -> str:
        return type(getattr(self.env, "unwrapped", self.env)).__name__

    def compose(self, obs: Any, action: Any, reward: Tensor | None, fresh: Tensor | None = None) -> Any:
        """The policy's input: the observation alone, or with the previous action and reward, zero at a fresh start."""
        if self.inputs == ("obs",):
            return obs
        if action is None or reward is None:
            nothing: Any = create_empty_array(self.action_space, self.num_envs, fn=np.zeros)
            action = tree_map(lambda a: torch.as_tensor(a, device=self.device), nothing)
            reward, fresh = torch.zeros(self.num_envs, device=self.device), self.resets
        if fresh is not None:
            begins = fresh
            action = tree_map(lambda a, first: a.masked_fill(rows_mask(begins, a), first), action, self._first_action)
            reward = reward.masked_fill(fresh, 0.0)
        seen = tree_map(_as_in_space, self._parts, action, self._bounds)
        parts = {"obs": obs, "prev_action": seen, "prev_reward": reward}
        return {name: parts[name] for name in self.inputs}

    def _final_obs(self, obs: Any, info: dict[str, Any], truncated: Tensor) -> Any:
        """Dense final observations: `info["final_obs"]` where an episode ended, `obs` elsewhere."""
        final = info.get("final_obs")
        if final is None:
            raise ValueError(
                f"{self._name()} declares SAME_STEP autoreset, but an episode was truncated and "
                "info['final_obs'] is not there; give its last observation there, one row per environment"
            )
        final = seen_of(final, self._seen_space) if self._skips_text else final
        if self._goes_to_gpu:
            check_discrete(final, self.env.single_observation_space)
        if isinstance(final, np.ndarray) and final.dtype == object:  # a whole observation per row
            return self._filled(obs, list(final), truncated)
        if isinstance(obs, (dict, tuple)):
            if not isinstance(final, type(obs)):
                return self._filled(obs, list(final), truncated)
            return tree_map(lambda o, f: self._final_part(o, f, truncated), obs, final)
        return self._final_part(obs, final, truncated)

    def _final_part(self, obs: Tensor, final: Any, truncated: Tensor) -> Tensor:
        """One array of observations: dense, or a value per row with None where no episode ended."""
        if isinstance(final, Tensor) or (isinstance(final, np.ndarray) and final.dtype != object):
            dense = self._tensor(final).to(obs.dtype)
            if dense.shape != obs.shape:
                raise ValueError(
                    f"{self._name()}: info['final_obs'] has shape {tuple(dense.shape)}, the observations have "
                    f"{tuple(obs.shape)}; give one row per environment"
                )
            return dense
        return self._filled(obs, list(final), truncated)

    def _filled(self, obs: Any, final: list[Any], truncated: Tensor) -> Any:
        """`obs` with the rows of `final` that are not None."""
        if len(final) != self.num_envs:
            raise ValueError(
                f"{self._name()}: info['final_obs'] has {len(final)} rows, expected {self.num_envs}: one per environment, "
                "None where no episode ended"
            )
        missing = [row for row, value in enumerate(final) if value is None]
        if missing and bool(truncated[missing].any()):
            row = next(row for row in missing if truncated[row])
            raise ValueError(
                f"{self._name()}: environment {row} was truncated, but row {row} of info['final_obs'] is None; give its "
                "last observation there"
            )
        dense = tree_map(lambda o: o.clone(), obs)
        for row, value in enumerate(final):
            if value is not None:
                value = seen_of(value, self._seen_space) if self._skips_text else value
                tree_map(lambda d, v, row=row: self._fill_row(d, v, row), dense, value)
        return dense

    def _fill_row(self, dense: Tensor, value: Any, row: int) -> None:
        last = torch.as_tensor(value)
        if last.shape != dense.shape[1:]:
            raise ValueError(
                f"{self._name()}: row {row} of info['final_obs'] has shape {tuple(last.shape)}, an observation has "
                f"{tuple(dense.shape[1:])}"
            )
        dense[row].copy_(last)

    def _read_mask(self, info: dict[str, Any]) -> Tensor | None:
        """The actions that each environment allows [B, ...]; all of them where it gives no mask."""
        if "action_mask" in info:
            mask = info["action_mask"]
        elif self._masks is not None:
            mask = self._masks()
        else:
            return None
        if isinstance(mask, tuple) and isinstance(self._mask_sizes, int):
            mask = list(mask)  # one per row: of a space without parts a tuple would be one per head
        joined = joined_mask(mask, self._mask_sizes, self.device)
        if joined is None:
            return None
        allowed = joined.to(self.device, torch.bool, copy=True)
        if allowed.shape[:1] != (self.num_envs,):
            raise ValueError(
                f"{self._name()}: the action masks have shape {tuple(allowed.shape)}, expected {self.num_envs} rows: one per "
                "environment"
            )
        if "action_mask" in info and "_action_mask" in info:
            given = torch.as_tensor(info["_action_mask"], device=self.device).bool()
            allowed = allowed | ~given.view(-1, *(1,) * (allowed.dim() - 1))
        return allowed


# --- actions ---------------------------------------------------------------------------------------------------------------

CHECKED_STEPS = 100
"""Steps whose actions are looked at. One step may miss an action that is rarely sampled."""


def _as_in_space(space: spaces.Space[Any], action: Tensor, bounds: tuple[Tensor, Tensor] | None) -> Tensor:
    """Numbers of a Box in one dtype, whatever the policy gives: that of the space, float32 for whole numbers."""
    if bounds is None:
        return action
    dtype = bounds[0].dtype
    return action.to(dtype if dtype.is_floating_point else torch.float32)


def check_actions(action: Any, space: spaces.Space[Any]) -> None:
    """Raise ValueError unless actions [B, ...] have the shape and type of a space and, on the host, are in its range.

    Actions of a Box are clipped to it and may have any type. Other spaces are not checked.
    """
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        for part, inner in zip(nested_leaves(action, tree_of(space)), part_spaces(space)):
            check_actions(part, inner)
    if not isinstance(space, (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Box)):
        return
    whole = isinstance(space, (spaces.Discrete, spaces.MultiDiscrete))
    expected = (*action.shape[:1], *(space.shape or ()))
    if tuple(action.shape) != expected or (whole and (action.is_floating_point() or action.dtype == torch.bool)):
        kind = "integers" if whole else "numbers"
        raise ValueError(
            f"the policy's actions have dtype {action.dtype} and shape {tuple(action.shape)}, the action space {space} takes "
            f"{kind} of shape {expected}; {_what_to_return(space)}"
        )
    if isinstance(space, spaces.Box) or not action.numel() or action.device.type != "cpu":
        return
    low, high = _range(space)
    numbers = to_numpy(action)
    outside = (numbers < low) | (numbers > high)
    if outside.any():
        allowed = f"{low} to {high}" if np.ndim(high) == 0 else f"0 to {np.asarray(high).tolist()}"
        raise ValueError(
            f"the policy chose the action {numbers[outside][0]}, the action space {space} allows {allowed}; "
            f"{_what_to_return(space)}"
        )


def _range(space: Any) -> tuple[Any, Any]:
    """The smallest and largest actions."""
    if isinstance(space, spaces.MultiBinary):
        return 0, 1
    if isinstance(space, spaces.Discrete):
        return int(space.start), int(space.start + space.n - 1)
    return space.start, space.start + space.nvec - 1


def _what_to_return(space: Any) -> str:
    if isinstance(space, spaces.Discrete):
        shifted = f", its samples moved by {space.start}" if space.start else ""
        return f"let decode return Categorical(logits=...) with {space.n} logits per row{shifted}"
    if isinstance(space, spaces.MultiDiscrete):
        return f"let decode return a distribution over integers of shape {space.shape}, one per part"
    if isinstance(space, spaces.MultiBinary):
        return f"let decode return Independent(Bernoulli(logits=...), 1) with shape {space.shape} per row"
    return f"let decode return a distribution over numbers of shape {space.shape} per row, such as Independent(Normal(...), 1)"
