"""Drivers for the TensorDict form: `TensorDictPolicy`, and a policy in the style that `LSTMWrapper` is for."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

import holdfast as hf
from conformance.driver import Acted, Driver, Evaluated
from holdfast.integrations.tensordict import LSTMWrapper, TensorDictPolicy


class HandWritten(LSTMWrapper):
    """Encode; manage; run self.lstm; store; decode."""

    def __init__(self, obs: int = 3, hidden: int = 7, actions: int = 5) -> None:
        super().__init__(None, None, input_size=6, hidden_size=hidden, num_layers=2)
        self.encoder, self.head = nn.Linear(obs, 6), nn.Linear(hidden, actions + 1)

    def forward(self, td, state=None, action=None, deterministic=True):
        B = td.batch_size[0]
        TT = td.batch_size[1] if td.batch_dims == 2 else 1
        hidden = torch.tanh(self.encoder(td["env_obs"])).view(B, TT, -1).transpose(0, 1)
        lstm_h, lstm_c, env_id = self._manage_lstm_state(td, B, TT, hidden.device)
        hidden, (new_h, new_c) = self.lstm(hidden, (lstm_h, lstm_c))
        self._store_lstm_state(new_h, new_c, env_id)
        out = self.head(hidden.transpose(0, 1).reshape(B * TT, -1))
        full, value = out[:, :-1].log_softmax(-1), out[:, -1]
        chosen = full.argmax(-1) if action is None else action.reshape(-1)
        log_prob = full.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
        if action is None:
            td["actions"], td["act_log_prob"], td["values"], td["full_log_probs"] = chosen, log_prob, value, full
        else:
            entropy = -(full.exp() * full).sum(-1)
            for name, part in {"act_log_prob": log_prob, "entropy": entropy, "value": value}.items():
                td[name] = part.view(B, TT)
        return td


class TensorDictDriver(Driver):
    """Drives anything whose `forward(td, state, action)` is the TensorDict form."""

    def __init__(self, policy: Any, reset: str = "zero", memory: hf.Memory | None = None) -> None:
        self.module = self.policy = policy
        self.memory, self.reset = policy.memory if memory is None else memory, reset

    def act(
        self, obs: Tensor, dones: Tensor | None = None, truncateds: Tensor | None = None, env_ids: Any = None
    ) -> Acted:
        entries = {"env_obs": obs, **_present(dones=dones, truncateds=truncateds)}
        if env_ids is not None:
            entries["training_env_ids"] = torch.as_tensor(env_ids)
        self.policy.set_memory(self.memory)
        lead = obs.dim() - len(self.obs_shape)
        if lead == 2:  # a whole sequence, which must be refused
            entries["env_obs"] = obs.transpose(0, 1)
        td = TensorDict(entries, batch_size=entries["env_obs"].shape[:lead])
        td = self.policy(td, deterministic=True).detach()
        signature = torch.stack([td["act_log_prob"], td["values"]], -1)
        return Acted(td["actions"], td["act_log_prob"], td["values"], signature)

    def evaluate(
        self, obs: Tensor, actions: Tensor, state: Any, dones: Tensor | None = None, truncateds: Tensor | None = None
    ) -> Evaluated:
        given = {"env_obs": obs, **_present(dones=dones, truncateds=truncateds)}
        td = TensorDict({k: v.transpose(0, 1) for k, v in given.items()}, batch_size=[obs.shape[1], obs.shape[0]])
        td = self.policy(td, state=state, action=actions.transpose(0, 1))
        return Evaluated(*(td[name].transpose(0, 1) for name in ("act_log_prob", "entropy", "value")))

    def agent(self) -> Driver:
        return TensorDictDriver(self.policy, self.reset, hf.Memory(self.memory.core))

    def reset_memory(self) -> None:
        self.policy.set_memory(self.memory)
        self.policy.reset_memory()

    def reset_env_memory(self, env_id: int) -> None:
        self.policy.set_memory(self.memory)
        self.policy.reset_env_memory(env_id)

    def get_memory(self) -> Any:
        self.policy.set_memory(self.memory)
        return self.policy.get_memory()

    def set_memory(self, saved: Any) -> None:
        self.policy.set_memory(self.memory)
        self.policy.set_memory(saved)


def _present(**flags: Tensor | None) -> dict[str, Tensor]:
    return {name: flag for name, flag in flags.items() if flag is not None}


def wrap(policy: hf.RecurrentPolicy, reset: str) -> Driver:
    return TensorDictDriver(TensorDictPolicy(policy), reset)
