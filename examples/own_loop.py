"""Recurrent PPO in one file, with only `hf.LSTM` and `hf.Memory` from Holdfast.

    python examples/own_loop.py                       # CartPole without velocities: about a minute on one core

Read it top to bottom. Comments (1) to (5) mark what is special about recurrence. The rest is standard PPO.
"""

from __future__ import annotations

import argparse

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

import holdfast as hf

GAMMA, LAMBDA, CLIP, EPOCHS, MINIBATCHES = 0.99, 0.95, 0.2, 4, 4


class OnlyPositions(gym.ObservationWrapper):
    """Cart and pole without their velocities: what moves must be remembered."""

    def __init__(self, env):
        super().__init__(env)
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def observation(self, obs):
        return obs[[0, 2]] * np.array([1.0, 10.0], np.float32)  # the pole moves within 0.2


class Agent(nn.Module):
    def __init__(self, obs_size: int, actions: int, hidden: int = 64):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(obs_size, hidden), nn.Tanh())
        self.core = hf.LSTM(hidden, hidden)
        self.actor, self.critic = nn.Linear(hidden, actions), nn.Linear(hidden, 1)
        nn.init.orthogonal_(self.actor.weight, 0.01)

    def forward(self, obs, state, resets):
        """obs [T, B, ...] or [B, ...]; (1) the core resets the state where an episode begins."""
        y, state = self.core(self.encoder(obs), state, resets)
        return Categorical(logits=self.actor(y)), self.critic(y).squeeze(-1), state


def advantages(rewards, values, next_values, dones):
    """next_values: 0 after a termination, V(final observation) after a truncation, V(next observation) elsewhere."""
    deltas = rewards + GAMMA * next_values - values
    out, following = torch.zeros_like(rewards), torch.zeros_like(rewards[0])
    for t in reversed(range(len(rewards))):
        following = out[t] = deltas[t] + GAMMA * LAMBDA * following * ~dones[t]
    return out


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--num-steps", type=int, default=128)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    T, B = args.num_steps, args.num_envs

    env = gym.vector.SyncVectorEnv(
        [lambda: OnlyPositions(gym.make("CartPole-v1"))] * B, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP
    )
    agent = Agent(2, 2)
    memory = hf.Memory(agent.core)  # (2) one row per environment; states are written without a graph
    memory.reserve(B)
    optimizer = torch.optim.Adam(agent.parameters(), 1e-3, eps=1e-5)

    obs = torch.as_tensor(env.reset(seed=args.seed)[0])
    resets = torch.ones(B, dtype=torch.bool)
    running, finished, gap = np.zeros(B), [], None
    for update in range(args.updates):
        start = memory.read()  # (3) the state this segment starts from, kept for training
        rows = []
        for _ in range(T):
            with torch.no_grad():
                dist, value, state = agent(obs, memory.read(), resets)
                action = dist.sample()
            memory.write(state)
            next_obs, reward, terminated, truncated, info = env.step(action.numpy())
            next_obs, done = torch.as_tensor(next_obs), torch.as_tensor(terminated | truncated)
            bonus = torch.zeros(B)
            if truncated.any():  # (4) the value of the last observation, with the state before the reset
                last = torch.as_tensor(
                    np.stack([o if o is not None else n for o, n in zip(info["final_obs"], next_obs)])
                )
                with torch.no_grad():
                    bonus = agent(last, memory.read(), None)[1] * torch.as_tensor(truncated)
            rows.append(
                (obs, action, dist.log_prob(action), value, resets, 0.1 * torch.as_tensor(reward).float(), done, bonus)
            )
            obs, resets = next_obs, done
            running += reward
            finished += running[done.numpy()].tolist()
            running[done.numpy()] = 0
        with torch.no_grad():
            last_value = agent(obs, memory.read(), resets)[1]
        obs_t, actions, log_probs, values, resets_t, rewards, dones, bonus = (torch.stack(part) for part in zip(*rows))
        next_values = torch.where(dones, bonus, torch.cat([values[1:], last_value.unsqueeze(0)]))
        adv = advantages(rewards, values, next_values, dones)
        returns = adv + values

        for _ in range(EPOCHS):
            for envs in torch.randperm(B).chunk(MINIBATCHES):
                # (5) whole sequences of some environments, from their start states
                part = {name: leaf[envs] for name, leaf in start.items()}
                dist, value, _ = agent(obs_t[:, envs], part, resets_t[:, envs])
                ratio = (dist.log_prob(actions[:, envs]) - log_probs[:, envs]).exp()
                if gap is None:  # before the first step of the optimizer the ratio is 1
                    gap = (ratio - 1).abs().max().item()
                a = adv[:, envs]
                a = (a - a.mean()) / (a.std() + 1e-8)
                policy_loss = -torch.min(ratio * a, ratio.clamp(1 - CLIP, 1 + CLIP) * a).mean()
                value_loss = (value - returns[:, envs]).square().mean()
                loss = policy_loss + 0.5 * value_loss - 0.01 * dist.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
        if update % 5 == 4 or update == args.updates - 1:
            print(f"steps {(update + 1) * T * B:6d}   mean return of 50 episodes {np.mean(finished[-50:]):6.1f}")
    return {"mean_return": float(np.mean(finished[-50:])), "first_ratio_gap": gap}


if __name__ == "__main__":
    main()
