"""rsl_rl's runner with Holdfast's memory and update: an Isaac-Lab-style script, on a robot that fits into one file.

    pip install 'holdfast[rsl_rl]'
    python examples/rsl_rl_robot.py                       # with Holdfast's classes; --stock uses rsl_rl's own

Three strings of `train_cfg` differ from a script for rsl_rl alone. The robot is a synthetic arm on any device. It sees
the target of its joints only once, at the start of an episode, and it does not sense their velocities. So it needs memory.
The critic sees the target and the velocities (`obs_groups`).
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from rsl_rl.env import VecEnv
from rsl_rl.runners import OnPolicyRunner
from tensordict import TensorDict
from torch import Tensor

OURS = "holdfast.integrations.rsl_rl:"


class Arm(VecEnv):
    """`joints` joints with inertia; the target is shown in the first two steps. Episodes last 40 steps."""

    def __init__(
        self, num_envs: int, joints: int = 3, device: str = "cpu", seed: int = 0, final_obs: bool = True
    ) -> None:
        self.num_envs, self.num_actions, self.device, self.joints = num_envs, joints, device, joints
        self.max_episode_length, self.cfg, self.give_final_obs = 40, {"joints": joints}, final_obs
        self.generator = torch.Generator(device=device).manual_seed(seed)
        self.episode_length_buf = torch.zeros(num_envs, dtype=torch.long, device=device)
        self.position, self.velocity = (torch.zeros(num_envs, joints, device=device) for _ in range(2))
        self.target = self._random()

    def _random(self) -> Tensor:
        return torch.rand(self.num_envs, self.joints, device=self.device, generator=self.generator) * 2 - 1

    def get_observations(self) -> TensorDict:
        shown = (self.episode_length_buf < 2).float().unsqueeze(1)  # [B, 1]
        policy = torch.cat([self.position, self.target * shown, shown], dim=1)
        privileged = torch.cat([self.velocity, self.target], dim=1)
        return TensorDict({"policy": policy, "privileged": privileged}, batch_size=[self.num_envs])

    def step(self, actions: Tensor) -> tuple[TensorDict, Tensor, Tensor, dict[str, Any]]:
        self.velocity = 0.8 * self.velocity + 0.2 * actions.clamp(-1, 1)
        self.position = self.position + 0.3 * self.velocity
        self.episode_length_buf = self.episode_length_buf + 1
        rewards = torch.exp(-4 * (self.position - self.target).square().mean(1))
        fallen = (self.position.abs() > 2).any(1)
        time_outs = (self.episode_length_buf >= self.max_episode_length) & ~fallen
        done = fallen | time_outs
        extras: dict[str, Any] = {"time_outs": time_outs}
        if self.give_final_obs:  # the last observation of episodes that end here, for the value after a timeout
            extras["final_obs"] = self.get_observations()
        row = done.unsqueeze(1)
        self.target = torch.where(row, self._random(), self.target)
        self.position, self.velocity = self.position.masked_fill(row, 0.0), self.velocity.masked_fill(row, 0.0)
        self.episode_length_buf = self.episode_length_buf.masked_fill(done, 0)
        return self.get_observations(), rewards, done, extras


def train_cfg(ours: bool = True, rnn_type: str = "lstm", units: int = 64) -> dict[str, Any]:
    """What a robot's training config looks like; only the class names say whose code runs."""
    where = OURS if ours else ""
    network = {"hidden_dims": [64], "activation": "elu", "obs_normalization": True, "rnn_type": rnn_type,
               "rnn_hidden_dim": units, "rnn_num_layers": 1}  # fmt: skip
    gaussian = {"class_name": "GaussianDistribution", "init_std": 1.0}
    return {
        "num_steps_per_env": 24,
        "save_interval": 1000,
        "obs_groups": {"actor": ["policy"], "critic": ["policy", "privileged"]},
        "actor": {"class_name": where + "RNNModel", **network, "distribution_cfg": gaussian},
        "critic": {"class_name": where + "RNNModel", **network},
        "algorithm": {
            "class_name": where + "PPO", "num_learning_epochs": 4, "num_mini_batches": 4, "learning_rate": 1e-3,
            "schedule": "adaptive", "desired_kl": 0.01, "gamma": 0.98, "lam": 0.95, "entropy_coef": 0.002,
            "clip_param": 0.2, "value_loss_coef": 1.0, "use_clipped_value_loss": True, "max_grad_norm": 1.0,
        },
    }  # fmt: skip


def mean_reward(policy: Any, env: Arm, steps: int = 200) -> float:
    """Per step, with the most likely actions: how a play script uses a policy."""
    total = 0.0
    obs = env.get_observations()
    policy.reset()
    with torch.inference_mode():
        for _ in range(steps):
            obs, rewards, dones, _ = env.step(policy(obs))
            policy.reset(dones)
            total += float(rewards.mean())
    return total / steps


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stock", action="store_true", help="rsl_rl's own classes")
    parser.add_argument("--rnn-type", default="lstm", help="lstm, gru, or with our classes any core, e.g. lru")
    parser.add_argument("--iterations", type=int, default=150)
    parser.add_argument("--num-envs", type=int, default=256)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-dir", help="where rsl_rl writes checkpoints and TensorBoard events")
    flags = parser.parse_args(argv)
    torch.manual_seed(flags.seed)
    env = Arm(flags.num_envs, device=flags.device, seed=flags.seed)
    runner = OnPolicyRunner(env, train_cfg(not flags.stock, flags.rnn_type), log_dir=flags.log_dir, device=flags.device)
    runner.learn(flags.iterations)
    result = mean_reward(runner.get_inference_policy(), Arm(100, device=flags.device, seed=1000 + flags.seed))
    print(f"mean reward per step after {flags.iterations} iterations: {result:.3f}")
    return {"mean_reward": result}


if __name__ == "__main__":
    main()
