"""Gradient accumulation: a step of the optimizer on more sequences than fit into memory at once.

    python examples/recipes/gradient_accumulation.py

Parts of a segment are whole sequences of some environments. Advantages are normalized over all of them first, and each part counts by
its number of real steps: then the sum of the gradients is that of the whole segment, to rounding.
"""

from __future__ import annotations

import argparse

import torch

import holdfast as hf

NUM_ENVS, PARTS = 16, 4


def accumulate(policy: hf.RecurrentPolicy, segment: hf.Segment) -> None:
    """The gradients of PPO's loss of a segment, in parts."""
    advantage = segment.advantage[segment.valid]
    segment = segment.changed(advantage=(segment.advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8))
    for columns in torch.randperm(segment.num_envs).chunk(PARTS):
        part = segment.select(columns)
        share = part.valid.sum() / segment.valid.sum()
        (share * hf.ppo_loss(policy, part, normalize_advantage=False)).backward()


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    flags = parser.parse_args(arguments)
    torch.manual_seed(flags.seed)
    env = hf.envs.make("holdfast/RepeatFirstEasy-v0", num_envs=NUM_ENVS)
    policy = hf.ActorCritic(env.single_observation_space, env.single_action_space, core="gru", hidden_size=64)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)

    returns: list[float] = []
    difference = 0.0
    for update, segment in zip(range(flags.updates), hf.collect(env, policy, steps=64, gamma=0.9, seed=flags.seed)):
        returns += segment.episode_returns
        for epoch in range(8):
            optimizer.zero_grad()
            accumulate(policy, segment)
            if update == epoch == 0:
                difference = distance_to_the_whole(policy, segment)
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimizer.step()
    result = {"first": sum(returns[:20]) / 20, "last": sum(returns[-20:]) / 20, "difference": difference}
    print(
        f"mean return {result['first']:.2f} at first, {result['last']:.2f} at last; gradients differ by {difference:.0e}"
    )
    return result


def distance_to_the_whole(policy: hf.RecurrentPolicy, segment: hf.Segment) -> float:
    """How far the gradients are from those of the whole segment at once, in units of the largest."""
    whole = torch.autograd.grad(hf.ppo_loss(policy, segment), list(policy.parameters()))
    apart = [(p.grad - g).abs().max() for p, g in zip(policy.parameters(), whole) if p.grad is not None]
    return float(max(apart) / max(g.abs().max() for g in whole))


if __name__ == "__main__":
    main()
