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

from holdfast import state as state_ops
from holdfast.cores import LSTM, Core
from holdfast.cores.gated import GatedCore
from holdfast.cores.named import make_core
from holdfast.integrations.rsl_rl import exports
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


# --- states ----------------------------------------------------------------------------------------------------------
# A core with the states of the environments that act now, in the form that rsl_rl's models have.
#
# rsl_rl keeps a hidden state inside its models: one tensor [layers, B, H], or a tuple of them. A core's state is a tree of
# batch-first leaves. This file keeps the tree, marks resets instead of writing zeros, and translates.


class Recurrence(nn.Module):
    """`rnn` is the core: weights have the names they have in rsl_rl's `RNN`, `rnn.weight_ih_l0` and so on.

    state: of all environments, None before the first step. pending [B]: environments whose next step begins an episode.
    """

    def __init__(self, core: Core, reset: str) -> None:
        super().__init__()
        self.rnn, self.reset_mode = core, reset
        self.state: State = None
        self.pending: Tensor | None = None
        self.fixed_tensors = False  # a captured graph updates the tensors of `state` in place

    def start(self, batch: int) -> None:
        """Make sure that there is a state for `batch` environments."""
        if self.state is None:
            self.state = self.rnn.initial_state(batch)
            self.pending = torch.ones(batch, dtype=torch.bool, device=self.rnn.device())
        elif (known := state_ops.batch_size(self.state)) not in (batch, None):
            raise ValueError(
                f"got {batch} observations, but this model remembers {known} environments; call reset() before it is "
                "used with another number of them"
            )

    def step(self, x: Tensor) -> Tensor:
        """One step of all environments, [B, I] -> [B, O]; the state moves on."""
        self.start(len(x))
        y, state = self.rnn(x, self.state, self.pending)
        self.carry(state)
        return y

    def peek(self, x: Tensor, resets: Tensor | None) -> Tensor:
        """[B, I] -> [B, O] of a step that leaves the state as it was."""
        self.start(len(x))
        return self.rnn(x, self.state, resets)[0]

    def carry(self, state: State) -> None:
        """Take the state after a step."""
        self._replace(state)
        self.pending = None

    def mark(self, dones: Tensor) -> None:
        """The next step of these environments begins an episode."""
        if self.state is not None:
            flags = dones.reshape(-1) == 1
            self.pending = flags if self.pending is None else self.pending | flags

    def detach(self, dones: Tensor | None) -> None:
        """Cut the gradient into the past, of all environments or of those that are done."""
        if self.state is not None:
            cut = state_ops.detach(self.state)
            self._replace(cut if dones is None else state_ops.where(dones.reshape(-1) == 1, cut, self.state))

    # --- rsl_rl's form ------------------------------------------------------------------------------------------------

    def hidden_state(self) -> Any:
        """The state after pending resets: a tensor, or a tuple of several; None before the first step."""
        if self.state is None:
            return None
        if self.pending is not None:
            if self.reset_mode in ("zero", "learned"):
                fresh = self.rnn.initial_state(len(self.pending))
                self._replace(state_ops.where(self.pending, fresh, self.state))
            self.pending = None
        leaves = state_ops.ordered_leaves(self.state, self.rnn.row_shapes())
        parts = tuple(self._to_rsl_rl(leaf.clone() if self.fixed_tensors else leaf) for leaf in leaves)
        return parts[0] if len(parts) == 1 else parts

    def load_hidden_state(self, hidden_state: Any) -> None:
        """Continue from what `hidden_state` returned; None: from a fresh state."""
        if hidden_state is None:
            self.state, self.pending, self.fixed_tensors = None, None, False
            return
        self._replace(self.from_rsl_rl(hidden_state))
        self.pending = None

    def from_rsl_rl(self, hidden_state: Any) -> State:
        """A core's state from a tensor [layers, B, H] or a tuple of them."""
        parts = hidden_state if isinstance(hidden_state, (tuple, list)) else (hidden_state,)
        shapes = self.rnn.row_shapes()
        dtype = self.rnn.state_dtype()

        def leaf(row: state_ops.RowShape, part: Tensor) -> Tensor:
            rows = part.transpose(0, 1).reshape(part.shape[1], *row.shape)
            return (
                rows.round().to(row.dtype) if row.dtype in (torch.int32, torch.int64) else rows.to(row.dtype or dtype)
            )

        return state_ops.tree_map(leaf, shapes, state_ops.from_leaves(list(parts), like=shapes))

    def _to_rsl_rl(self, leaf: Tensor) -> Tensor:
        if isinstance(self.rnn, GatedCore):
            return leaf.transpose(0, 1)  # [B, layers, H] -> [layers, B, H]
        return state_ops.flat_rows(leaf).unsqueeze(0).float()

    def _replace(self, state: State) -> None:
        self.fixed_tensors = self.fixed_tensors and not any(leaf.requires_grad for leaf in state_ops.leaves(state))
        if self.fixed_tensors:
            state_ops.tree_map(lambda old, new: old.copy_(new), self.state, state)
        else:
            self.state = state
