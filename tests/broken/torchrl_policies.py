"""TorchRL's own recurrent modules, wired as its documentation shows, and wired wrongly."""

from __future__ import annotations

import torch

from broken.base import Broken, size
from holdfast.doctor.subjects import TorchRL


def lstm_policy():
    from tensordict.nn import TensorDictModule, TensorDictSequential
    from torchrl.modules import LSTMModule

    lstm = LSTMModule(
        input_size=size.obs,
        hidden_size=size.hidden,
        in_keys=["observation", "rs_h", "rs_c"],
        out_keys=["features", ("next", "rs_h"), ("next", "rs_c")],
    )
    head = TensorDictModule(torch.nn.Linear(size.hidden, size.actions), in_keys=["features"], out_keys=["logits"])
    return TensorDictSequential(lstm, head)


def gru_policy():
    from tensordict.nn import TensorDictModule, TensorDictSequential
    from torchrl.modules import GRUModule

    gru = GRUModule(
        input_size=size.obs,
        hidden_size=size.hidden,
        in_keys=["observation", "rs"],
        out_keys=["features", ("next", "rs")],
    )
    head = TensorDictModule(torch.nn.Linear(size.hidden, size.actions), in_keys=["features"], out_keys=["logits"])
    return TensorDictSequential(gru, head)


def _subject(policy=lstm_policy, **wiring):
    return lambda: TorchRL(policy(), (size.obs,), **wiring)


HEALTHY = _subject()


def _broken(name, case, does, cause, **wiring):
    return Broken(f"torchrl-{name}", case, does, cause, _subject(**wiring), HEALTHY)


_STEPWISE = "Training does not run in recurrent mode, so it starts every step from the stored state."

BROKEN = [
    _broken(
        "no-primer", 4, "The environment has no primer, so states are lost between steps.", "memoryless", primed=False
    ),
    _broken(
        "no-init",
        1,
        "The environment has no InitTracker, so no flag is set.",
        "reset-dropped-in-training",
        init_tracker=False,
    ),
    _broken("int-init", 22, "The flags are int64.", "flags-not-bool", is_init_dtype=torch.int64),
    _broken("no-mode", 12, _STEPWISE, "over-detached", recurrent_mode=False),
    Broken(
        "torchrl-gru-no-mode",
        12,
        _STEPWISE,
        "over-detached",
        _subject(gru_policy, recurrent_mode=False),
        _subject(gru_policy),
    ),
]
