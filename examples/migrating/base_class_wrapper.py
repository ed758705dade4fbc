"""Before and after: a policy on a base class that manages the LSTM state. One line changes: the base class.

    python examples/migrating/base_class_wrapper.py

`HandWrapper` is the kind of base class that projects copy from one another. `policy_on(base)` is a policy written
for it; with `LSTMWrapper` as its base the same code is correct, and an old checkpoint loads unchanged.
"""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import nn
from torch.distributions import Categorical

from holdfast.integrations.tensordict import LSTMWrapper

OBS, ACTIONS, HIDDEN, ENVS, STEPS = 6, 3, 16, 4, 10


class HandWrapper(nn.Module):
    def __init__(self, env, policy, input_size=128, hidden_size=128, num_layers=1):
        super().__init__()
        self.policy = policy
        self.lstm = nn.LSTM(input_size, hidden_size, num_layers)
        self.states = {}

    def _manage_lstm_state(self, td, B, TT, device):
        key = td["training_env_ids"].flatten()[0].item() if "training_env_ids" in td else 0
        zeros = torch.zeros(self.lstm.num_layers, B, self.lstm.hidden_size, device=device)
        h, c = self.states.get(key, (zeros, zeros))
        if "dones" in td:
            first = td["dones"].reshape(B, TT)[:, 0]  # the other TT - 1 steps are ignored
            keep = 1.0 - first.float().view(1, B, 1)
            h, c = h * keep, c * keep
        return h, c, key

    def _store_lstm_state(self, h, c, key):
        self.states[key] = (h.detach(), c.detach())


def policy_on(base: type[nn.Module]) -> nn.Module:
    class Policy(base):
        def __init__(self):
            super().__init__(None, None, input_size=HIDDEN, hidden_size=HIDDEN)
            self.encoder = nn.Linear(OBS, HIDDEN)
            self.actor, self.critic = nn.Linear(HIDDEN, ACTIONS), nn.Linear(HIDDEN, 1)

        def forward(self, td, state=None, action=None):
            B = td.batch_size[0]
            TT = td.batch_size[1] if td.batch_dims == 2 else 1
            hidden = torch.tanh(self.encoder(td["env_obs"])).view(B, TT, -1).transpose(0, 1)
            lstm_h, lstm_c, env_id = self._manage_lstm_state(td, B, TT, hidden.device)
            hidden, (new_h, new_c) = self.lstm(hidden, (lstm_h, lstm_c))
            self._store_lstm_state(new_h, new_c, env_id)
            hidden = hidden.transpose(0, 1).reshape(B * TT, -1)
            dist, value = Categorical(logits=self.actor(hidden)), self.critic(hidden).squeeze(-1)
            if action is None:
                action = dist.sample()
                td["actions"], td["act_log_prob"], td["values"] = action, dist.log_prob(action), value
            else:
                td["act_log_prob"] = dist.log_prob(action.flatten()).view(td.batch_size)
                td["entropy"], td["value"] = dist.entropy().view(td.batch_size), value.view(td.batch_size)
            return td

    return Policy()


def roll(policy, obs, dones):
    """STEPS steps of ENVS environments, as one batch [ENVS, STEPS]."""
    steps = []
    for t in range(STEPS):
        td = TensorDict(
            {"env_obs": obs[t], "dones": dones[t], "training_env_ids": torch.arange(ENVS)}, batch_size=[ENVS]
        )
        steps.append(policy(td))
    return torch.stack(steps, 1)


def main() -> dict[str, float]:
    torch.manual_seed(0)
    before, after = policy_on(HandWrapper), policy_on(LSTMWrapper)
    after.load_state_dict(before.state_dict())  # the old checkpoint, unchanged

    figures: dict[str, float] = {}
    obs, dones = torch.randn(2, STEPS, ENVS, OBS), torch.rand(2, STEPS, ENVS) < 0.2
    keys = ("env_obs", "dones", "training_env_ids")
    with torch.no_grad():
        for name, policy in {"before": before, "after": after}.items():
            roll(policy, obs[0], dones[0])
            now = TensorDict({"training_env_ids": torch.arange(ENVS)}, batch_size=[ENVS])
            start = policy.start_state(now) if name == "after" else None
            rollout = roll(policy, obs[1], dones[1])
            out = policy(rollout.select(*keys), state=start, action=rollout["actions"])
            figures[f"{name}_replay"] = float((out["act_log_prob"] - rollout["act_log_prob"]).abs().max())
    print(
        f"training repeats the rollout: log-probabilities differ by {figures['before_replay']:.3f} before, "
        f"{figures['after_replay']:.0e} after"
    )

    memory = after.get_memory()  # save it in the checkpoint, with the weights
    after.reset_memory()
    after.set_memory(memory)
    figures["rows_restored"] = float(after.memory.num_envs)
    return figures


if __name__ == "__main__":
    main()
