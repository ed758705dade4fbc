"""`SoftActorCritic`: an actor whose entropy is a part of its return, and several critics of its actions, for SAC.

    policy = hf.SoftActorCritic(env.single_observation_space, env.single_action_space, core="gru", hidden_size=128)
    features, state = policy.features(segment.obs, segment.start_state, segment.resets)    # [T * B, O]
    dist, _ = policy.decode(features)
    action, log_prob = dist.rsample()
    q = policy.q(features, action)                                                         # [critics, T * B]

It acts as every policy here does. Actions are inside their bounds; critics and actor see them in units of these, -1 to 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from holdfast.cores import Core, Parallel
from holdfast.policies import encoders
from holdfast.policies.action_parts import num_outputs
from holdfast.policies.actor_critic import ActorCritic
from holdfast.policies.base import RecurrentPolicy

_NOT_ARGUMENTS = ("self", "__class__", "observation_space", "action_space")


class QHeads(nn.Module):
    """Several networks of the same form side by side: [N, inputs] -> [heads, N, outputs]. Each layer is one product for all heads."""

    def __init__(self, heads: int, inputs: int, hidden: Sequence[int], outputs: int, activation: str) -> None:
        super().__init__()
        self.activation = encoders.ACTIVATIONS[activation]()
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        sizes = [inputs, *hidden, outputs]
        for layer, (n, m) in enumerate(pairwise(sizes)):
            weight = torch.empty(heads, n, m)
            for head in weight:
                nn.init.orthogonal_(head, math.sqrt(2) if layer < len(hidden) else 1.0)
            self.weights.append(nn.Parameter(weight))
            self.biases.append(nn.Parameter(torch.zeros(heads, 1, m)))

    def forward(self, features: Tensor, actions: Tensor | None = None) -> Tensor:
        """actions: the last inputs, if they are apart. A slope by the actions alone then costs no product with the features."""
        heads, inputs = len(self.weights[0]), features.shape[1]
        first = self.weights[0]
        x = torch.baddbmm(self.biases[0], features.expand(heads, *features.shape), first[:, :inputs])
        if actions is not None:
            x = torch.baddbmm(x, actions.expand(heads, *actions.shape), first[:, inputs:])
        for weight, bias in list(zip(self.weights, self.biases))[1:]:
            x = self.activation(x)
            if weight.shape[2] > 1:
                x = torch.baddbmm(bias, x, weight)
            else:  # a product with one column takes several times as long
                x = (x * weight.transpose(1, 2)).sum(-1, keepdim=True) + bias
        return x


class SoftActorCritic(ActorCritic):
    """Encoder, core and heads of an actor and of `critics` critics. Arguments not named here: as those of `hf.ActorCritic`.

    Box actions need bounds: a Gaussian through a tanh, whose mean and deviation depend on the state. Discrete actions: a Categorical.
    critic_core: "separate" (the critics have an encoder and a core of their own), "shared" (one for both, which learns from the
    critics alone), "none" (critics without memory). skip: heads read what the encoder gives besides what the core gives.
    """

    log_std_range = (-5.0, 2.0)
    critic: QHeads

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        core: str | type | Core | None = "gru",
        hidden_size: int = 128,
        critic_core: str = "separate",
        *,
        num_layers: int = 1,
        reset: str = "zero",
        encoder: Any = "auto",
        channels: str = "auto",
        encoder_sizes: Sequence[int] | None = None,
        head_sizes: Sequence[int] = (128, 128),
        activation: str = "relu",
        normalize_obs: bool = False,
        memory_span: int | None = None,
        critics: int = 2,
        skip: bool = True,
        actor_obs: Sequence[str] | None = None,
        critic_obs: Sequence[str] | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in _NOT_ARGUMENTS}
        _check_actions(action_space)
        if critics < 1:
            raise ValueError(f"critics is {critics}, expected at least 1")
        self.skip, self.critics = skip, critics  # before the heads are made
        super().__init__(
            observation_space,
            action_space,
            core,
            hidden_size,
            critic_core,
            num_layers=num_layers,
            reset=reset,
            encoder=encoder,
            channels=channels,
            encoder_sizes=encoder_sizes,
            head_sizes=head_sizes,
            activation=activation,
            normalize_obs=normalize_obs,
            memory_span=memory_span,
            squash_actions=True,
            actor_obs=actor_obs,
            critic_obs=critic_obs,
        )
        self.arguments = given
        for part, space in ((self.encoder, self.actor_space), (self.critic_encoder, observation_space)):
            if part is not None:
                encoders.with_bounded_action(part, space, action_space)

    @staticmethod
    def _has_own_encoder(critic_core: str, core: Any) -> bool:
        return critic_core != "shared" and not isinstance(core, Core)

    @property
    def has_own_critic(self) -> bool:
        """Whether critics and actor share no weights; otherwise they share a memory, which learns from the critics alone."""
        return self.critic_encoder is not None

    def _make_heads(self, head_sizes: Sequence[int], activation: str, initial_std: float) -> None:
        actor, critic = (part.shape[1] for part in self._parts(torch.empty(1, self._num_features())))
        outputs, is_box = num_outputs(self.action_space), isinstance(self.action_space, spaces.Box)
        self.actor_head, width = encoders.mlp(actor, head_sizes, activation)
        self.actor = encoders.orthogonal(nn.Linear(width, outputs * (2 if is_box else 1)), 0.01)
        inputs, values = (critic + outputs, 1) if is_box else (critic, outputs)
        self.critic = QHeads(self.critics, inputs, head_sizes, values, activation)

    def _num_features(self) -> int:
        return self.core.output_size + (self.core.input_size if self.skip else 0)

    def _parts(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """What actor and critics read: outputs of their cores, then of their encoders."""
        if not self.skip:
            return super()._parts(features)
        if self._slices is None:
            return features, features
        return self._part(features, 0), self._part(features, 1)

    def _part(self, features: Tensor, which: int) -> Tensor:
        """What the actor (0) or the critics (1) read."""
        if not self.skip or self._slices is None:
            return self._parts(features)[which]
        y, x = features.split([self.core.output_size, self.core.input_size], 1)
        inputs = self.core.inputs if isinstance(self.core, Parallel) else {}
        own = inputs.get(("actor", "critic")[which])
        return torch.cat([y[:, self._slices[which]], x if own is None else x[:, own]], 1)

    def decode(self, features: Tensor, action_mask: Any = None) -> tuple[Any, None]:  # type: ignore[override]
        return self.distribution(self.actor(self.actor_head(self._part(features, 0))), action_mask), None

    def q(self, features: Tensor, actions: Tensor | None = None) -> Tensor:
        """Q of Box actions [N, ...] in the environment's units: [critics, N]; of every Discrete action: [critics, N, n]."""
        return _q(self, self._part(features, 1), actions)

    def critic_only(self) -> SoftCritic | SoftActorCritic:
        """The critics alone, with the same weights; itself if they share their memory. A copy of it is a target network."""
        return SoftCritic(self) if self.has_own_critic else self

    def actor_parameters(self) -> list[nn.Parameter]:
        """What learns from the loss of the actor: all of its parts, or its head if critics and actor share a memory."""
        if not self.has_own_critic and self._slices is None:
            return [*self.actor_head.parameters(), *self.actor.parameters()]
        return list(self.actor_only().parameters())

    def _actor_parts(self) -> dict[str, Any]:
        return {**super()._actor_parts(), "skip": self.skip, "log_std_range": self.log_std_range}


class SoftCritic(RecurrentPolicy):
    """The encoder, core and heads of the critics of a `SoftActorCritic`: `features` and `q`, no actions."""

    def __init__(self, policy: SoftActorCritic) -> None:
        super().__init__(policy.core.cores["critic"])  # type: ignore[arg-type, index]
        self.encoder, self.trunk, self.critic = policy.critic_encoder, policy.critic_trunk, policy.critic
        self.skip = policy.skip
        if isinstance(policy.action_space, spaces.Box):
            self.register_buffer("action_center", policy.action_center, persistent=False)
            self.register_buffer("action_half_range", policy.action_half_range, persistent=False)

    def encode(self, obs: Any) -> Tensor:
        return self.trunk(self.encoder(obs).to(self.critic.weights[0].dtype))  # type: ignore[misc]

    def q(self, features: Tensor, actions: Tensor | None = None) -> Tensor:
        """As `SoftActorCritic.q`, from the features of the critics."""
        return _q(self, features, actions)


def _q(module: Any, features: Tensor, actions: Tensor | None) -> Tensor:
    if actions is None:
        return module.critic(features).float()
    scaled = (actions.reshape(len(actions), -1) - module.action_center) / module.action_half_range
    return module.critic(features, scaled.to(features.dtype)).squeeze(-1).float()


def _check_actions(space: spaces.Space[Any]) -> None:
    if isinstance(space, spaces.Box):
        bounded = np.isfinite(space.low) & np.isfinite(space.high) & (space.high > space.low)
        if not bounded.all():
            free = ", ".join(map(str, np.flatnonzero(~bounded)[:4]))
            raise ValueError(
                f"SAC needs two different bounds for every action, and {space} lacks them at index {free}; give it bounds "
                "(gymnasium.wrappers.RescaleAction), or use --algorithm ppo"
            )
    elif not isinstance(space, spaces.Discrete):
        raise ValueError(f"SAC takes Box and Discrete actions, and this action space is {space}; use --algorithm ppo")
