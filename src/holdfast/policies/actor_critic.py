"""`ActorCritic`: a ready-made recurrent policy for gymnasium spaces, and `ValueScale`, in whose units its critic may learn.

    policy = hf.ActorCritic(env.single_observation_space, env.single_action_space, core="lstm", hidden_size=128)

Everything about memory is in `RecurrentPolicy`, and acting in `Actor`. This file chooses encoders, cores and heads, and adds the
critic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from gymnasium import spaces
from torch import Tensor, nn

from holdfast.cores import Core, Parallel
from holdfast.cores.base import check_sizes
from holdfast.cores.chrono import chrono_init_
from holdfast.cores.named import CORES, make_core
from holdfast.distributed.ranks import ALONE, Ranks
from holdfast.policies import encoders
from holdfast.policies.action_parts import boxes_of, num_outputs
from holdfast.policies.actor import Actor

RATE = 0.1  # weight of the latest rollout in the statistics
SMALLEST = 0.1  # the deviation never falls below this part of its largest value so far
_FLAT = 1e-6  # returns that differ by less than this part of their size are all the same


class ValueScale(nn.Module):
    """Mean and deviation of returns. The last layer of the critic must start at 0: the first value is the mean."""

    mean: Tensor  # float64, as are the others
    square: Tensor  # mean of squared returns
    std: Tensor
    largest_std: Tensor
    seen: Tensor  # 0 until returns differed from each other

    def __init__(self) -> None:
        super().__init__()
        for name, start in (("mean", 0.0), ("square", 0.0), ("std", 1.0), ("largest_std", 0.0), ("seen", 0.0)):
            self.register_buffer(name, torch.tensor(start, dtype=torch.float64))

    def to_reward_units(self, out: Tensor) -> Tensor:
        """What the critic's last layer gives, as values."""
        return out * self.std.to(out.dtype) + self.mean.to(out.dtype)

    def to_loss_units(self, value: Tensor) -> Tensor:
        """Values or returns, as the critic's last layer gives them."""
        return (value - self.mean.to(value.dtype)) / self.std.to(value.dtype)

    @torch.no_grad()
    def move(self, mean: Tensor, var: Tensor, n: Tensor, last: nn.Linear) -> None:
        """Add the returns of a rollout (their mean, variance and number; ignored if not finite) and correct `last`.

        Without a look at a number: it may run on a GPU. In place, since captured graphs read these addresses.
        """
        usable = mean.isfinite() & var.isfinite() & (n > 0)
        mean, var = (torch.where(usable, x, 0.0) for x in (mean.double(), var.double()))
        square = var + mean**2
        first = self.seen == 0
        rate = torch.where(usable, torch.where(first, 1.0, RATE), 0.0)
        new_mean, new_square = torch.lerp(self.mean, mean, rate), torch.lerp(self.square, square, rate)
        new_var = (new_square - new_mean**2).clamp(min=0.0)
        varied = new_var > (_FLAT**2) * new_square
        # Returns contain the critic's own errors. Without a lower end a policy that always gets the same return would
        # shrink the unit to the size of these errors, then to that of the errors of the errors, and so on.
        largest = torch.where(usable & varied, torch.maximum(self.largest_std, new_var.sqrt()), self.largest_std)
        new_std = torch.where(varied, torch.maximum(new_var.sqrt(), SMALLEST * largest), self.std)
        # The first time there is nothing to keep: the critic has learned nothing yet.
        ratio = torch.where(first, 1.0, self.std / new_std)
        shift = torch.where(first, 0.0, (self.mean - new_mean) / new_std)
        last.weight.mul_(ratio.to(last.weight.dtype))
        last.bias.copy_(last.bias * ratio.to(last.bias.dtype) + shift.to(last.bias.dtype))
        self.mean.copy_(new_mean)
        self.square.copy_(new_square)
        self.std.copy_(new_std)
        self.largest_std.copy_(largest)
        self.seen.copy_(torch.maximum(self.seen, (usable & varied).double()))


_NOT_ARGUMENTS = ("self", "__class__", "observation_space", "action_space")

__all__ = ["CORES", "ActorCritic", "chrono_init_", "make_core"]


class ActorCritic(Actor):
    """Encoder, core, and heads from gymnasium spaces.

    core: "lstm", "gru", None (memoryless control), a core or its class. critic_core: "shared" (one core for both), "separate"
    (a second core for the critic), "none" (the critic sees the encoded observation only). encoder, channels: how images are read
    (docs/images.md); an encoder of your own is a class or function that takes the Box. encoder_sizes: layers before the core,
    (hidden_size,) by default. head_sizes: layers between core and output, in actor and critic each. mask_parents:
    {j: i} when the mask of action head j depends on head i's choice. normalize_obs: running normalization of float
    observations; statistics change only in `update_normalizer`. normalize_value: the critic learns values of mean 0 and
    deviation 1 (`value_scale.py`); what the policy returns stays in reward units. memory_span: start with gates that
    remember for up to about so many steps; for core="window" the length of the window. Box actions: initial_std is the
    deviation at the start, and with scale_actions mean and deviation are in units of the bounds (half their distance).
    squash_actions: a tanh keeps them inside the bounds.

    actor_obs, critic_obs: of a Dict observation, the keys that the actor and the critic see; None: all. If either is given,
    the critic has its own encoder and core, and deployment (`predict`, `Runner`, export) uses `actor_only()`.
    """

    critic_encoder: nn.Module | None  # None unless actor_obs or critic_obs is given
    critic_trunk: nn.Module | None

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        core: str | type | Core | None = "lstm",
        hidden_size: int = 128,
        critic_core: str = "shared",
        *,
        num_layers: int = 1,
        reset: str = "zero",
        encoder: Any = "auto",
        channels: str = "auto",
        encoder_sizes: Sequence[int] | None = None,
        head_sizes: Sequence[int] = (),
        activation: str = "tanh",
        normalize_obs: bool = False,
        normalize_value: bool = False,
        memory_span: int | None = None,
        mask_parents: dict[int, int] | None = None,
        scale_actions: bool = False,
        squash_actions: bool = False,
        initial_std: float = 1.0,
        actor_obs: Sequence[str] | None = None,
        critic_obs: Sequence[str] | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in _NOT_ARGUMENTS}
        check_sizes(hidden_size=hidden_size, num_layers=num_layers)
        for size in (*(encoder_sizes or ()), *head_sizes):
            check_sizes(**{"each of encoder_sizes and head_sizes": size})
        # Do not reorder: seeds and state_dict keys depend on it.
        asymmetric = actor_obs is not None or critic_obs is not None or self._has_own_encoder(critic_core, core)
        actor_space = encoders.part_of(observation_space, actor_obs, "actor_obs")
        reads = encoders.for_space(actor_space, normalize_obs, encoder, channels)
        sizes = (hidden_size,) if encoder_sizes is None else tuple(encoder_sizes)
        trunk, features = encoders.mlp(reads.size, sizes, activation)  # type: ignore[arg-type]
        critic_encoder, critic_trunk = None, None
        if asymmetric:
            critic_space = encoders.part_of(observation_space, critic_obs, "critic_obs")
            critic_encoder = encoders.for_space(critic_space, normalize_obs, encoder, channels)
            critic_trunk, critic_features = encoders.mlp(critic_encoder.size, sizes, activation)  # type: ignore[arg-type]
        make = _CoreMaker(core, hidden_size, num_layers, reset, memory_span)
        if asymmetric:
            whole = make.with_own_inputs(critic_core, features, critic_features)
        else:
            whole = make.with_same_input(critic_core, features)
        super().__init__(whole, observation_space, action_space, mask_parents, None, scale_actions, squash_actions)
        if memory_span is not None:
            chrono_init_(whole, memory_span)
        self.arguments: dict[str, Any] = given
        """What it was made with, next to the spaces: `hf.save_pretrained` writes it down."""
        self.actor_space = actor_space
        self.encoder, self.trunk = reads, trunk
        self.critic_encoder, self.critic_trunk = critic_encoder, critic_trunk
        self._slices = _actor_and_critic_slices(whole)
        self._make_heads(head_sizes, activation, initial_std)
        if normalize_value:
            self.value_scale = ValueScale()
            nn.init.zeros_(self.critic.weight)  # type: ignore[arg-type]

    @staticmethod
    def _has_own_encoder(critic_core: str, core: Any) -> bool:
        """Whether the critic has an encoder of its own, also if it sees what the actor sees."""
        return False

    def _make_heads(self, head_sizes: Sequence[int], activation: str, initial_std: float) -> None:
        whole = slice(0, self.core.output_size)
        widths = [part.stop - part.start for part in self._slices or (whole, whole)]
        self.actor_head, a = encoders.mlp(widths[0], head_sizes, activation)
        self.critic_head, c = encoders.mlp(widths[1], head_sizes, activation)
        outputs = num_outputs(self.action_space)
        self.actor = encoders.orthogonal(nn.Linear(a, outputs), 0.01)
        self.critic = encoders.orthogonal(nn.Linear(c, 1), 1.0)
        if boxes := boxes_of(self.action_space):
            self.log_std = nn.Parameter(torch.full((sum(map(num_outputs, boxes)),), math.log(initial_std)))

    def encode(self, obs: Any) -> Tensor:
        features = super().encode(obs)
        if self.critic_encoder is None or self.critic_trunk is None:
            return features
        encoded = self.critic_encoder(obs).to(features.dtype)
        return torch.cat([features, self.critic_trunk(encoded).to(features.dtype)], dim=1)

    def decode(self, features: Tensor, action_mask: Any = None) -> tuple[Any, Tensor]:
        for_actor, for_critic = self._parts(features)
        value = self.critic(self.critic_head(for_critic)).squeeze(-1)
        if self.value_scale is not None:
            value = self.value_scale.to_reward_units(value.float())
        return self.distribution(self.actor(self.actor_head(for_actor)), action_mask), value

    def _parts(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """What actor and critic read: the same features, or each those of its core."""
        if self._slices is None:
            return features, features
        actor, critic = self._slices
        if actor.start == 0 and actor.stop == critic.start and critic.stop == features.shape[1]:
            first, second = features.split([actor.stop, critic.stop - critic.start], dim=1)  # one node in the backward
            return first, second
        return features[:, actor], features[:, critic]

    def actor_only(self) -> Actor:
        """The actor alone, with the same weights and its own memory; of two cores only the actor's is kept."""
        core, inputs = self.core, None
        if self._slices is not None and isinstance(core, Parallel):
            core, inputs = core.cores["actor"], core.inputs.get("actor")  # type: ignore[assignment]
        if self.critic_encoder is not None:
            inputs = None  # the actor's trunk gives nothing else
        actor = Actor(
            core,
            self.actor_space,
            self.action_space,
            self.mask_parents,
            inputs,
            self.scale_actions,
            self.squash_actions,
        )
        for name, part in self._actor_parts().items():
            setattr(actor, name, part)
        actor.training = self.training
        return actor

    def _actor_parts(self) -> dict[str, Any]:
        names = ("encoder", "trunk", "actor_head", "actor", "log_std", "action_center", "action_half_range")
        return {name: getattr(self, name) for name in names if hasattr(self, name)}

    def deployed(self) -> Actor:
        """The actor alone if the critic sees other observations than the actor; rebuilt only if a part was replaced."""
        if self.critic_encoder is None:
            return self
        parts = [self.core, *self._actor_parts().values()]
        kept, actor = self.__dict__.get("_deployed", ((), None))  # not a submodule: its weights are this policy's
        if actor is None or any(a is not b for a, b in zip(parts, kept, strict=True)):
            actor = self.actor_only()
            self.__dict__["_deployed"] = parts, actor
        actor.training = self.training
        return actor

    def update_normalizer(self, obs: Any, ranks: Ranks | None = None) -> None:
        """Update the statistics with [N, ...] or [T, B, ...] observations, those of all `ranks` of a distributed run.

        Not between a rollout and its update.
        """
        for part in (self.encoder, self.critic_encoder):
            if part is not None:
                encoders.update_normalizers(part, obs, ranks)

    def update_value_scale(self, returns: Tensor, ranks: Ranks = ALONE) -> None:
        """Update the value statistics with a rollout's returns [N], those of all `ranks`; the policy's values do not change."""
        if self.value_scale is not None:
            self.value_scale.move(*ranks.moments(returns), self.critic)  # type: ignore[arg-type]

    @property
    def normalizes(self) -> bool:
        return encoders.normalizes(self)


class _CoreMaker(NamedTuple):
    """Makes the core of a policy: one that actor and critic share, or one for each, side by side."""

    core: str | type | Core | None
    hidden_size: int
    num_layers: int
    reset: str
    memory_span: int | None

    def with_same_input(self, critic_core: str, features: int) -> Core:
        """Actor and critic read the same features."""
        actor = self.one(self.core, features)
        if critic_core == "shared":
            return actor
        _check_critic_core(critic_core)
        if isinstance(self.core, Core) and critic_core == "separate":
            raise ValueError(
                "pass hf.Parallel(actor=..., critic=...) as core, with critic_core='shared', or a core by name"
            )
        return Parallel(actor=actor, critic=self.one(None if critic_core == "none" else self.core, features))

    def with_own_inputs(self, critic_core: str, actor_features: int, critic_features: int) -> Core:
        """The actor reads the first features, the critic the others. There is nothing to share."""
        _check_critic_core(critic_core)
        if isinstance(self.core, Core):
            raise ValueError(
                "with actor_obs or critic_obs the actor and the critic have a core each: give core by name or class"
            )
        actor = self.one(self.core, actor_features)
        critic = self.one(None if critic_core == "none" else self.core, critic_features)
        parts = {"actor": slice(0, actor_features), "critic": slice(actor_features, actor_features + critic_features)}
        return Parallel(actor=actor, critic=critic, inputs=parts)

    def one(self, core: str | type | Core | None, features: int) -> Core:
        return make_core(core, features, self.hidden_size, self.num_layers, self.reset, self.memory_span)


def _check_critic_core(critic_core: str) -> None:
    if critic_core not in ("shared", "separate", "none"):
        raise ValueError(f"unknown critic_core {critic_core!r}; 'shared', 'separate' or 'none'")


def _actor_and_critic_slices(core: Core) -> tuple[slice, slice] | None:
    """Which features of a core's output are the actor's and the critic's; None: both read all."""
    if isinstance(core, Parallel) and {"actor", "critic"} <= set(core.slices):
        return core.slices["actor"], core.slices["critic"]
    return None
