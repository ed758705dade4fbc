"""`RNNModel`: rsl_rl's, on Holdfast's cores. An actor or a critic: observation groups -> core -> MLP -> distribution.

The constructor takes what rsl_rl's `RNNModel` takes, and `rnn_type` may name any core. Weights have the same names, so
checkpoints of an LSTM or a GRU load in both directions. It also runs under rsl_rl's own `PPO`.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from rsl_rl.models import MLPModel
from rsl_rl.utils import unpad_trajectories
from torch import Tensor, nn

from holdfast.cores import LSTM, Core
from holdfast.cores.named import make_core
from holdfast.integrations.rsl_rl import exports
from holdfast.integrations.rsl_rl.recurrence import Recurrence
from holdfast.state import State


class RNNModel(MLPModel):
    """rnn_type: "lstm", "gru", "mingru", "lru", "ffm", "mlstm", "window", or your own, "my_module:MyCore".

    rnn_reset: what a new episode starts from ("zero", "learned", "detach", "never"). rnn_memory_span: the length of a
    window, for "window".
    """

    is_recurrent: bool = True

    def __init__(
        self,
        obs: Any,
        obs_groups: dict[str, list[str]],
        obs_set: str,
        output_dim: int,
        hidden_dims: tuple[int, ...] | list[int] = (256, 256, 256),
        activation: str = "elu",
        obs_normalization: bool = False,
        distribution_cfg: dict[str, Any] | None = None,
        rnn_type: str = "lstm",
        rnn_hidden_dim: int = 256,
        rnn_num_layers: int = 1,
        rnn_reset: str = "zero",
        rnn_memory_span: int | None = None,
    ) -> None:
        kind = rnn_type if ":" in rnn_type else rnn_type.lower()
        self._core_settings = (kind, rnn_hidden_dim, rnn_num_layers, rnn_reset, rnn_memory_span)
        settings = (hidden_dims, activation, obs_normalization)
        # Some versions of rsl_rl take entries out of what they are given.
        distribution = copy.deepcopy(distribution_cfg)
        super().__init__(obs, obs_groups, obs_set, output_dim, *settings, distribution_cfg)
        self.export_settings = (*settings, distribution)
        self.rnn = Recurrence(self._make_core(), rnn_reset)

    def _make_core(self) -> Core:
        kind, hidden_size, num_layers, reset, span = self._core_settings
        if kind == "lstm":  # starts as rsl_rl's does, from the same random numbers; `make_core` opens the forget gates
            return LSTM(self.obs_dim, hidden_size, num_layers, reset=reset)
        return make_core(kind, self.obs_dim, hidden_size, num_layers, reset, span)

    def _get_latent_dim(self) -> int:
        with torch.device("meta"):  # draws no random numbers: weights are made in rsl_rl's order
            return self._make_core().output_size

    # --- rsl_rl's interface -------------------------------------------------------------------------------------------

    def get_latent(self, obs: Any, masks: Tensor | None = None, hidden_state: Any = None) -> Tensor:
        """One step of all environments [B, ...]; with `masks`, padded trajectories [T, N, ...] from `hidden_state`."""
        x = super().get_latent(obs)
        if masks is None:
            return self.rnn.step(x)
        if hidden_state is None:
            raise ValueError("got trajectories without their initial hidden states; pass hidden_state=")
        y, _ = self.rnn.rnn(x, self.rnn.from_rsl_rl(hidden_state))
        return unpad_trajectories(y, masks)

    def reset(self, dones: Tensor | None = None, hidden_state: Any = None) -> None:
        """The next step of environments that are done begins an episode; without `dones`, all start from `hidden_state`."""
        if dones is None:
            self.rnn.load_hidden_state(hidden_state)
        elif hidden_state is not None:
            raise NotImplementedError(
                "a hidden state for some environments only is not supported; call reset(hidden_state=...) with all rows"
            )
        else:
            self.rnn.mark(dones)

    def get_hidden_state(self) -> Any:
        return self.rnn.hidden_state()

    def detach_hidden_state(self, dones: Tensor | None = None) -> None:
        self.rnn.detach(dones)

    def as_jit(self) -> nn.Module:
        return exports.for_jit(self)

    def as_onnx(self, verbose: bool = False) -> nn.Module:
        return exports.for_onnx(self, verbose)

    # --- the training leg, for Holdfast's PPO ----------------------------------------------------------------------------

    def unroll(self, obs: Any, state: State, resets: Tensor) -> Tensor:
        """What the MLP gives for a segment: obs [T, B, ...], resets [T, B] -> [T, B, ...]. The states stay as they are."""
        y, _ = self.rnn.rnn(super().get_latent(obs), state, resets)
        return self.mlp(y)

    def peek(self, obs: Any, *, fresh: bool) -> Tensor:
        """What the MLP gives for a next step [B, ...] that is not taken. fresh: episodes begin where they are pending."""
        resets = self.rnn.pending if fresh else None
        return self.mlp(self.rnn.peek(super().get_latent(obs), resets))
