"""`Actor`: the acting half of an `ActorCritic`, for gymnasium spaces. Its value is None.

    obs -> encoder -> trunk -> core -> actor_head -> actor -> distribution

`ActorCritic` adds the critic, and builds the parts. `ActorCritic.actor_only()` makes an `Actor` that shares them.
"""

from __future__ import annotations

import inspect
import math
import operator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from holdfast.checks import check_discrete
from holdfast.config import RunConfig, settings_of
from holdfast.cores.base import Core
from holdfast.policies import encoders, heads
from holdfast.policies.action_parts import (
    boxes_of,
    joined_mask,
    mask_sizes,
    num_outputs,
    part_spaces,
    split_mask,
    tree_of,
    with_batch,
)
from holdfast.policies.base import RecurrentPolicy
from holdfast.policies.encoders import center_and_half_range
from holdfast.state import State, from_leaves, leaves, tree_map

if TYPE_CHECKING:
    from typing import Self


class Actor(RecurrentPolicy):
    """Acts from observations of one gymnasium space with actions of another. The caller sets the parts below.

    inputs: the features of the trunk that the core reads; None: all. mask_parents, scale_actions, squash_actions: as in
    `ActorCritic`.
    """

    encoder: nn.Module
    trunk: nn.Module
    actor_head: nn.Module
    actor: nn.Module
    log_std: nn.Parameter  # [n], Box actions only; of a Dict or Tuple, all its Boxes side by side
    action_center: Tensor  # [n], Box actions with scale_actions or squash_actions only
    action_half_range: Tensor  # likewise
    log_std_range: tuple[float, float] | None = None
    """Box actions: where the log std lies that the last layer gives beside the mean; None: it is the parameter `log_std`."""

    @classmethod
    def of_config(
        cls, config: RunConfig, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]
    ) -> Self:
        """The policy that the settings describe: an argument has the value of the setting of its name."""
        known = settings_of(type(config)).keys() & inspect.signature(cls).parameters.keys()
        arguments = {name: value for name in known if (value := getattr(config, name)) is not None}
        arguments["core"] = None if config.core == "none" else config.core
        arguments["head_sizes"] = config.head_sizes or ()
        for name in known & {"actor_obs", "critic_obs"}:  # (): everything is seen
            arguments[name] = arguments[name] or None
        return cls(observation_space, action_space, **arguments)  # type: ignore[arg-type]

    def __init__(
        self,
        core: Core,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        mask_parents: dict[int, int] | None = None,
        inputs: slice | None = None,
        scale_actions: bool = False,
        squash_actions: bool = False,
    ) -> None:
        super().__init__(core)
        self.observation_space, self.action_space = encoders.without_text(observation_space), action_space
        self._skips_text = self.observation_space is not observation_space
        self.mask_parents, self.inputs = mask_parents, inputs
        boxes, self._mask_sizes = boxes_of(action_space), mask_sizes(action_space)
        self.scale_actions, self.squash_actions = scale_actions and bool(boxes), squash_actions and bool(boxes)
        for box in boxes if self.squash_actions else ():
            if not box.is_bounded():
                free = ", ".join(map(str, np.flatnonzero(~(np.isfinite(box.low) & np.isfinite(box.high)))))
                raise ValueError(
                    f"squash_actions needs two bounds for every action, and {box} lacks them at index {free}; give it "
                    "bounds, or use squash_actions=False"
                )
        if self.scale_actions or self.squash_actions:
            centers, half_ranges = zip(*map(center_and_half_range, boxes))
            self.register_buffer("action_center", torch.cat(centers), persistent=False)
            self.register_buffer("action_half_range", torch.cat(half_ranges), persistent=False)

    def encode(self, obs: Any) -> Tensor:
        features = self.trunk(self.encoder(obs).to(self.actor.weight.dtype))
        return features if self.inputs is None else features[:, self.inputs]

    def decode(self, features: Tensor, action_mask: Any = None) -> tuple[Any, Tensor | None]:
        return self.distribution(self.actor(self.actor_head(features)), action_mask), None

    def distribution(self, out: Tensor, mask: Any) -> Any:
        """The action distribution from what the last layer gives, [N, num_outputs]."""
        space = self.action_space
        out = out.float()  # probabilities in full precision, also under autocast
        if isinstance(self._mask_sizes, int):  # no Dict or Tuple
            return self._of_part(space, out, mask, None)
        parts, first = [], 0  # of the numbers in log_std and the bounds, which are of all Boxes side by side
        found = part_spaces(space)
        outs = out.split([num_outputs(part) for part in found], -1)
        for part, part_out, part_mask in zip(found, outs, split_mask(mask, self._mask_sizes)):
            end = first + part_out.shape[-1] if isinstance(part, spaces.Box) else first
            parts.append(self._of_part(part, part_out, part_mask, slice(first, end)))
            first = end
        return heads.Factored(from_leaves(parts, like=self._mask_sizes))

    def _of_part(self, space: spaces.Space[Any], out: Tensor, mask: Any, numbers: slice | None) -> Any:
        """numbers: where those of a Box are in `log_std` and the bounds; None: it has all of them."""
        if isinstance(space, spaces.Discrete):
            return heads.Categorical(out, mask, start=int(space.start))
        if isinstance(space, spaces.MultiDiscrete):
            return heads.MultiCategorical(out, space.nvec.tolist(), mask, self.mask_parents)
        if isinstance(space, spaces.MultiBinary):
            return heads.Bernoulli(out, mask)
        if mask is not None:
            raise ValueError("Box actions take no action mask")

        def own(x: Tensor) -> Tensor:
            return x if numbers is None else x[numbers]

        if self.log_std_range is None:
            log_std = own(self.log_std).float()
        else:
            out, free = out.chunk(2, -1)
            log_std = _within(free, *self.log_std_range)
        if self.squash_actions:
            return heads.SquashedGaussian(
                out, log_std, own(self.action_center), own(self.action_half_range), space.shape
            )
        if self.scale_actions:  # in units of the action space's bounds
            center, half_range = own(self.action_center), own(self.action_half_range)
            return heads.Gaussian(
                center + half_range * out, log_std + half_range.log().float(), space.shape, half_range
            )
        return heads.Gaussian(out, log_std, space.shape)

    @torch.no_grad()
    def predict(
        self,
        obs: Any,
        state: State = None,
        episode_start: Any = None,
        deterministic: bool = False,
        action_masks: Any = None,
    ) -> tuple[Any, State]:
        """As `RecurrentPolicy.predict`; a single observation without a batch dimension works too.

        The action is what the environment takes: a Box's is clipped. A policy that sees its previous action saw it before
        clipping; `hf.Runner` remembers that one. What only a critic sees is not needed, and the state is that of `deployed()`.
        """
        if (deployed := self.deployed()) is not self:
            return deployed.predict(obs, state, episode_start, deterministic, action_masks)
        obs = _seen(obs, self.observation_space)
        first, first_space = leaves(obs)[0], _first_space(self.observation_space)
        single = tuple(getattr(first, "shape", ())) == tuple(first_space.shape or ())
        if single:
            obs = tree_map(lambda o: torch.as_tensor(o)[None], obs)
            episode_start = None if episode_start is None else torch.as_tensor(episode_start).reshape(1)
            action_masks = with_batch(action_masks)
        action, state = super().predict(obs, state, episode_start, deterministic, action_masks)
        action = tree_map(_in_bounds, tree_of(self.action_space), action)
        return (tree_map(operator.itemgetter(0), action) if single else action), state

    def as_tensors(self, obs: Any) -> Any:
        """As `RecurrentPolicy.as_tensors`. What goes to a GPU is compared with the space first; the encoder checks the rest."""
        if self._skips_text:
            obs = encoders.seen_of(obs, self.observation_space)
        if not torch.compiler.is_compiling() and self.core.device().type != "cpu":
            check_discrete(obs, self.observation_space)
        return super().as_tensors(obs)

    def as_mask(self, mask: Any) -> Any:
        """As `RecurrentPolicy.as_mask`; of a Dict or Tuple of actions, one tensor with the masks of the parts side by side."""
        if isinstance(self._mask_sizes, int):
            return super().as_mask(mask)
        return joined_mask(mask, self._mask_sizes, self.core.device())

    def actor_only(self) -> Actor:
        """Itself: there is no critic."""
        return self


def _within(free: Tensor, low: float, high: float) -> Tensor:
    """Numbers between the bounds, smoothly; 0 stays 0."""
    return low + (high - low) * torch.sigmoid(free + math.log(-low / high))


def _in_bounds(space: spaces.Space[Any], action: Any) -> Any:
    """A Box's numbers as the environment takes them."""
    return np.clip(action, space.low, space.high).astype(space.dtype) if isinstance(space, spaces.Box) else action


def _seen(obs: Any, space: spaces.Space[Any]) -> Any:
    """Without what only a critic sees."""
    if not (isinstance(space, spaces.Dict) and isinstance(obs, dict)):
        return obs
    return {key: _seen(obs[key], space[key]) for key in space if key in obs}


def _first_space(space: spaces.Space[Any]) -> spaces.Space[Any]:
    while isinstance(space, (spaces.Dict, spaces.Tuple)):
        space = next(iter(space.values())) if isinstance(space, spaces.Dict) else space[0]
    return space
