"""A recurrent JAX policy as a pair of functions, and with mistakes."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from broken.base import size


def params(seed=0):
    """Of an LSTM and a head."""
    keys = jax.random.split(jax.random.key(seed), 2)
    return {
        "cell": jax.random.normal(keys[0], (size.obs + size.hidden, 4 * size.hidden)) * 0.3,
        "head": jax.random.normal(keys[1], (size.hidden, size.actions)) * 0.5,
    }


def initial_state(num_envs):
    return jnp.zeros((num_envs, size.hidden)), jnp.zeros((num_envs, size.hidden))


def cell(params, state, obs):
    """The next state: `(h, c)`, each `[B, H]`."""
    h, c = state
    i, f, g, o = jnp.split(jnp.concatenate([obs, h], axis=-1) @ params["cell"], 4, axis=-1)
    c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def clear(state, done):
    return jax.tree.map(lambda x: jnp.where(done[:, None], 0.0, x), state)


class Pair:
    """Right in everything. `reset(state, done)` comes before each step in both legs."""

    def acting(self, state, done):
        return clear(state, done)

    def training(self, state, done):
        return clear(state, done)

    def flags(self, dones):
        """`[T, B]` the flags that training reads."""
        return dones

    def step(self, params, state, obs, done):
        state = cell(params, self.acting(state, done), obs)
        return state, state[0] @ params["head"]

    def unroll(self, params, state, obs, dones):
        def body(state, x):
            obs, done = x
            state = cell(params, self.training(state, done), obs)
            return state, state[0] @ params["head"]

        return jax.lax.scan(body, state, (obs, self.flags(dones)))
