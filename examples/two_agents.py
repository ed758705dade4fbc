"""Two agents, one set of weights, two memories: self-play without contamination.

    python examples/two_agents.py

Both players of rock-paper-scissors are the same policy. Each has its own `hf.Memory`, so that the player who moves
first does not affect the other's memory. Each sees only the opponent's moves. Training uses each player's own start state.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from gymnasium import spaces

import holdfast as hf

GAMES, MOVES = 8, 16


def main(argv: list[str] | None = None) -> dict[str, float]:
    torch.manual_seed(0)
    policy = hf.ActorCritic(spaces.Box(0, 1, (3,)), spaces.Discrete(3), core="gru", hidden_size=16)
    memories = {"red": hf.Memory(policy.core), "blue": hf.Memory(policy.core)}
    seen = {name: torch.zeros(GAMES, 3) for name in memories}  # the opponent's last move
    resets = torch.ones(GAMES, dtype=torch.bool)
    story: dict[str, list[tuple[torch.Tensor, ...]]] = {name: [] for name in memories}

    for _ in range(MOVES):
        moves = {}
        for name, memory in memories.items():
            step = policy.act(seen[name], resets, memory=memory)
            story[name].append((seen[name], step.action, step.log_prob, resets))
            moves[name] = step.action
        seen = {"red": F.one_hot(moves["blue"], 3).float(), "blue": F.one_hot(moves["red"], 3).float()}
        resets = torch.zeros(GAMES, dtype=torch.bool)

    gaps = {}
    for name, rows in story.items():
        obs, actions, log_prob, flags = (torch.stack(part) for part in zip(*rows))
        ev = policy.evaluate(obs, actions, policy.initial_state(GAMES), flags)
        gaps[name] = (ev.log_prob - log_prob).abs().max().item()
        print(f"{name}: training repeats the game within {gaps[name]:.0e}")
    return gaps


if __name__ == "__main__":
    main()
