"""Before and after: a functional actor-critic with factored heads, whose caller carries the hidden state.

    python examples/migrating/functional_hidden.py

`Before` has get_initial_hidden / detach_hidden / evaluate_actions, and its caller must detach, reset and store at the
right places. An action is a verb and an object; which objects are allowed depends on the verb. `After` states that
dependence once, as a mask [N, verbs, objects], and loads the same weights.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributions import Categorical

import holdfast as hf
from holdfast.policies.heads import MultiCategorical

OBS, VERBS, OBJECTS, HIDDEN, ENVS, STEPS = 6, 3, 5, 16, 4, 24


class Before(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(OBS, HIDDEN)
        self.gru = nn.GRU(HIDDEN, HIDDEN)
        self.verb, self.object = nn.Linear(HIDDEN, VERBS), nn.Linear(HIDDEN, OBJECTS)
        self.critic = nn.Linear(HIDDEN, 1)

    def get_initial_hidden(self, batch_size):
        return torch.zeros(1, batch_size, HIDDEN)

    def detach_hidden(self, hidden):
        return hidden.detach()

    def heads(self, y, allowed):
        verb = Categorical(logits=self.verb(y))
        chosen = verb.sample()
        rows = allowed[torch.arange(len(chosen)), chosen]
        return verb, chosen, Categorical(logits=self.object(y).masked_fill(~rows, -1e9))

    def act(self, obs, hidden, allowed):
        y, hidden = self.gru(torch.tanh(self.encoder(obs)).unsqueeze(0), hidden)
        verb, chosen, objects = self.heads(y[0], allowed)
        target = objects.sample()
        log_prob = verb.log_prob(chosen) + objects.log_prob(target)
        return torch.stack([chosen, target], -1), log_prob, self.critic(y[0]).squeeze(-1), hidden

    def evaluate_actions(self, obs, actions, hidden, allowed):
        y, _ = self.gru(torch.tanh(self.encoder(obs)), hidden)  # [T, B, H]; the caller must reset
        y, allowed = y.flatten(0, 1), allowed.flatten(0, 1)
        verb, _, objects = self.heads(y, allowed)  # masked by a newly sampled verb, not by the one taken
        verbs, targets = actions.flatten(0, 1).unbind(-1)
        return (verb.log_prob(verbs) + objects.log_prob(targets)).unflatten(0, obs.shape[:2])


class After(hf.RecurrentPolicy):
    def __init__(self):
        super().__init__(core=hf.GRU(HIDDEN, HIDDEN))
        self.encoder = nn.Linear(OBS, HIDDEN)
        self.verb, self.object = nn.Linear(HIDDEN, VERBS), nn.Linear(HIDDEN, OBJECTS)
        self.critic = nn.Linear(HIDDEN, 1)

    def encode(self, obs):
        return torch.tanh(self.encoder(obs))

    def decode(self, features, action_mask=None):
        logits = torch.cat([self.verb(features), self.object(features)], -1)
        masks = None if action_mask is None else [None, action_mask]  # [N, VERBS, OBJECTS]: row = the verb taken
        return MultiCategorical(logits, [VERBS, OBJECTS], masks), self.critic(features).squeeze(-1)


def weights_of(before: Before) -> dict[str, torch.Tensor]:
    """The old checkpoint under the new names: the GRU is called `core` now."""
    return {name.replace("gru.", "core."): w for name, w in before.state_dict().items()}


def main() -> dict[str, float]:
    torch.manual_seed(0)
    before, after = Before(), After()
    after.load_state_dict(weights_of(before))

    obs = torch.randn(STEPS, ENVS, OBS)
    resets = torch.rand(STEPS, ENVS) < 0.1
    resets[0] = True
    allowed = torch.rand(STEPS, ENVS, VERBS, OBJECTS) < 0.5
    allowed[..., 0] = True  # object 0 goes with every verb

    figures: dict[str, float] = {}
    with torch.no_grad():
        hidden, old = before.get_initial_hidden(ENVS), []
        for t in range(STEPS):
            hidden = hidden * (1.0 - resets[t].float()).view(1, -1, 1)
            action, log_prob, _, hidden = before.act(obs[t], hidden, allowed[t])
            hidden = before.detach_hidden(hidden)
            old.append((action, log_prob))
        actions, log_prob = (torch.stack(part) for part in zip(*old))
        again = before.evaluate_actions(obs, actions, before.get_initial_hidden(ENVS), allowed)
        figures["before_ratio_gap"] = float(((again - log_prob).exp() - 1).abs().max())

        start = after.initial_state(ENVS)
        new = [after.act(obs[t], resets[t], action_mask=allowed[t]) for t in range(STEPS)]
        actions = torch.stack([step.action for step in new])
        log_prob = torch.stack([step.log_prob for step in new])
        again = after.evaluate(obs, actions, start, resets, action_mask=allowed)
        figures["after_ratio_gap"] = float(((again.log_prob - log_prob).exp() - 1).abs().max())
        verbs, objects = actions.unbind(-1)
        taken = allowed.flatten(0, 1)[torch.arange(STEPS * ENVS), verbs.flatten(), objects.flatten()]
        figures["after_forbidden_actions"] = float((~taken).sum())
    gap = {name: figures[f"{name}_ratio_gap"] for name in ("before", "after")}
    print(f"PPO's ratio at epoch 0 is off by {gap['before']:.2f} before, {gap['after']:.0e} after")
    print(f"forbidden actions taken after: {figures['after_forbidden_actions']:.0f}")
    return figures


if __name__ == "__main__":
    main()
