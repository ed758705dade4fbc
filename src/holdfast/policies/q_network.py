"""`QNetwork`: a recurrent network of action values for gymnasium spaces, for Q-learning. It acts greedily.

    policy = hf.QNetwork(env.single_observation_space, env.single_action_space, core="gru", hidden_size=128)

Exploration belongs to rollouts (`rollout/exploration.py`), so evaluation, `hf.Runner` and exported files are greedy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from holdfast.config.settings import default_of, given
from holdfast.cores import Core
from holdfast.cores.base import check_sizes
from holdfast.cores.chrono import chrono_init_
from holdfast.cores.named import make_core
from holdfast.policies import encoders
from holdfast.policies.actor import Actor
from holdfast.policies.heads import Greedy

if TYPE_CHECKING:
    from typing import Self

_NOT_ARGUMENTS = ("self", "__class__", "observation_space", "action_space")


class QNetwork(Actor):
    """Encoder, core, and a Q for each action of a Discrete space. Arguments as those of `hf.ActorCritic`.

    dueling: Q is a value plus advantages, whose mean over the allowed actions is 0. layer_norm: LayerNorm before and after the core.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        core: str | type | Core | None = "lstm",
        hidden_size: int = 128,
        *,
        num_layers: int = 1,
        reset: str = "zero",
        encoder: Any = "auto",
        channels: str = "auto",
        encoder_sizes: Sequence[int] | None = None,
        head_sizes: Sequence[int] = (),
        activation: str = "relu",
        normalize_obs: bool = False,
        memory_span: int | None = None,
        dueling: bool = False,
        layer_norm: bool = False,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in _NOT_ARGUMENTS}
        check_sizes(hidden_size=hidden_size, num_layers=num_layers)
        if not isinstance(action_space, spaces.Discrete):
            raise ValueError(
                f"Q-learning needs one choice among a number of actions (Discrete), and this action space is {action_space}; "
                "use --algorithm ppo"
            )
        reads = encoders.for_space(observation_space, normalize_obs, encoder, channels)
        sizes = (hidden_size,) if encoder_sizes is None else tuple(encoder_sizes)
        trunk, features = encoders.mlp(reads.size, sizes, activation)  # type: ignore[arg-type]
        whole = make_core(core, features, hidden_size, num_layers, reset, memory_span)
        super().__init__(whole, observation_space, action_space)
        if memory_span is not None:
            chrono_init_(whole, memory_span)
        self.arguments: dict[str, Any] = given
        """What it was made with, next to the spaces: `hf.save_pretrained` writes it down."""
        self.encoder = reads
        self.trunk = nn.Sequential(*trunk, nn.LayerNorm(features)) if layer_norm else trunk
        self.norm = nn.LayerNorm(whole.output_size) if layer_norm else nn.Identity()
        self.actor_head, width = encoders.mlp(whole.output_size, head_sizes, activation)
        self.actor = encoders.orthogonal(nn.Linear(width, int(action_space.n)), 0.1)  # of Q, or of advantages
        self.state_value = encoders.orthogonal(nn.Linear(width, 1), 0.1) if dueling else None

    @classmethod
    def of_config(cls, config: Any, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> Self:
        """What the settings of PQN or R2D2 describe."""
        for name in ("critic_core", "actor_obs", "critic_obs"):
            if (value := getattr(config, name)) != default_of(type(config), name):
                raise ValueError(
                    f"{given(name, value)} is about a critic, and {config.algorithm} has none; leave it out"
                )
        return super().of_config(config, observation_space, action_space)

    def decode(self, features: Tensor, action_mask: Any = None) -> tuple[Greedy, Tensor]:
        hidden = self.actor_head(self.norm(features))
        q = self.actor(hidden).float()
        if self.state_value is not None:
            q = self.state_value(hidden).float() + q - _mean_allowed(q, action_mask)
        dist = Greedy(q, action_mask, int(self.action_space.start))  # type: ignore[attr-defined]
        return dist, dist.value

    def update_normalizer(self, obs: Any, ranks: Any = None) -> None:
        encoders.update_normalizers(self.encoder, obs, ranks)

    @property
    def normalizes(self) -> bool:
        return encoders.normalizes(self.encoder)


def _mean_allowed(q: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return q.mean(-1, keepdim=True)
    return torch.where(mask, q, 0.0).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
