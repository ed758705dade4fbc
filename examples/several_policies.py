"""Several policies on one vector environment: a league in which seats change hands at every episode.

    python examples/several_policies.py

Six environments step together; after each episode a seat goes to a random policy. A policy is called with `env_ids=`
for the seats it holds now, in any order and number, and every row of its memory stays with its seat. When a policy
gets a seat back, the episode flag resets the row, like any first observation.
"""

from __future__ import annotations

import argparse

import gymnasium as gym
import torch

import holdfast as hf

SEATS = 6


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    env = gym.make_vec(
        "CartPole-v1", SEATS, vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP},
    )  # fmt: skip
    spaces = env.single_observation_space, env.single_action_space
    league = [hf.ActorCritic(*spaces, core=core, hidden_size=16) for core in ("lstm", "gru", "lstm")]
    holder = torch.arange(SEATS) % len(league)

    obs, resets = torch.as_tensor(env.reset(seed=0)[0]), torch.ones(SEATS, dtype=torch.bool)
    episodes, changes = 0, 0
    # The episodes as they were played, per seat: to check afterwards that no policy used another's memory.
    current: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in range(SEATS)]
    worst = 0.0
    for _ in range(args.steps):
        actions, values = torch.zeros(SEATS, dtype=torch.long), torch.zeros(SEATS)
        for number, policy in enumerate(league):
            seats = (holder == number).nonzero().squeeze(1)
            if len(seats) == 0:
                continue
            step = policy.act(obs[seats], resets[seats], env_ids=seats)
            actions[seats], values[seats] = step.action, step.value
        for seat in range(SEATS):
            current[seat].append((obs[seat], values[seat]))
        new_obs, _, terminated, truncated, _ = env.step(actions.numpy())
        obs, resets = torch.as_tensor(new_obs), torch.as_tensor(terminated | truncated)
        for seat in resets.nonzero().squeeze(1).tolist():
            worst = max(worst, difference_alone(league[int(holder[seat])], current[seat]))
            current[seat] = []
            episodes += 1
            next_holder = int(torch.randint(len(league), ()))
            changes += next_holder != int(holder[seat])
            holder[seat] = next_holder
    print(f"{episodes} episodes, {changes} changes of seats; played alone, values differ by at most {worst:.0e}")
    return {"episodes": episodes, "changes": changes, "worst": worst}


def difference_alone(policy: hf.ActorCritic, episode: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """The largest difference between the values seen in the league and those of the same episode played alone."""
    alone = hf.Memory(policy.core)
    return max(float((policy.act(obs[None], memory=alone).value[0] - value).abs()) for obs, value in episode)


if __name__ == "__main__":
    main()
