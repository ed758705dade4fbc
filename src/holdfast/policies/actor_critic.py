"""`ActorCritic`: a ready-made recurrent policy for gymnasium spaces.

    policy = hf.ActorCritic(env.single_observation_space, env.single_action_space, core="lstm", hidden_size=128)

Everything about memory is in `RecurrentPolicy`; this file only chooses encoders, the core and the heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from holdfast.cores import GRU, LSTM, Core, Memoryless, Parallel
from holdfast.cores.gated import GatedCore
from holdfast.policies import encoders, heads
from holdfast.policies.base import RecurrentPolicy
from holdfast.state import State, leaves, tree_map

if TYPE_CHECKING:
    from holdfast.distributed.ranks import Ranks

CORES: dict[str, type[LSTM] | type[GRU]] = {"lstm": LSTM, "gru": GRU}


def make_core(core: str | Core | None, input_size: int, hidden_size: int, num_layers: int, reset: str) -> Core:
    """A core by name; None is the memoryless control: an MLP of the same width, without state."""
    if isinstance(core, Core):
        if core.input_size != input_size:
            raise ValueError(
                f"the core takes {core.input_size} features, the encoder gives {input_size}; set encoder_sizes"
            )
        return core
    if core is None or core == "none":
        return Memoryless(input_size)
    if core not in CORES:
        raise ValueError(f"unknown core {core!r}; one of {', '.join(map(repr, CORES))}, None, or a holdfast core")
    return CORES[core](input_size, hidden_size, num_layers, reset=reset)


@torch.no_grad()
def chrono_init_(core: Core, span: int) -> None:
    """Bias the gates of LSTMs and GRUs inside `core` so that they remember for up to about `span` steps from the start.

    Chrono initialisation (Tallec and Ollivier, 2018): forget biases log(u), u uniform in [1, span - 1]; input biases
    the negative of them. For a GRU the update gate plays both parts.
    """
    for cell in core.modules():
        if not isinstance(cell, GatedCore) or not cell.bias:
            continue
        H = cell.hidden_size
        for layer in range(cell.num_layers):
            keep = torch.empty(H).uniform_(1.0, max(1.01, span - 1.0)).log_()
            ih, hh = getattr(cell, f"bias_ih_l{layer}"), getattr(cell, f"bias_hh_l{layer}")
            if isinstance(cell, LSTM):  # gates i, f, g, o
                ih[:H], hh[:H] = -keep, 0.0
                ih[H : 2 * H], hh[H : 2 * H] = keep, 0.0
            else:  # gates r, z, n; h = (1 - z) n + z h
                ih[H : 2 * H], hh[H : 2 * H] = keep, 0.0


class ActorCritic(RecurrentPolicy):
    """Encoder, core, and heads from gymnasium spaces.

    core: "lstm", "gru", None (memoryless control) or any core. critic_core: "shared" (one core for both), "separate" (a
    second core for the critic), "none" (the critic sees the encoded observation only). encoder_sizes: layers before the
    core, (hidden_size,) by default. head_sizes: layers between core and output, in actor and critic each. mask_parents:
    {j: i} when the mask of action head j depends on head i's choice. normalize_obs: running normalisation of float
    observations; statistics move only in `update_normalizer`. memory_span: start with gates that remember for up to
    about so many steps.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        core: str | Core | None = "lstm",
        hidden_size: int = 128,
        critic_core: str = "shared",
        *,
        num_layers: int = 1,
        reset: str = "zero",
        encoder_sizes: Sequence[int] | None = None,
        head_sizes: Sequence[int] = (),
        activation: str = "tanh",
        normalize_obs: bool = False,
        memory_span: int | None = None,
        mask_parents: dict[int, int] | None = None,
    ) -> None:
        encoder = encoders.for_space(observation_space, normalize_obs)
        sizes = (hidden_size,) if encoder_sizes is None else tuple(encoder_sizes)
        trunk, features = encoders.mlp(encoder.size, sizes, activation)  # type: ignore[arg-type]
        actor_core = make_core(core, features, hidden_size, num_layers, reset)
        if critic_core == "shared":
            whole: Core = actor_core
            actor_slice = critic_slice = slice(0, whole.output_size)
        elif critic_core in ("separate", "none"):
            if isinstance(core, Core) and critic_core == "separate":
                raise ValueError(
                    "pass hf.Parallel(actor=..., critic=...) as core, with critic_core='shared', or a core by name"
                )
            second = None if critic_core == "none" else core
            critic = make_core(second, features, hidden_size, num_layers, reset)
            whole = Parallel(actor=actor_core, critic=critic)
            actor_slice, critic_slice = whole.slices["actor"], whole.slices["critic"]
        else:
            raise ValueError(f"unknown critic_core {critic_core!r}; 'shared', 'separate' or 'none'")
        super().__init__(whole)
        if memory_span is not None:
            chrono_init_(whole, memory_span)
        self.observation_space, self.action_space = observation_space, action_space
        self.encoder, self.trunk = encoder, trunk
        self.mask_parents = mask_parents
        if isinstance(whole, Parallel) and {"actor", "critic"} <= set(whole.slices):
            actor_slice, critic_slice = whole.slices["actor"], whole.slices["critic"]
        self._slices = None if actor_slice == critic_slice else (actor_slice, critic_slice)
        self.actor_head, a = encoders.mlp(actor_slice.stop - actor_slice.start, head_sizes, activation)
        self.critic_head, c = encoders.mlp(critic_slice.stop - critic_slice.start, head_sizes, activation)
        self.actor = encoders.orthogonal(nn.Linear(a, _num_outputs(action_space)), 0.01)
        self.critic = encoders.orthogonal(nn.Linear(c, 1), 1.0)
        if isinstance(action_space, spaces.Box):
            self.log_std = nn.Parameter(torch.zeros(_num_outputs(action_space)))

    def encode(self, obs: Any) -> Tensor:
        return self.trunk(self.encoder(obs).to(self.critic.weight.dtype))

    def decode(self, features: Tensor, action_mask: Any = None) -> tuple[Any, Tensor]:
        for_actor, for_critic = self._parts(features)
        value = self.critic(self.critic_head(for_critic)).squeeze(-1)
        return self.distribution(self.actor(self.actor_head(for_actor)), action_mask), value

    def _parts(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """What actor and critic read: the same features, or each its core's."""
        if self._slices is None:
            return features, features
        actor, critic = self._slices
        if actor.start == 0 and actor.stop == critic.start and critic.stop == features.shape[1]:
            first, second = features.split([actor.stop, critic.stop - critic.start], dim=1)  # one node in the backward
            return first, second
        return features[:, actor], features[:, critic]

    def distribution(self, out: Tensor, mask: Any) -> Any:
        space = self.action_space
        out = out.float()  # probabilities in full precision, also under autocast
        if isinstance(space, spaces.Discrete):
            return heads.Categorical(out, mask, start=int(space.start))
        if isinstance(space, spaces.MultiDiscrete):
            return heads.MultiCategorical(out, space.nvec.tolist(), mask, self.mask_parents)
        if isinstance(space, spaces.MultiBinary):
            return heads.Bernoulli(out, mask)
        if mask is not None:
            raise ValueError("Box actions take no action mask")
        return heads.Gaussian(out, self.log_std.float(), space.shape)

    @torch.no_grad()
    def predict(
        self, obs: Any, state: State = None, episode_start: Any = None, deterministic: bool = False
    ) -> tuple[Any, State]:
        """As `RecurrentPolicy.predict`; a single observation without a batch dimension works too."""
        first, first_space = leaves(obs)[0], _first_space(self.observation_space)
        single = tuple(getattr(first, "shape", ())) == tuple(first_space.shape or ())
        if single:
            obs = tree_map(lambda o: torch.as_tensor(o)[None], obs)
            episode_start = None if episode_start is None else torch.as_tensor(episode_start).reshape(1)
        action, state = super().predict(obs, state, episode_start, deterministic)
        return (action[0] if single else action), state

    def update_normalizer(self, obs: Any, ranks: Ranks | None = None) -> None:
        """Move the statistics by [N, ...] or [T, B, ...] observations, those of all `ranks` of a distributed run.

        Not between a rollout and its update.
        """
        for encoder, leaf in _vectors(self.encoder, obs):
            encoder.update(leaf, ranks)

    @property
    def normalizes(self) -> bool:
        return any(isinstance(m, encoders.Vector) and m.normalize for m in self.modules())


def _num_outputs(space: spaces.Space[Any]) -> int:
    if isinstance(space, spaces.Discrete):
        return int(space.n)
    if isinstance(space, spaces.MultiDiscrete):
        if space.nvec.ndim != 1 or space.start.any():
            raise ValueError(f"MultiDiscrete actions must be one-dimensional and start at 0, got {space}")
        return int(space.nvec.sum())
    if isinstance(space, spaces.MultiBinary):
        if len(space.shape) != 1:
            raise ValueError(f"MultiBinary actions must be one-dimensional, got {space}")
        return int(space.shape[0])
    if isinstance(space, spaces.Box):
        return int(torch.Size(space.shape).numel())
    raise ValueError(f"no action head for {space}; Discrete, MultiDiscrete, MultiBinary and Box are supported")


def _first_space(space: spaces.Space[Any]) -> spaces.Space[Any]:
    while isinstance(space, (spaces.Dict, spaces.Tuple)):
        space = next(iter(space.values())) if isinstance(space, spaces.Dict) else space[0]
    return space


def _vectors(encoder: nn.Module, obs: Any) -> list[tuple[encoders.Vector, Tensor]]:
    """The normalising encoders with the part of the observation each reads."""
    if isinstance(encoder, encoders.Composite):
        return [pair for key, part in zip(encoder.keys, encoder.parts) for pair in _vectors(part, obs[key])]
    return [(encoder, obs)] if isinstance(encoder, encoders.Vector) and encoder.normalize else []
