"""Your own environment in JAX: four pure functions, vectorized and compiled for you, with torch policies on the same device.

    cd examples
    holdfast train --env jax_own_env:Recall --core gru --total-steps 200000
    holdfast train --env jax_own_env:Recall --env-args delay=20

`main` runs the first command from Python. Needs `pip install 'holdfast[jax]'` (on a GPU also 'jax[cuda13]').
"""

from __future__ import annotations

import argparse
import tempfile

import gymnasium as gym
import jax
import jax.numpy as jnp

import holdfast as hf


class Recall:
    """A sign shows left or right, `delay` steps pass without it, then one turn: +1 if it follows the sign, -1 if not."""

    def __init__(self, delay: int = 4) -> None:
        self.delay = delay

    def reset(self, key):
        sign = jax.random.choice(key, jnp.array([-1.0, 1.0]))
        return jnp.array([sign, 0.0]), {"sign": sign, "t": jnp.zeros((), jnp.int32)}  # observation, state

    def step(self, key, state, action):
        over = state["t"] == self.delay
        right = (action == 1) == (state["sign"] > 0)
        reward = jnp.where(over, jnp.where(right, 1.0, -1.0), 0.0)
        state = {**state, "t": state["t"] + 1}
        obs = jnp.array([0.0, 0.0]).at[1].set(state["t"] == self.delay)
        return obs, state, reward, over, False  # ..., terminated, truncated

    def observation_space(self):
        return gym.spaces.Box(-1.0, 1.0, (2,))

    def action_space(self):
        return gym.spaces.Discrete(2)


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40_000)
    flags = parser.parse_args(arguments)
    config = hf.TrainConfig(
        core="gru", hidden_size=32, num_envs=64, num_steps=32, gamma=0.95, learning_rate=3e-3, total_steps=flags.steps,
        device="cpu", run_dir=tempfile.mkdtemp() + "/recall",
    )  # fmt: skip
    return {"mean_return": hf.Trainer(config, env=Recall()).run().mean_return}


if __name__ == "__main__":
    print(main())
