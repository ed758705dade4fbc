"""A JAX trainer: a step for the rollout, a scan for training, and the flags and orders that they read."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch

from broken.base import first_line, size
from doctor.gallery.base import Exhibit
from doctor.subjects.jax_policies import Pair, initial_state, params
from holdfast.doctor.subjects import JAX


class StoresTheNewDone(Pair):
    """A stored step holds the last observation and the new done, so training resets one observation early."""

    def flags(self, dones):
        return jnp.concatenate([dones[1:], jnp.zeros_like(dones[:1])])


class OneDoneForTwoUses(StoresTheNewDone):
    """The new done is stored for the returns, and training resets on it, one observation early."""


class WaitsForAFirstStep(Pair):
    """Resets on a flag of first steps, which the auto-reset of the environments never sets."""

    def acting(self, state, done):
        return state

    training = acting


class ShufflesSteps(Pair):
    """Minibatches are shuffled over environments and steps, so a sequence is made of steps of many environments."""

    def unroll(self, params, state, obs, dones):
        order = jax.random.permutation(jax.random.key(1), dones.size)

        def mixed(x):
            return x.reshape(dones.size, *x.shape[2:])[order].reshape(x.shape)

        state, outputs = super().unroll(params, state, mixed(obs), mixed(dones))
        return state, outputs.reshape(dones.size, -1)[jnp.argsort(order)].reshape(outputs.shape)


def subject(kind):
    pair = kind()
    options = {"initial_state": initial_state, "observation_space": (size.obs,), "name": kind.__name__}
    return JAX(params(int(torch.randint(2**31, ()))), pair.unroll, pair.step, **options)


def repaired():
    return subject(Pair)


def exhibit(name, case, cause, thread, kind):
    return Exhibit(
        f"gallery-jax-{name}",
        case,
        first_line(kind),
        cause,
        lambda: subject(kind),
        repaired,
        thread=thread,
    )


EXHIBITS = [
    exhibit("jaxmarl-127", 26, "early-by-one", "https://github.com/bold-lab-ai/JaxMARL/pull/127", StoresTheNewDone),
    exhibit("jaxmarl-191", 26, "early-by-one", "https://github.com/FLAIROx/JaxMARL/pull/191", OneDoneForTwoUses),
    exhibit("mava-1006", 6, "never-resets", "https://github.com/instadeepai/Mava/issues/1006", WaitsForAFirstStep),
    exhibit("mava-846", 8, "wrong-environment", "https://github.com/instadeepai/Mava/pull/846", ShufflesSteps),
]
