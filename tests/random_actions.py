"""Random actions for environments whose actions are numbers, several numbers or floats."""

from __future__ import annotations

import torch
from gymnasium import spaces


def random_actions(env, steps, seed=0):
    """[steps, B, ...] uniform over the action space."""
    generator = torch.Generator().manual_seed(seed)
    space = env.single_action_space
    if isinstance(space, spaces.Box):
        low, high = torch.as_tensor(space.low), torch.as_tensor(space.high)
        return low + (high - low) * torch.rand(steps, env.num_envs, *space.shape, generator=generator)
    sizes = [int(space.n)] if isinstance(space, spaces.Discrete) else space.nvec.tolist()
    columns = [torch.randint(size, (steps, env.num_envs), generator=generator) for size in sizes]
    return columns[0] if isinstance(space, spaces.Discrete) else torch.stack(columns, -1)
