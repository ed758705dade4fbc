"""Reset one environment's memory by hand, if the environment does not report that something new begins.

    python examples/manual_reset.py

A support desk: every line is an environment, and no episode ever ends. When another customer takes over a line,
`policy.reset_env_memory(line)` resets that row. All other lines continue unchanged.
"""

from __future__ import annotations

import torch
from gymnasium import spaces

import holdfast as hf

LINES, OBS = 4, 3


def main(argv: list[str] | None = None) -> dict[str, float]:
    torch.manual_seed(0)
    policy = hf.ActorCritic(spaces.Box(-1, 1, (OBS,)), spaces.Discrete(5), core="lstm", hidden_size=16)
    control = hf.Memory(policy.core)  # the same desk, where every customer stays
    for _ in range(10):
        obs = torch.randn(LINES, OBS)
        policy.act(obs)
        policy.act(obs, memory=control)

    policy.reset_env_memory(2)  # a new customer on line 2
    obs = torch.randn(LINES, OBS)
    after, before = policy.act(obs).value, policy.act(obs, memory=control).value
    newcomer = policy.act(obs[2:3], memory=hf.Memory(policy.core)).value

    others = [0, 1, 3]
    figures = {
        "others_changed": float((after[others] - before[others]).abs().max()),
        "line_2_changed": float((after[2] - before[2]).abs()),
        "line_2_from_a_newcomer": float((after[2] - newcomer[0]).abs()),
    }
    print(f"lines 0, 1 and 3 differ by {figures['others_changed']}, line 2 by {figures['line_2_changed']:.4f};")
    print(f"from a first-time caller, line 2 differs by {figures['line_2_from_a_newcomer']:.0e}")
    return figures


if __name__ == "__main__":
    main()
