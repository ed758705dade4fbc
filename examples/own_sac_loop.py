"""Soft actor-critic in a loop of your own, on Pendulum without velocities: `hf.SequenceBuffer` and `hf.SoftActorCritic`, no trainer."""

import copy
import sys

import torch
from gymnasium import spaces

import holdfast as hf

STEPS, LENGTH, BATCH, GAMMA, ALPHA, TAU = 32, 64, 8, 0.99, 0.2, 0.005


def train(total_steps, env):
    """The returns of all episodes, and the loss of the critics in each gradient step."""
    space = spaces.Dict({"obs": env.single_observation_space, "prev_action": env.single_action_space})
    policy = hf.SoftActorCritic(space, env.single_action_space, core="gru", hidden_size=128)
    target, critics = copy.deepcopy(policy.critic_only()), list(policy.critic_only().parameters())
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-4)
    buffer = hf.SequenceBuffer(100_000, env.num_envs)
    returns, losses = [], []
    for segment in hf.collect(env, policy, STEPS, inputs=("obs", "prev_action"), records=("final_obs",), gamma=None):
        buffer.add(segment)
        returns += segment.episode_returns
        if buffer.steps * env.num_envs >= total_steps:
            return returns, losses
        for _ in range(STEPS * env.num_envs // 2 if buffer.ready(LENGTH) and buffer.steps >= 250 else 0):
            rows = buffer.sample(BATCH, LENGTH)  # [LENGTH + 1, BATCH]: the last row is a successor only
            now = rows.steps(0, LENGTH)
            features, _ = policy.features(rows.obs, rows.start_state, rows.resets)
            action, log_prob = policy.decode(features)[0].rsample()
            with torch.no_grad():
                after, _ = target.features(rows.obs, rows.start_state["critic"], rows.resets)
                soft = target.q(after[BATCH:], action[BATCH:]).amin(0) - ALPHA * log_prob[BATCH:]
                wanted = now.rewards + GAMMA * torch.where(now.terminated, 0.0, soft.view(LENGTH, BATCH))
            q = policy.q(features[:-BATCH], now.actions.flatten(0, 1)).view(2, LENGTH, BATCH)
            critic_loss = 0.5 * torch.where(now.valid, q - wanted, 0.0).square().sum() / now.valid.sum()
            best = policy.q(features[:-BATCH], action[:-BATCH]).amin(0)
            actor_loss = (ALPHA * log_prob[:-BATCH] - best)[now.valid.flatten()].mean()
            losses.append(critic_loss.item())
            optimizer.zero_grad()
            critic_loss.backward(inputs=critics, retain_graph=True)  # each loss trains its own part
            actor_loss.backward(inputs=policy.actor_parameters())
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            for slow, fast in zip(target.parameters(), critics):
                slow.data.lerp_(fast.data, TAU)


def main(arguments):
    torch.manual_seed(1)
    env = hf.envs.make("Pendulum-v1", 4, mask_velocity=True)
    returns, losses = train(int(arguments[0]) if arguments else 30_000, env)
    return {"mean_return": sum(returns[-10:]) / 10, "first_loss": losses[0], "last_loss": losses[-1]}


if __name__ == "__main__":
    print(main(sys.argv[1:]))
