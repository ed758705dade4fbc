"""Your own recurrent policy in Stable-Baselines3: the two ways in which it usually fails, and the one that works.

    python examples/sb3_own_policy.py

`KeepsHidden` is a features extractor with an LSTM and `self.hidden`, given to plain PPO. Its first update ends in
"backward through the graph a second time"; with a `.detach()` it ends in a batch size mismatch, because PPO trains on
shuffled single steps, 64 at a time, and the hidden state is that of 4 environments. No `.detach()` can fix it: shuffled
steps have no sequence. The fixed script is the last part: the encoder is yours, the LSTM belongs to the policy, and
`RecurrentPPO` trains on sequences with the states they started from.
"""

from __future__ import annotations

import argparse

import gymnasium as gym
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from torch import nn

from holdfast.envs import VelocityMask
from holdfast.integrations.sb3 import MlpLstmPolicy, RecurrentPPO


def make_env():
    return make_vec_env(lambda: VelocityMask(gym.make("CartPole-v1")), n_envs=4, seed=0)


# --- what fails -------------------------------------------------------------------------------------------------------


class KeepsHidden(BaseFeaturesExtractor):
    """The usual attempt. `detach` is the usual answer to its first error."""

    def __init__(self, observation_space, detach: bool):
        super().__init__(observation_space, features_dim=32)
        self.encoder, self.lstm = nn.Linear(4, 32), nn.LSTM(32, 32)
        self.hidden, self.detach_hidden = None, detach

    def forward(self, obs):
        x = torch.tanh(self.encoder(obs))
        if self.hidden is None or (not self.detach_hidden and self.hidden[0].shape[1] != x.shape[0]):
            zeros = torch.zeros(1, x.shape[0], 32)
            self.hidden = (zeros, zeros)
        y, self.hidden = self.lstm(x.unsqueeze(0), self.hidden)
        if self.detach_hidden:
            self.hidden = tuple(h.detach() for h in self.hidden)
        return y[0]


def failing(detach: bool) -> str:
    """What plain PPO with that extractor ends in."""
    kwargs = {"features_extractor_class": KeepsHidden, "features_extractor_kwargs": {"detach": detach}}
    model = PPO("MlpPolicy", make_env(), n_steps=32, batch_size=64, policy_kwargs=kwargs, seed=0, device="cpu")
    try:
        model.learn(256)
    except RuntimeError as error:
        return str(error).split(". ")[0]
    return "nothing failed"


# --- what works -------------------------------------------------------------------------------------------------------


class Encoder(BaseFeaturesExtractor):
    """Your layers: observations [N, ...] to features [N, features_dim]. It keeps nothing."""

    def __init__(self, observation_space):
        super().__init__(observation_space, features_dim=32)
        self.layers = nn.Sequential(nn.Linear(4, 32), nn.Tanh())

    def forward(self, obs):
        return self.layers(obs)


class MyPolicy(MlpLstmPolicy):
    """Encoder, LSTM, heads. Nothing in it is detached, reset or resized."""

    def __init__(self, *args, **kwargs):
        mine = {"features_extractor_class": Encoder, "lstm_hidden_size": 32, "net_arch": [32]}
        super().__init__(*args, **{**mine, **kwargs})


def main(argv: list[str] | None = None) -> dict[str, str | float]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20_000)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    result: dict[str, str | float] = {"as_written": failing(detach=False), "with_detach": failing(detach=True)}
    print(f"plain PPO, hidden state kept:     {result['as_written']}")
    print(f"plain PPO, hidden state detached: {result['with_detach']}")

    model = RecurrentPPO(MyPolicy, make_env(), n_steps=128, batch_size=128, seed=0, device="cpu")
    model.learn(args.steps)
    result["steps"] = model.num_timesteps
    result["mean_return"] = sum(e["r"] for e in model.ep_info_buffer) / len(model.ep_info_buffer)
    print(f"RecurrentPPO, {model.num_timesteps} steps: mean return {result['mean_return']:.0f}")
    return result


if __name__ == "__main__":
    main()
