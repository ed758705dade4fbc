"""Recurrent PPO in TorchRL, with `RecurrentModule` in place of `LSTMModule`.

    python examples/torchrl_ppo.py                    # CartPole without velocities: about a minute on one core

TorchRL's own parts do the rest: Collector, GAE, ClipPPOLoss. `auto_register_policy_transforms=True` gives the
environment `is_init` and the recurrent states; GAE and the loss switch to recurrent mode automatically.
"""

from __future__ import annotations

import argparse

import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.collectors import Collector
from torchrl.envs import GymEnv, RewardSum, SerialEnv, TransformedEnv
from torchrl.envs.transforms import ObservationNorm
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

import holdfast as hf
from holdfast.integrations.torchrl import RecurrentModule

ENVS, STEPS, EPOCHS, MINIBATCHES = 8, 128, 4, 4


def make_env():
    """CartPole whose velocities are multiplied by 0, and whose angle is by 10."""
    scale = torch.tensor([1.0, 0.0, 10.0, 0.0])
    env = TransformedEnv(GymEnv("CartPole-v1", categorical_action_encoding=True), RewardSum())
    return env.append_transform(ObservationNorm(loc=torch.zeros(4), scale=scale, in_keys=["observation"]))


def make_networks(hidden: int = 64):
    encoder = TensorDictModule(nn.Sequential(nn.Linear(4, hidden), nn.Tanh()), ["observation"], ["embedding"])
    memory = RecurrentModule(hf.LSTM(hidden, hidden), in_key="embedding", out_key="features")
    head = TensorDictModule(nn.Linear(hidden, 2), ["features"], ["logits"])
    actor = ProbabilisticActor(
        TensorDictSequential(encoder, memory, head),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    critic = TensorDictSequential(encoder, memory, ValueOperator(nn.Linear(hidden, 1), in_keys=["features"]))
    return actor, critic


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=50)
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    actor, critic = make_networks()
    frames = ENVS * STEPS
    collector = Collector(
        SerialEnv(ENVS, make_env), actor, frames_per_batch=frames, total_frames=frames * args.updates,
        auto_register_policy_transforms=True,
    )  # fmt: skip
    collector.set_seed(0)
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic, shifted=True)
    loss_module = ClipPPOLoss(
        actor, critic, clip_epsilon=0.2, entropy_coeff=0.01, critic_coeff=0.5, normalize_advantage=True
    )
    optimizer = torch.optim.Adam(loss_module.parameters(), 1e-3, eps=1e-5)

    mean, first_kl = 0.0, None
    for update, data in enumerate(collector):  # [ENVS, STEPS]
        data["next", "reward"] *= 0.1
        with torch.no_grad():
            advantage(data)
        for _ in range(EPOCHS):
            for rows in torch.randperm(ENVS).chunk(MINIBATCHES):
                losses = loss_module(data[rows])
                if first_kl is None:
                    first_kl = abs(float(losses["kl_approx"]))  # nothing has been updated yet
                optimizer.zero_grad()
                (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
                nn.utils.clip_grad_norm_(loss_module.parameters(), 0.5)
                optimizer.step()
        ended = data["next", "done"]
        if ended.any():
            mean = float(data["next", "episode_reward"][ended].mean())
        if update % 5 == 4 or update == args.updates - 1:
            print(f"frames {(update + 1) * frames:6d}   mean return {mean:6.1f}")
    collector.shutdown()
    return {"mean_return": mean, "first_kl": first_kl}


if __name__ == "__main__":
    main()
