"""sb3-contrib's recurrent policies on Holdfast cores: whole sequences in one call, any core, action masks.

Your own policy is a subclass, with its layers where Stable-Baselines3 expects them (a features extractor, `net_arch`):

    class MyPolicy(MlpLstmPolicy):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, features_extractor_class=MyEncoder, core="gru", **kwargs)

Nothing in it detaches, resets or resizes a state.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from sb3_contrib.common.recurrent.policies import (
    RecurrentActorCriticCnnPolicy,
    RecurrentActorCriticPolicy,
    RecurrentMultiInputActorCriticPolicy,
)
from sb3_contrib.common.recurrent.type_aliases import RNNStates
from stable_baselines3.common.distributions import Distribution
from torch import Tensor, nn

from holdfast.cores import LSTM, Core
from holdfast.cores.named import CORES
from holdfast.integrations.sb3 import state_pairs
from holdfast.integrations.sb3.masks import MaskedStates, MaskSource, masked_logits
from holdfast.state import leaves


class CorePolicy(RecurrentActorCriticPolicy):
    """sb3-contrib's recurrent actor-critic policy with `core`: "lstm", "gru", or any Holdfast core.

    A core object is copied for the actor and for the critic; its output size takes the place of `lstm_hidden_size`.
    `lstm_kwargs` are the core's (`bias`, `reset`, ...).
    """

    def __init__(
        self, *args: Any, core: str | Core = "lstm", lstm_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        core_kwargs = dict(lstm_kwargs or {})
        if core_kwargs.get("dropout"):
            raise ValueError(
                "lstm_kwargs has dropout, which makes training differ from the rollout it trains on; leave it out"
            )
        core_kwargs.pop("dropout", None)
        if isinstance(core, Core):
            kwargs["lstm_hidden_size"] = core.output_size
        elif core not in CORES:
            raise ValueError(f"unknown core {core!r}; one of {', '.join(map(repr, CORES))}, or a holdfast core")
        super().__init__(*args, **kwargs)
        self.core = (core,)  # in a tuple: the given object is a template, not a part of this module
        self.mask_source: MaskSource | None = None
        self._action_masks: Tensor | None = None
        self.lstm_kwargs = core_kwargs
        actor: Any = self.lstm_actor
        critic: Any = self.lstm_critic
        # These replace the nn.LSTMs, so that names and order in checkpoints and optimizers stay sb3-contrib's.
        self.lstm_actor: Core = self._core_like(actor)  # type: ignore[assignment]
        if critic is not None:
            self.lstm_critic: Core | None = self._core_like(critic)  # type: ignore[assignment]
        self.lstm_hidden_state_shape = tuple(state_pairs.initial(self.lstm_actor, 1)[0].shape)  # type: ignore[assignment]
        self.optimizer = self.optimizer_class(self.parameters(), **self._optimizer_arguments())

    def _optimizer_arguments(self) -> dict[str, Any]:
        arguments = {"lr": self.optimizer.param_groups[0]["lr"], **self.optimizer_kwargs}
        if self.optimizer_class is torch.optim.Adam and "foreach" not in arguments:
            arguments.setdefault("fused", True)  # the same update in one call
        return arguments

    def _core_like(self, lstm: nn.LSTM) -> Core:
        (core,) = self.core
        if isinstance(core, Core):
            made = copy.deepcopy(core)
            if made.input_size != lstm.input_size:
                raise ValueError(
                    f"the core takes {made.input_size} features, the features extractor gives {lstm.input_size}"
                )
        elif core == "lstm":
            with torch.random.fork_rng(devices=[]):  # weights and later random numbers stay sb3-contrib's
                made = LSTM(lstm.input_size, lstm.hidden_size, lstm.num_layers, **self.lstm_kwargs)
            made.load_state_dict({k: w for k, w in lstm.state_dict().items() if made.bias or "bias" not in k})
        else:
            made = CORES[core](lstm.input_size, lstm.hidden_size, lstm.num_layers, **self.lstm_kwargs)
        size = state_pairs.initial(made, 1)[0].shape
        for name, value in (("num_layers", size[0]), ("hidden_size", size[2])):  # sb3-contrib reads these of an LSTM
            if not hasattr(made, name):
                setattr(made, name, value)
        return made

    def resets_isolate(self) -> bool:
        """Whether nothing crosses a reset: every core has reset mode "zero" or "learned"."""
        parts = [m for m in self.modules() if isinstance(m, Core)]
        return all(getattr(part, "reset", "zero") in ("zero", "learned") for part in parts)

    @staticmethod
    def _process_sequence(features: Tensor, lstm_states: Any, episode_starts: Tensor, lstm: Any) -> Any:
        """Rows of `features` are [sequences * steps], sequence by sequence; one call of the core, resets inside."""
        n_seq = lstm_states[0].shape[1]
        x = features.reshape(n_seq, -1, lstm.input_size).transpose(0, 1)  # [T, n_seq, I]
        resets = episode_starts.reshape(n_seq, -1).t() != 0
        state = state_pairs.unpack(lstm, lstm_states)
        if x.shape[0] == 1:
            y, state = lstm(x[0], state, resets[0])
            return y, state_pairs.pack(lstm, state)
        y, state = lstm(x, state, resets)
        return y.transpose(0, 1).flatten(0, 1), state_pairs.pack(lstm, state)

    # --- action masks ------------------------------------------------------------------------------------------------

    @contextmanager
    def _masked_by(self, masks: Any) -> Iterator[None]:
        self._action_masks = None if masks is None else torch.as_tensor(masks, device=self.device)
        try:
            yield
        finally:
            self._action_masks = None

    def _get_action_dist_from_latent(self, latent_pi: Tensor) -> Distribution:
        if self._action_masks is None:
            return super()._get_action_dist_from_latent(latent_pi)
        logits = masked_logits(self.action_net(latent_pi), self._action_masks, self.action_space)
        return self.action_dist.proba_distribution(action_logits=logits)

    def forward(  # type: ignore[override]
        self,
        obs: Any,
        lstm_states: RNNStates,
        episode_starts: Tensor,
        deterministic: bool = False,
        action_masks: Any = None,
    ) -> tuple[Tensor, Tensor, Tensor, RNNStates]:
        """One step of every environment: action, value, log-probability, new states."""
        if action_masks is None and self.mask_source is not None:
            action_masks = self.mask_source.fetch()
        with self._masked_by(action_masks):
            return super().forward(obs, lstm_states, episode_starts, deterministic)

    def evaluate_actions(  # type: ignore[override]
        self, obs: Any, actions: Tensor, lstm_states: RNNStates, episode_starts: Tensor, action_masks: Any = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Values, log-probabilities, entropy of stored sequences."""
        if action_masks is None and isinstance(lstm_states, MaskedStates):
            action_masks = lstm_states.action_masks
        with self._masked_by(action_masks):
            return super().evaluate_actions(obs, actions, lstm_states, episode_starts)

    def predict(
        self,
        observation: Any,
        state: Any = None,
        episode_start: Any = None,
        deterministic: bool = False,
        action_masks: Any = None,
    ) -> tuple[np.ndarray, Any]:
        """As in sb3-contrib; `state=None` is the core's initial state. `action_masks`: bool, True = allowed."""
        batch = self._num_observations(observation)
        if state is None:
            state = tuple(part.cpu().numpy() for part in state_pairs.initial(self.lstm_actor, batch))
        state_pairs.check(self.lstm_actor, state, batch)
        if action_masks is not None:
            action_masks = torch.as_tensor(np.asarray(action_masks), device=self.device).reshape(batch, -1)
        with self._masked_by(action_masks):
            return super().predict(observation, state, episode_start, deterministic)

    def _num_observations(self, observation: Any) -> int:
        tensors, _ = self.obs_to_tensor(observation)
        return int(leaves(tensors)[0].shape[0])

    def _get_constructor_parameters(self) -> dict[str, Any]:
        ours = {
            "core": self.core[0],
            "lstm_hidden_size": self.lstm_output_dim,
            "n_lstm_layers": getattr(self.lstm_actor, "num_layers", 1),
            "shared_lstm": self.shared_lstm,
            "enable_critic_lstm": self.enable_critic_lstm,
            "lstm_kwargs": self.lstm_kwargs,
        }
        return {**super()._get_constructor_parameters(), **ours}


class MlpLstmPolicy(CorePolicy):
    """For vectors."""


class CnnLstmPolicy(CorePolicy, RecurrentActorCriticCnnPolicy):
    """For images."""


class MultiInputLstmPolicy(CorePolicy, RecurrentMultiInputActorCriticPolicy):
    """For Dict observations."""


_OURS: dict[type[RecurrentActorCriticPolicy], type[CorePolicy]] = {
    RecurrentActorCriticPolicy: MlpLstmPolicy,
    RecurrentActorCriticCnnPolicy: CnnLstmPolicy,
    RecurrentMultiInputActorCriticPolicy: MultiInputLstmPolicy,
}


def on_holdfast_cores(policy_class: Any) -> type[CorePolicy]:
    """The class itself if it is ours; otherwise sb3-contrib's class, or a subclass of it, moved onto Holdfast cores."""
    if issubclass(policy_class, CorePolicy):
        return policy_class
    if policy_class in _OURS:
        return _OURS[policy_class]
    if not issubclass(policy_class, RecurrentActorCriticPolicy):
        raise ValueError(
            f"{policy_class.__name__} is not a recurrent policy; subclass holdfast.integrations.sb3.MlpLstmPolicy "
            "(or use stable_baselines3.PPO for a policy without memory)"
        )
    return type(policy_class.__name__, (CorePolicy, policy_class), {"__module__": policy_class.__module__})
