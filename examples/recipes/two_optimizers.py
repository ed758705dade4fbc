"""Two optimizers: the actor learns by Adam, the critic by SGD, each with its own rate and its own clipping.

    python examples/recipes/two_optimizers.py

`actor_only()` shares the actor's weights, so its parameters are those of the actor, and all others are the critic's. With
`critic_core="separate"` the critic has its own memory. Each loss trains its own part: `backward(inputs=...)`.
"""

from __future__ import annotations

import argparse

import torch
from torch.nn.utils import clip_grad_norm_

import holdfast as hf


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    flags = parser.parse_args(arguments)
    torch.manual_seed(flags.seed)
    env = hf.envs.make("holdfast/RepeatFirstEasy-v0", num_envs=16)
    spaces = env.single_observation_space, env.single_action_space
    policy = hf.ActorCritic(*spaces, core="gru", hidden_size=64, critic_core="separate")
    actor = list(policy.actor_only().parameters())
    critic = [p for p in policy.parameters() if all(p is not q for q in actor)]
    actor_optimizer = torch.optim.Adam(actor, lr=3e-3)
    critic_optimizer = torch.optim.SGD(critic, lr=0.05, momentum=0.9)

    returns: list[float] = []
    errors: list[float] = []
    for _, segment in zip(range(flags.updates), hf.collect(env, policy, steps=64, gamma=0.9, seed=flags.seed)):
        returns += segment.episode_returns
        advantage = (segment.advantage - segment.advantage.mean()) / (segment.advantage.std() + 1e-8)
        for _ in range(8):
            new = policy.evaluate(segment.obs, segment.actions, segment.start_state, segment.resets)
            ratio = (new.log_prob - segment.log_prob).exp()
            clipped = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            actor_loss = -(clipped + 0.01 * new.entropy)[segment.valid].mean()
            critic_loss = (new.value - segment.returns)[segment.valid].square().mean()
            actor_optimizer.zero_grad()
            critic_optimizer.zero_grad()
            critic_loss.backward(inputs=critic, retain_graph=True)
            actor_loss.backward(inputs=actor)
            clip_grad_norm_(actor, 0.5)
            clip_grad_norm_(critic, 5.0)
            actor_optimizer.step()
            critic_optimizer.step()
            errors.append(critic_loss.item())
    result = {"first": sum(returns[:20]) / 20, "last": sum(returns[-20:]) / 20, "critic": errors[-1] / errors[0]}
    print(f"mean return {result['first']:.2f} at first, {result['last']:.2f} at last")
    return result


if __name__ == "__main__":
    main()
