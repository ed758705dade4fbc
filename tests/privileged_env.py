"""A task in which the critic can know more than the actor: rewards contain luck that only `privileged` shows.

The actor sees a cue in the first step of an episode and must repeat it in every step: +1 for that, and `luck`, drawn per
episode, whatever it does. Without `privileged` the luck is noise in every advantage. Several tests share this file.
"""

from __future__ import annotations

import numpy as np
import torch
from gymnasium import spaces

from holdfast.envs.base import TorchVectorEnv, Transition

LENGTH = 8


class LuckyRepeat(TorchVectorEnv):
    def __init__(self, num_envs: int, luck: float = 5.0, device: torch.device | str = "cpu") -> None:
        policy = spaces.Box(0.0, 1.0, (3,), np.float32)
        privileged = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        space = spaces.Dict({"policy": policy, "privileged": privileged})
        super().__init__(num_envs, space, spaces.Discrete(2), {"luck": luck}, device)
        self.luck = luck

    def draw(self):
        return torch.randn(self.num_envs, 2, generator=self.generator, device=self.device)

    def begin(self, draws):
        start = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        state = {"cue": (draws[:, 0] > 0).long(), "luck": draws[:, 1] * self.luck, "step": start}
        return state, self._seen(state)

    def transition(self, state, actions, draws):
        rewards = (actions == state["cue"]).float() + state["luck"]
        later = {**state, "step": state["step"] + 1}
        done = later["step"] >= LENGTH
        fresh, _ = self.begin(draws)
        following = {name: torch.where(done, fresh[name], leaf) for name, leaf in later.items()}
        never = torch.zeros_like(done)
        return Transition(following, self._seen(following), rewards, done, never, done, self._seen(later))

    def _seen(self, state):
        first = (state["step"] == 0).float()
        cue = torch.nn.functional.one_hot(state["cue"], 2) * first.unsqueeze(1)  # [B, 2]
        left = (LENGTH - state["step"]).float()
        return {
            "policy": torch.cat([cue, first.unsqueeze(1)], 1),
            "privileged": torch.stack([state["luck"], left], 1),
        }
