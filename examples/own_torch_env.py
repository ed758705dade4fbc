"""A task of your own written in torch: checked, trained, and how fast it is.

cd examples
holdfast envs --check own_torch_env:Fetch
holdfast train --env own_torch_env:Fetch --core gru --total-steps 200000
python own_torch_env.py --num-envs 4096
"""

from __future__ import annotations

import argparse
import time

import gymnasium as gym
import numpy as np
import torch

import holdfast as hf
from holdfast.envs import TorchVectorEnv, Transition, check


class Fetch(TorchVectorEnv):
    """Something lies in one of `cells` cells; where is seen in the first step only. Go there (left, right) and grab it."""

    def __init__(self, num_envs, cells=5, device="cpu"):
        seen = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
        super().__init__(num_envs, seen, gym.spaces.Discrete(3), settings={"cells": cells}, device=device)
        self.cells = cells
        self.moves = torch.tensor([-1, 1, 0], device=self.device)  # left, right, grab

    def draw(self):  # [B, ...]: the random numbers of one step
        return torch.randint(self.cells, (self.num_envs,), generator=self.generator, device=self.device)

    def begin(self, draws):  # new episodes in all environments
        state = {"thing": draws, "at": torch.full_like(draws, self.cells // 2), "steps": torch.zeros_like(draws)}
        return state, self.see(state["at"], state["thing"])

    def transition(self, state, actions, draws):  # one step in all environments
        at = (state["at"] + self.moves[actions]).clamp(0, self.cells - 1)
        steps = state["steps"] + 1
        terminated = actions == 2
        truncated = (steps == 2 * self.cells) & ~terminated
        done = terminated | truncated
        rewards = torch.where(at == state["thing"], 1.0, -1.0) * terminated
        final_obs = self.see(at, None)
        new, first_obs = self.begin(draws)
        later = {"thing": state["thing"], "at": at, "steps": steps}
        return Transition(
            state={name: torch.where(done, new[name], later[name]) for name in later},
            obs=torch.where(done.unsqueeze(1), first_obs, final_obs),
            rewards=rewards,
            terminated=terminated,
            truncated=truncated,
            done=done,
            final_obs=final_obs,
        )

    def see(self, at, thing):  # [B, 2]
        middle = self.cells // 2
        shown = torch.zeros_like(at) if thing is None else thing - middle
        return torch.stack((at - middle, shown), 1) / middle


def steps_per_second(num_envs: int, device: str, seconds: float) -> float:
    """Of the environment alone, with the same actions in every step."""
    env = hf.envs.make(Fetch, num_envs, device=device, seed=0)
    actions = torch.as_tensor(env.action_space.sample(), device=device)
    began, steps = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        env.step(actions)
        steps += num_envs
    return steps / (time.perf_counter() - began)


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=2.0)
    flags = parser.parse_args(arguments)
    check(Fetch)
    alone = steps_per_second(flags.num_envs, "cpu", flags.seconds)
    config = hf.TrainConfig(
        core="gru", hidden_size=32, num_envs=flags.num_envs, num_steps=32, total_steps=flags.steps, gamma=0.95,
        learning_rate=3e-3, device="cpu", quiet=True, tensorboard=False,
    )  # fmt: skip
    trainer = hf.Trainer(config, env=Fetch)
    began = time.perf_counter()
    result = trainer.run()
    trained = result.steps / (time.perf_counter() - began)
    print(f"{alone:,.0f} steps per second alone, {trained:,.0f} in training; return {result.mean_return:.2f} of 1")
    return {"mean_return": result.mean_return, "alone": alone, "training": trained}


if __name__ == "__main__":
    main()
