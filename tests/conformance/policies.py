"""The policies that must pass the whole suite, by name: ready-made ones with every core, one that a user wrote with a
convolutional encoder, and the TensorDict forms. One core of each family has every reset mode."""

from __future__ import annotations

from collections.abc import Callable

import torch
from gymnasium import spaces
from torch import nn
from torch.distributions import Categorical

import holdfast as hf
from conformance.driver import Driver, PolicyDriver
from conformance.tensordict_drivers import HandWritten, TensorDictDriver, wrap
from cores.all_cores import CONFORMING, cells_side_by_side, core_of

Make = Callable[[], Driver]
ACTIONS = 5


class ConvPolicy(hf.RecurrentPolicy):
    def __init__(self, core: hf.Core) -> None:
        super().__init__(core=core)
        self.conv, self.head = nn.Conv2d(1, 6, 2), nn.Linear(core.output_size, ACTIONS + 1)

    def encode(self, obs):
        return self.conv(obs).flatten(1).tanh()

    def decode(self, features):
        out = self.head(features)
        return Categorical(logits=out[:, :ACTIONS]), out[:, ACTIONS]


def actor_critic(kind: str, reset: str) -> Driver:
    """kind: of `KINDS`, or "every cell" for all of them side by side."""
    torch.manual_seed(0)
    core = cells_side_by_side(6, reset) if kind == "every cell" else core_of(kind, reset)
    policy = hf.ActorCritic(spaces.Box(-10, 10, (3,)), spaces.Discrete(ACTIONS), core=core, encoder_sizes=(6,))
    return PolicyDriver(loud(policy), reset)


def conv(kind: str) -> Driver:
    torch.manual_seed(0)
    return PolicyDriver(loud(ConvPolicy(core_of(kind, "zero"))), "zero", obs_shape=(1, 2, 2))


def tensordict_form(kind: str, reset: str) -> Driver:
    return wrap(actor_critic(kind, reset).module, reset)


def lstm_wrapper() -> Driver:
    torch.manual_seed(0)
    return TensorDictDriver(loud(HandWritten()))


def loud(policy: nn.Module) -> nn.Module:
    """Set weights with which memory affects every output, and learned starts that are not zero."""
    with torch.no_grad():
        for name, p in policy.named_parameters():
            if "initial_" in name or name in ("actor.weight", "critic.weight", "head.weight"):
                p.normal_(0, 0.8)
            elif "weight_hh" in name or "weight_ih" in name:
                p.mul_(1.5)
            elif "weight_l" in name:  # a MinGRU's, whose gates start nearly closed
                p.mul_(3)
            elif "bias_l" in name:
                p.zero_()
    return policy


DRIVERS: dict[str, Make] = {
    f"{kind}-{reset}": (lambda kind=kind, reset=reset: actor_critic(kind, reset)) for kind, reset in CONFORMING
}
DRIVERS["conv-lstm-zero"] = lambda: conv("lstm")
DRIVERS["conv-gru-zero"] = lambda: conv("gru")
for _kind, _reset in (("lstm", "zero"), ("gru", "detach"), ("stack", "learned"), ("parallel", "never")):
    DRIVERS[f"tensordict-{_kind}-{_reset}"] = lambda kind=_kind, reset=_reset: tensordict_form(kind, reset)
DRIVERS["lstm_wrapper-zero"] = lambda: lstm_wrapper()
