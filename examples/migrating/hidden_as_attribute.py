"""Before and after: a policy that keeps `self.lstm_hidden`, detaches it and resets it by hand.

    python examples/migrating/hidden_as_attribute.py

`Before` is how such policies are usually written. It detaches, so it runs, but it is wrong in four ways that its
rewards do not show. `After` has the same layers and loads its weights. Each printed line checks one of the four bugs.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributions import Categorical

import holdfast as hf

OBS, ACTIONS, HIDDEN, ENVS, STEPS = 6, 3, 16, 8, 32


class Before(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(OBS, HIDDEN)
        self.lstm = nn.LSTM(HIDDEN, HIDDEN)
        self.actor, self.critic = nn.Linear(HIDDEN, ACTIONS), nn.Linear(HIDDEN, 1)
        self.lstm_hidden = None

    def act(self, obs, done):
        if self.lstm_hidden is None:
            zeros = torch.zeros(1, obs.shape[0], HIDDEN)
            self.lstm_hidden = (zeros, zeros)
        keep = (1.0 - done.float()).view(1, -1, 1)
        hidden = tuple(h * keep for h in self.lstm_hidden)
        y, hidden = self.lstm(torch.tanh(self.encoder(obs)).unsqueeze(0), hidden)
        self.lstm_hidden = tuple(h.detach() for h in hidden)
        dist = Categorical(logits=self.actor(y[0]))
        action = dist.sample()
        return action, dist.log_prob(action)

    def evaluate(self, obs, actions):
        y, _ = self.lstm(torch.tanh(self.encoder(obs)))  # starts from zeros, and never resets
        return Categorical(logits=self.actor(y)).log_prob(actions)


class After(hf.RecurrentPolicy):
    def __init__(self):
        super().__init__(core=hf.LSTM(HIDDEN, HIDDEN))
        self.encoder = nn.Linear(OBS, HIDDEN)
        self.actor, self.critic = nn.Linear(HIDDEN, ACTIONS), nn.Linear(HIDDEN, 1)

    def encode(self, obs):
        return torch.tanh(self.encoder(obs))

    def decode(self, features):
        return Categorical(logits=self.actor(features)), self.critic(features).squeeze(-1)


def weights_of(before: Before) -> dict[str, torch.Tensor]:
    """The old checkpoint under the new names: the LSTM is called `core` now."""
    return {name.replace("lstm.", "core."): w for name, w in before.state_dict().items()}


def main() -> dict[str, float]:
    torch.manual_seed(0)
    before, after = Before(), After()
    after.load_state_dict(weights_of(before))

    obs = torch.randn(2 * STEPS, ENVS, OBS)
    resets = torch.rand(2 * STEPS, ENVS) < 0.1
    resets[0] = True

    # Two segments; the second starts in the middle of episodes.
    gaps: dict[str, float] = {}
    with torch.no_grad():
        old, new = [], []
        for t in range(2 * STEPS):
            old.append(before.act(obs[t], resets[t]))
            if t == STEPS:
                start = after.memory.read()
            new.append(after.act(obs[t], resets[t]))
        segment = slice(STEPS, 2 * STEPS)
        actions, log_prob = (torch.stack(part)[segment] for part in zip(*old))
        gaps["before_replay"] = float((before.evaluate(obs[segment], actions) - log_prob).abs().max())
        actions = torch.stack([step.action for step in new])[segment]
        log_prob = torch.stack([step.log_prob for step in new])[segment]
        again = after.evaluate(obs[segment], actions, start, resets[segment])
        gaps["after_replay"] = float((again.log_prob - log_prob).abs().max())
    print(
        f"training repeats the rollout: log-probabilities differ by {gaps['before_replay']:.3f} before, "
        f"{gaps['after_replay']:.0e} after"
    )

    # Three environments to evaluate on, while eight are being trained.
    try:
        before.act(obs[0, :3], resets[0, :3])
        gaps["before_other_batch"] = 0.0
    except RuntimeError as error:
        gaps["before_other_batch"] = 1.0
        print(f"evaluating on 3 environments, before: {error}")
    evaluation = hf.Memory(after.core)
    after.act(obs[0, :3], resets[0, :3], memory=evaluation)
    after.act(obs[0], resets[0])
    print(f"evaluating on 3 environments, after: {evaluation.num_envs} rows there, {after.memory.num_envs} here")

    # The state of environment 0 has become NaN, and then its episode ends.
    first, done = torch.arange(ENVS) == 0, torch.ones(ENVS, dtype=torch.bool)
    with torch.no_grad():
        before.lstm_hidden = tuple(h.masked_fill(first.view(1, -1, 1), torch.nan) for h in before.lstm_hidden)
        kept = before.lstm_hidden[0] * (1.0 - done.float()).view(1, -1, 1)
        gaps["before_nan_survives"] = float(kept.isnan().any())
        poisoned = {name: s.masked_fill(first.view(-1, 1, 1), torch.nan) for name, s in after.memory.read().items()}
        after.memory.write(poisoned)
        gaps["after_nan_survives"] = float(after.act(obs[1], done).value.isnan().any())
    survives = {name: bool(gaps[f"{name}_nan_survives"]) for name in ("before", "after")}
    print(f"a NaN survives its episode: {survives}")
    return gaps


if __name__ == "__main__":
    main()
