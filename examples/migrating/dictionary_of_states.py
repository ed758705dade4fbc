"""Before and after: a TensorDict policy with a dictionary of states, one per environment slice.

    python examples/migrating/dictionary_of_states.py

`Before` keys its states by the first id of a batch, which is right as long as every batch holds the same environments
in the same order. `After` is an ordinary `hf.RecurrentPolicy` in a `TensorDictPolicy`: a row per environment.
"""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import nn
from torch.distributions import Categorical

import holdfast as hf
from holdfast.integrations.tensordict import TensorDictPolicy

OBS, ACTIONS, HIDDEN = 6, 3, 16


class Before(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(OBS, HIDDEN)
        self.lstm = nn.LSTM(HIDDEN, HIDDEN)
        self.actor, self.critic = nn.Linear(HIDDEN, ACTIONS), nn.Linear(HIDDEN, 1)
        self.states = {}

    def forward(self, td, state=None, action=None):
        B = td.batch_size[0]
        TT = td.batch_size[1] if td.batch_dims == 2 else 1
        key = td["training_env_ids"].flatten()[0].item() if "training_env_ids" in td else 0
        zeros = torch.zeros(1, B, HIDDEN)
        h, c = self.states.get(key, (zeros, zeros))
        if "dones" in td and TT == 1:
            keep = 1.0 - td["dones"].float().view(1, -1, 1)  # a truncated episode never resets
            h, c = h * keep, c * keep
        x = torch.tanh(self.encoder(td["env_obs"])).view(B, TT, -1).transpose(0, 1)
        y, (h, c) = self.lstm(x, (h, c))
        self.states[key] = (h.detach(), c.detach())  # in training too: the next rollout starts from here
        y = y.transpose(0, 1).reshape(B * TT, -1)
        dist = Categorical(logits=self.actor(y))
        if action is None:
            action = dist.sample()
            td["actions"], td["act_log_prob"], td["values"] = action, dist.log_prob(action), self.critic(y).squeeze(-1)
        else:
            td["act_log_prob"] = dist.log_prob(action.flatten()).view(td.batch_size)
            td["value"] = self.critic(y).view(td.batch_size)
        return td


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


def step(obs, ids, truncateds=None):
    entries = {"env_obs": obs, "training_env_ids": ids, "dones": torch.zeros(len(ids), dtype=torch.bool)}
    if truncateds is not None:
        entries["truncateds"] = truncateds
    return TensorDict(entries, batch_size=[len(ids)])


def main() -> dict[str, float]:
    torch.manual_seed(0)
    before, policy = Before(), After()
    policy.load_state_dict(weights_of(before))
    after = TensorDictPolicy(policy)
    figures: dict[str, float] = {}
    obs = torch.randn(12, 4, OBS)

    # The same four environments, twice: always in order, and shuffled at every step.
    with torch.no_grad():
        for name, actor in {"before": before, "after": after}.items():
            values = {}
            for order in ("sorted", "shuffled"):
                before.states.clear()
                after.reset_memory()
                torch.manual_seed(1)
                trace = []
                for t in range(12):
                    ids = torch.arange(4) if order == "sorted" else torch.randperm(4)
                    trace.append(actor(step(obs[t, ids], ids))["values"][ids.argsort()])
                values[order] = torch.stack(trace)
            figures[f"{name}_mixed_up"] = float((values["sorted"] - values["shuffled"]).abs().max())
    print(
        f"shuffling the environments changes values by {figures['before_mixed_up']:.3f} before, "
        f"{figures['after_mixed_up']:.0e} after"
    )

    # A rollout in which episodes are truncated, then one pass of training over it.
    with torch.no_grad():
        for name, actor in {"before": before, "after": after}.items():
            before.states.clear()
            after.reset_memory()
            ids, steps = torch.arange(4), []
            start = after.start_state(step(obs[0], ids))
            for t in range(12):
                steps.append(actor(step(obs[t], ids, truncateds=torch.full((4,), t % 5 == 0))))
            rollout = torch.stack(steps, 1)  # [B, TT]
            batch = rollout.select("env_obs", "training_env_ids", "dones", "truncateds")
            kwargs = {"state": start} if name == "after" else {}
            out = actor(batch, action=rollout["actions"], **kwargs)
            figures[f"{name}_replay"] = float((out["act_log_prob"] - rollout["act_log_prob"]).abs().max())
    print(
        f"training repeats the rollout: log-probabilities differ by {figures['before_replay']:.3f} before, "
        f"{figures['after_replay']:.0e} after"
    )
    return figures


if __name__ == "__main__":
    main()
