"""Memory across episodes (RL^2): a bandit whose arms stay the same for a whole trial of many one-step episodes.

    python examples/meta_rl.py                        # about ten seconds

Every pull is one episode, so every observation is the first of an episode. The first pulls of a trial show what they
pay, the later ones do not. With reset="zero" the policy knows nothing about earlier pulls; with reset="never" its state
continues across episodes, and `policy.reset_memory()` starts a new trial. Training starts from the start
state of the trial, so it computes what the rollout computed.
"""

from __future__ import annotations

import argparse

import torch
from gymnasium import spaces

import holdfast as hf

TRIALS, PULLS, SHOWN = 128, 16, 4
GOOD, BAD = 0.9, 0.1  # how often the arms pay


def play_trial(policy: hf.ActorCritic) -> tuple[torch.Tensor, ...]:
    """One trial in each of TRIALS bandits: obs [T, B, 3] (last arm, what it paid), actions, rewards, resets."""
    policy.reset_memory()  # a new trial: fresh rows, whatever the reset mode
    good_arm = torch.randint(2, (TRIALS,))
    obs, first = torch.zeros(TRIALS, 3), torch.ones(TRIALS, dtype=torch.bool)
    rows = []
    for pull in range(PULLS):
        action = policy.act(obs, first).action
        reward = (torch.rand(TRIALS) < torch.where(action == good_arm, GOOD, BAD)).float()
        rows.append((obs, action, reward, first))
        shown = torch.cat([torch.nn.functional.one_hot(action, 2).float(), reward.unsqueeze(1)], 1)
        obs = shown if pull < SHOWN else torch.zeros(TRIALS, 3)
    return tuple(torch.stack(part) for part in zip(*rows))


def discounted(rewards: torch.Tensor, gamma: float = 0.7) -> torch.Tensor:
    """What each pull and those after it in its trial pay: credit crosses episodes, as memory does."""
    out, following = torch.zeros_like(rewards), torch.zeros_like(rewards[0])
    for t in reversed(range(len(rewards))):
        following = out[t] = rewards[t] + gamma * following
    return out


def train(reset: str, updates: int) -> float:
    """The mean reward per pull in the last tenth of the updates."""
    torch.manual_seed(0)
    policy = hf.ActorCritic(spaces.Box(0, 1, (3,)), spaces.Discrete(2), core="gru", hidden_size=32, reset=reset)
    optimizer = torch.optim.Adam(policy.parameters(), 1e-2)
    history = []
    for _ in range(updates):
        obs, actions, rewards, resets = play_trial(policy)
        to_go = discounted(rewards)
        ev = policy.evaluate(obs, actions, policy.initial_state(TRIALS), resets)
        with torch.no_grad():
            advantage = to_go - ev.value
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        loss = -(ev.log_prob * advantage).mean() + 0.5 * (ev.value - to_go).square().mean() - 0.01 * ev.entropy.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(float(rewards.mean()))
    return sum(history[-max(1, updates // 10) :]) / max(1, updates // 10)


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=250)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    result = {reset: train(reset, args.updates) for reset in ("zero", "never")}
    for reset, mean in result.items():
        print(f"reset={reset!r:8}: {mean:.2f} per pull (guessing 0.50, always right {GOOD})")
    return result


if __name__ == "__main__":
    main()
