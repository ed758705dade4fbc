"""sb3-contrib's RecurrentPPO as shipped, and with one method of its policy broken."""

from __future__ import annotations

import functools

import torch

from broken.base import Broken, size
from holdfast.doctor.subjects import SB3


def env_of(observation_space, action_space):
    """The least of an environment: RecurrentPPO needs one to be built, the doctor never steps it."""
    import gymnasium
    import numpy as np

    class Nothing(gymnasium.Env):
        def __init__(self):
            self.observation_space, self.action_space = observation_space, action_space

        def reset(self, *, seed=None, options=None):
            return self.observation_space.sample(), {}

        def step(self, action):
            return self.observation_space.sample(), 0.0, bool(np.random.rand() < 0.1), False, {}

    return Nothing()


def shipped(observation_space=None, action_space=None, policy="MlpLstmPolicy", **policy_kwargs):
    import numpy as np
    from gymnasium import spaces
    from sb3_contrib import RecurrentPPO

    observation_space = observation_space or spaces.Box(-np.inf, np.inf, (size.obs,), np.float32)
    env = env_of(observation_space, action_space or spaces.Discrete(size.actions))
    kwargs = {"lstm_hidden_size": size.hidden, "net_arch": [size.hidden], **policy_kwargs}
    return RecurrentPPO(policy, env, n_steps=16, batch_size=16, policy_kwargs=kwargs, device="cpu")


def _with(**methods):
    """A model whose policy has some methods replaced."""

    def make():
        model = shipped()
        for name, function in methods.items():
            setattr(model.policy, name, functools.partial(function, getattr(model.policy, name)))
        return SB3(model)

    return make


def _no_flags(original, obs, actions, lstm_states, episode_starts):
    return original(obs, actions, lstm_states, torch.zeros_like(episode_starts))


def _from_zeros(original, obs, actions, lstm_states, episode_starts):
    zeros = type(lstm_states)(*(tuple(torch.zeros_like(x) for x in pair) for pair in lstm_states))
    return original(obs, actions, zeros, episode_starts)


def _stateless(original, observation, state=None, episode_start=None, deterministic=False):
    return original(observation, None, episode_start, deterministic)


def _healthy():
    return SB3(shipped())


def _broken(name, case, does, cause, **methods):
    return Broken(f"sb3-{name}", case, does, cause, _with(**methods), _healthy)


BROKEN = [
    _broken("flags", 1, "Training ignores the flags.", "reset-dropped-in-training", evaluate_actions=_no_flags),
    _broken("zeros", 1, "Training starts from an empty memory.", "starts-from-zeros", evaluate_actions=_from_zeros),
    _broken("predict", 27, "`predict` ignores the state.", "eval-memoryless", predict=_stateless),
]
