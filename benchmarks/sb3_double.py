"""sb3-contrib's RecurrentPPO, and ours, in double precision: what Stable-Baselines3 keeps in float32 becomes float64.

Two runs of one algorithm that round differently diverge, in float32 after about ten updates. In double precision they stay
together, which shows whether they *are* the same algorithm.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from sb3_contrib.common.recurrent.buffers import RecurrentRolloutBuffer
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.torch_layers import FlattenExtractor

ARRAYS = {
    RolloutBuffer: ("values", "log_probs", "advantages", "returns", "rewards"),
    RecurrentRolloutBuffer: ("hidden_states_pi", "cell_states_pi", "hidden_states_vf", "cell_states_vf"),
}


class DoubleExtractor(FlattenExtractor):
    """Stable-Baselines3 converts observations to float32; from here on they are float64."""

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        return super().forward(observations).double()


@contextmanager
def double_precision() -> Iterator[dict[str, Any]]:
    """Models created and trained inside compute in float64. Yields the policy_kwargs they need."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with ExitStack() as patches:
            for buffer, names in ARRAYS.items():
                patches.enter_context(mock.patch.object(buffer, "reset", _reset_to_doubles(buffer.reset, names)))
            yield {"features_extractor_class": DoubleExtractor}
    finally:
        torch.set_default_dtype(before)


def _reset_to_doubles(reset: Any, names: tuple[str, ...]) -> Any:
    def wrapped(buffer: Any) -> None:
        reset(buffer)
        for name in names:
            setattr(buffer, name, getattr(buffer, name).astype(np.float64))

    return wrapped
