"""MultiarmedBandit: find the arm that pays most often, and pull it.

The rules are those of POPGym's environment of the same name. In each episode every arm has another chance of paying, uniform
in [0, 1). A pull that pays gives 1 / episode_length, another one -1 / episode_length. An episode has episode_length steps
and ends `truncated`.

An arm's chance is drawn when it is first pulled in an episode. That is the same game and needs two random numbers per step
instead of one per arm.
"""

from __future__ import annotations

import torch
from gymnasium.spaces import Discrete
from torch import Tensor

from holdfast.envs.base import State, TorchVectorEnv, Transition

UNKNOWN = -1.0


class MultiarmedBandit(TorchVectorEnv):
    """Observation: whether the last pull paid, 0 at the start. Action: the arm to pull."""

    inputs = ("obs", "prev_action")

    def __init__(
        self, num_envs: int, num_bandits: int = 10, episode_length: int = 200, device: torch.device | str = "cpu"
    ) -> None:
        if num_bandits < 1 or episode_length < 1:
            raise ValueError(
                f"num_bandits is {num_bandits} and episode_length is {episode_length}; expected at least 1 of both"
            )
        settings = {"num_bandits": num_bandits, "episode_length": episode_length}
        super().__init__(num_envs, Discrete(2), Discrete(num_bandits), settings, device)
        self._length = episode_length
        self._reward = torch.tensor(1 / episode_length, dtype=torch.float32, device=self.device)
        self._penalty = -self._reward

    def draw(self) -> Tensor:
        """[B, 2]: the chance of an arm that is new, and whether this pull pays."""
        return torch.rand(self.num_envs, 2, generator=self.generator, device=self.device)

    def begin(self, draws: Tensor) -> tuple[State, Tensor]:
        chances = torch.full((self.num_envs, self.settings["num_bandits"]), UNKNOWN, device=self.device)
        steps = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        return {"chances": chances, "steps": steps}, torch.zeros_like(steps)

    def transition(self, state: State, actions: Tensor, draws: Tensor) -> Transition:
        arm, chances = actions.unsqueeze(1), state["chances"]  # [B, 1], [B, arms]
        known = chances.gather(1, arm)
        chance = torch.where(known < 0, draws[:, :1], known)
        paid = (draws[:, 1:] < chance).squeeze(1)

        steps = state["steps"] + 1
        truncated = steps >= self._length
        return Transition(
            state={
                "chances": chances.scatter(1, arm, chance).masked_fill(truncated.unsqueeze(1), UNKNOWN),
                "steps": steps.masked_fill(truncated, 0),
            },
            obs=(paid > truncated).long(),  # 0 where an episode starts
            rewards=torch.where(paid, self._reward, self._penalty),
            terminated=torch.zeros_like(truncated),
            truncated=truncated,
            done=truncated,
            final_obs=paid.long(),
        )
