"""`RecurrentPPO`: sb3-contrib's algorithm on Holdfast's policies and buffers.

Beyond sb3-contrib: `policy_kwargs=dict(core="gru")`, action masks when the environments have `action_masks()`, and
memory in checkpoints: `RecurrentPPO.load(path, env=env, force_reset=False)` continues in the middle of episodes.
"""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces
from sb3_contrib import RecurrentPPO as ContribRecurrentPPO
from sb3_contrib.common.maskable.utils import is_masking_supported
from sb3_contrib.common.recurrent.type_aliases import RNNStates
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.vec_env import VecEnv

from holdfast.integrations.sb3 import state_pairs
from holdfast.integrations.sb3.buffers import DictSequenceRolloutBuffer, SequenceRolloutBuffer
from holdfast.integrations.sb3.masks import MaskSource, mask_size
from holdfast.integrations.sb3.policies import (
    CnnLstmPolicy,
    CorePolicy,
    MlpLstmPolicy,
    MultiInputLstmPolicy,
    on_holdfast_cores,
)

# Warn once after this many rollouts in which no episode ended.
_ROLLOUTS_WITHOUT_END = 100


class RecurrentPPO(ContribRecurrentPPO):
    """Drop-in for `sb3_contrib.RecurrentPPO`: constructor, callbacks, `learn`, `predict`, `save`, `load` are its own.

    From the same seed it trains on the same minibatches and makes the same updates, up to rounding.
    """

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {
        "MlpLstmPolicy": MlpLstmPolicy,
        "CnnLstmPolicy": CnnLstmPolicy,
        "MultiInputLstmPolicy": MultiInputLstmPolicy,
    }
    policy: CorePolicy

    def _setup_model(self) -> None:
        self.policy_class = on_holdfast_cores(self.policy_class)
        from_checkpoint = self._last_lstm_states
        super()._setup_model()
        actor, critic = self.policy.lstm_actor, self.policy.lstm_critic
        self._last_lstm_states = RNNStates(  # type: ignore[assignment]
            state_pairs.initial(actor, self.n_envs),
            state_pairs.initial(actor if critic is None else critic, self.n_envs),
        )
        self._take_over(from_checkpoint)
        buffer_class = (
            DictSequenceRolloutBuffer if isinstance(self.observation_space, spaces.Dict) else SequenceRolloutBuffer
        )
        self.rollout_buffer = buffer_class(
            self.n_steps,
            self.observation_space,
            self.action_space,
            (0, 0, 0, 0),  # sb3-contrib's arrays of states are not used
            device=self.device,
            gamma=self.gamma,
            gae_lambda=self.gae_lambda,
            n_envs=self.n_envs,
            isolated=self.policy.resets_isolate(),
        )
        self._rollouts_without_end = 0

    def _take_over(self, states: RNNStates | None) -> None:
        """Use the memory of a checkpoint if it has as many environments (a new `env` may have another number)."""
        fresh = self._last_lstm_states
        if states is None or fresh is None:
            return
        parts, expected = [*states.pi, *states.vf], [*fresh.pi, *fresh.vf]
        if [p.shape for p in parts] == [e.shape for e in expected]:
            device = self.device
            self._last_lstm_states = RNNStates(*(tuple(p.to(device) for p in pair) for pair in (states.pi, states.vf)))

    def collect_rollouts(self, env: VecEnv, callback: BaseCallback, rollout_buffer: Any, n_rollout_steps: int) -> bool:
        """sb3-contrib's rollout; masks are fetched before each action where the environments have them."""
        source = self._mask_source(env)
        self.policy.mask_source = rollout_buffer.mask_source = source
        try:
            keep_training = super().collect_rollouts(env, callback, rollout_buffer, n_rollout_steps)
        finally:
            self.policy.mask_source = rollout_buffer.mask_source = None
        self._notice_episodes_without_end(rollout_buffer.episode_starts)
        return keep_training

    def _mask_source(self, env: VecEnv) -> MaskSource | None:
        if not is_masking_supported(env):
            return None
        mask_size(self.action_space)  # refuses Box actions, with the reason
        return MaskSource(env)

    def _notice_episodes_without_end(self, episode_starts: np.ndarray) -> None:
        ended = bool(episode_starts[1:].any()) or bool(np.any(self._last_episode_starts))
        self._rollouts_without_end = 0 if ended else self._rollouts_without_end + 1
        if self._rollouts_without_end == _ROLLOUTS_WITHOUT_END:
            warnings.warn(
                f"no episode has ended in {_ROLLOUTS_WITHOUT_END * self.n_steps} steps of {self.n_envs} "
                f"environment{'s' * (self.n_envs != 1)}: "
                "memory is never reset and no return is ever logged. If episodes should end, check that the "
                "environment returns terminated or truncated, or wrap it in gymnasium.wrappers.TimeLimit",
                stacklevel=2,
            )

    def predict(
        self,
        observation: Any,
        state: Any = None,
        episode_start: Any = None,
        deterministic: bool = False,
        action_masks: Any = None,
    ) -> tuple[np.ndarray, Any]:
        """One step with the state in the caller's hands; `action_masks` as `env.action_masks()` gives them."""
        return self.policy.predict(observation, state, episode_start, deterministic, action_masks)

    def _excluded_save_params(self) -> list[str]:
        return [name for name in super()._excluded_save_params() if name != "_last_lstm_states"]
