"""JIT and ONNX forms of an `RNNModel`, for `OnPolicyRunner.export_policy_to_jit` and `export_policy_to_onnx`.

An LSTM or a GRU becomes rsl_rl's own exported module with the same weights: names and shapes are rsl_rl's (`obs`, `h_in`,
`c_in` -> `actions`, `h_out`, `c_out`). Other cores have an input and an output per leaf of their state, named alike:
`obs`, `LEAF_in` -> `actions`, `LEAF_out`. The exported actor is deterministic and holds its observation normalizer.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from holdfast import state as state_ops
from holdfast.cores import GRU, LSTM, Core
from holdfast.state import State


def for_jit(model: Any) -> nn.Module:
    """A module that `torch.jit.script` takes: forward(obs) keeps the state, reset() starts afresh."""
    return _rsl_rl_twin(model).as_jit() if _has_twin(model) else _JitModel(_Step(model))


def for_onnx(model: Any, verbose: bool) -> nn.Module:
    """A module for `torch.onnx.export`, with `get_dummy_inputs`, `input_names` and `output_names`."""
    return _rsl_rl_twin(model).as_onnx(verbose=verbose) if _has_twin(model) else _OnnxModel(_Step(model), verbose)


def _has_twin(model: Any) -> bool:
    """Whether rsl_rl has a model that computes the same; its states start from zeros."""
    return type(model.rnn.rnn) in (LSTM, GRU) and model.rnn.reset_mode != "learned"


def _rsl_rl_twin(model: Any) -> Any:
    from rsl_rl.models import RNNModel

    core = model.rnn.rnn
    hidden_dims, activation, normalized, distribution = model.export_settings
    distribution = copy.deepcopy(distribution)
    outputs = model.distribution.output_dim if model.distribution is not None else model.mlp[-1].out_features
    obs = TensorDict({"obs": torch.zeros(1, model.obs_dim)}, batch_size=[1])
    twin = RNNModel(
        obs, {"actor": ["obs"]}, "actor", outputs, hidden_dims, activation, normalized, distribution,
        core.cell, core.hidden_size, core.num_layers,
    )  # fmt: skip
    twin.load_state_dict(model.state_dict())
    return twin.eval()


class _Step(nn.Module):
    """One step as a function of tensors: (obs, *leaves) -> (actions, *new leaves), in plain operations on the CPU."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.normalizer, self.mlp = copy.deepcopy(model.obs_normalizer).cpu(), copy.deepcopy(model.mlp).cpu()
        distribution = model.distribution
        self.output = nn.Identity() if distribution is None else distribution.as_deterministic_output_module()
        self.core: Core = copy.deepcopy(model.rnn.rnn).cpu()
        for part in self.core.modules():
            if isinstance(part, Core) and hasattr(part, "kernel"):
                part.kernel = "reference"  # type: ignore[assignment]  # custom operators cannot be exported
        self.requires_grad_(False).eval()
        self.shapes: State = self.core.row_shapes()
        self.names = ["_".join(map(str, path)) for path, _ in state_ops.paths(self.shapes)]
        self.obs_dim = int(model.obs_dim)

    def start(self) -> list[Tensor]:
        """The leaves of one fresh state."""
        fresh = state_ops.ordered_leaves(self.core.initial_state(1), self.shapes)
        return [leaf.detach().clone() for leaf in fresh]

    def forward(self, obs: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
        state = state_ops.from_leaves(list(leaves), like=self.shapes)
        y, state = self.core.step_unchecked(self.normalizer(obs), state, None)
        return self.output(self.mlp(y)), *state_ops.ordered_leaves(state, self.shapes)


class _JitModel(nn.Module):
    """Keeps the state of one robot. The step is traced, since cores are not TorchScript."""

    def __init__(self, step: _Step) -> None:
        super().__init__()
        self.fresh, self.state = step.start(), step.start()

        def flat(obs: Tensor, leaves: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
            action, *new = step(obs, *leaves)
            return action, new

        inputs = (torch.zeros(1, step.obs_dim), step.start())
        self.step = torch.jit.trace(_Function(flat, step), inputs, check_trace=False, strict=False)

    def forward(self, x: Tensor) -> Tensor:
        action, self.state = self.step(x, self.state)
        return action

    @torch.jit.export
    def reset(self) -> None:
        self.state = [leaf.clone() for leaf in self.fresh]


class _Function(nn.Module):
    """A function as a module whose parts are `step`'s, so that tracing keeps them as parameters."""

    def __init__(self, function: Any, step: _Step) -> None:
        super().__init__()
        self.inner, self.function = step, function

    def forward(self, obs: Tensor, leaves: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        return self.function(obs, leaves)


class _OnnxModel(nn.Module):
    is_recurrent = True

    def __init__(self, step: _Step, verbose: bool) -> None:
        super().__init__()
        self.step, self.verbose = step, verbose
        self.input_names = ["obs", *(f"{name}_in" for name in step.names)]
        self.output_names = ["actions", *(f"{name}_out" for name in step.names)]

    def forward(self, obs: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
        return self.step(obs, *leaves)

    def get_dummy_inputs(self) -> tuple[Tensor, ...]:
        return (torch.zeros(1, self.step.obs_dim), *self.step.start())
