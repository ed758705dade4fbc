"""Self-play in a league: the opponents are the policy itself as it was earlier, each with a memory of its own.

    python examples/recipes/self_play.py

The game is Goofspiel with five cards: in each round a prize is shown, both players bid a card at once, the higher card wins the
prize, and the cards are gone. A player sees the other's last bid and has to remember the rest. The environment plays the opponent
of every row: a member of the league, drawn for each game. `policy.act(..., env_ids=rows)` keeps a memory per row, so any number of
policies share the rows. A callback adds the policy to the league as it is now.
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from torch import Tensor

import holdfast as hf

CARDS = 5


class Goofspiel(gym.vector.VectorEnv):
    """Observation: the prize, the other's last bid and the own cards, one-hot. 1 for a win, -1 for a loss, at the end of the game."""

    def __init__(self, num_envs: int, league: list[hf.RecurrentPolicy]) -> None:
        self.num_envs, self.league = num_envs, league
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_observation_space = gym.spaces.Box(0.0, 1.0, (3 * CARDS,), np.float32)
        self.single_action_space = gym.spaces.Discrete(CARDS)
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Tensor, dict[str, Any]]:
        self.random = torch.Generator().manual_seed(0 if seed is None else seed)
        self.prizes = torch.zeros(self.num_envs, CARDS, dtype=torch.long)
        self.cards = torch.ones(2, self.num_envs, CARDS)  # of both players: those that are left
        self.bids = torch.zeros(2, self.num_envs, CARDS)  # the last ones, one-hot; none in the first round
        self.lead, self.opponent = torch.zeros(self.num_envs), torch.zeros(self.num_envs, dtype=torch.long)
        self._deal()
        return self._seen(0), {"action_mask": self.cards[0].bool()}

    def _deal(self) -> None:
        """All games take CARDS rounds, so they begin and end together."""
        self.round = 0
        self.prizes = torch.rand(self.num_envs, CARDS, generator=self.random).argsort(1)
        self.cards[:], self.bids[:], self.lead[:] = 1, 0, 0
        self.opponent = torch.randint(len(self.league), (self.num_envs,), generator=self.random)

    def _seen(self, player: int) -> Tensor:
        prize = torch.nn.functional.one_hot(self.prizes[:, self.round], CARDS)
        return torch.cat([prize, self.bids[1 - player], self.cards[player]], 1)

    def _answers(self) -> Tensor:
        """What the opponents bid: each member of the league for the rows that it holds."""
        actions, first = torch.zeros(self.num_envs, dtype=torch.long), torch.full((self.num_envs,), self.round == 0)
        for number, policy in enumerate(self.league):
            rows = (self.opponent == number).nonzero().squeeze(1)
            if len(rows):
                mask = self.cards[1, rows].bool()
                actions[rows] = policy.act(self._seen(1)[rows], first[rows], env_ids=rows, action_mask=mask).action
        return actions

    def step(self, actions: Any) -> tuple[Any, ...]:
        bids = torch.stack([torch.as_tensor(actions), self._answers()])
        self.bids = torch.nn.functional.one_hot(bids, CARDS).float()
        self.cards = self.cards - self.bids
        self.lead += (self.prizes[:, self.round] + 1) * (bids[0] - bids[1]).sign()
        over = torch.full((self.num_envs,), self.round == CARDS - 1)
        rewards = torch.where(over, self.lead.sign(), 0.0)
        self.round += 1
        if self.round == CARDS:
            self._deal()
        return self._seen(0), rewards, over, torch.zeros_like(over), {"action_mask": self.cards[0].bool()}


class Snapshots(hf.Callback):
    """Adds the policy to the league after every `every` updates; the oldest leaves when there are more than `most`."""

    def __init__(self, league: list[hf.RecurrentPolicy], every: int = 10, most: int = 8) -> None:
        self.league, self.every, self.most = league, every, most

    def on_update_end(self, trainer: hf.Trainer, row: dict[str, float]) -> None:
        if trainer.update % self.every == 0:
            self.league.append(copy.deepcopy(trainer.policy))
            del self.league[: -self.most]


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150_000)
    parser.add_argument("--seed", type=int, default=1)
    flags = parser.parse_args(arguments)
    # num_steps is a whole number of games: the league changes between games.
    config = hf.PPOConfig(
        core="gru", hidden_size=64, num_envs=64, num_steps=20, epochs=4, minibatches=8, learning_rate=1e-3, gamma=1.0, seed=flags.seed,
        total_steps=flags.steps, quiet=True, tensorboard=False, checkpoint_every=0, threads=1, final_eval_episodes=1000,
    )  # fmt: skip
    league: list[hf.RecurrentPolicy] = []
    beginners: list[hf.RecurrentPolicy] = []
    trainer = hf.Trainer(
        config, Goofspiel(64, league), callbacks=[Snapshots(league)], eval_env=Goofspiel(64, beginners)
    )
    for members in (league, beginners):
        members.append(copy.deepcopy(trainer.policy))
    before = trainer.evaluate(1000).mean_return
    result = {"before": before, "after": trainer.run().mean_return, "league": len(league)}
    print(
        f"against the untrained policy: {before:.2f} before, {result['after']:.2f} after ({len(league)} in the league)"
    )
    return result


if __name__ == "__main__":
    main()
