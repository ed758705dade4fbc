"""TorchRL's own recurrent modules, wired as its documentation says, and wired wrongly."""

from __future__ import annotations

import torch

from holdfast.doctor.subjects import TorchRL
from patients.base import ACTIONS, HIDDEN, OBS, Patient


def lstm_policy():
    from tensordict.nn import TensorDictModule, TensorDictSequential
    from torchrl.modules import LSTMModule

    lstm = LSTMModule(
        input_size=OBS,
        hidden_size=HIDDEN,
        in_keys=["observation", "rs_h", "rs_c"],
        out_keys=["features", ("next", "rs_h"), ("next", "rs_c")],
    )
    head = TensorDictModule(torch.nn.Linear(HIDDEN, ACTIONS), in_keys=["features"], out_keys=["logits"])
    return TensorDictSequential(lstm, head)


def gru_policy():
    from tensordict.nn import TensorDictModule, TensorDictSequential
    from torchrl.modules import GRUModule

    gru = GRUModule(
        input_size=OBS,
        hidden_size=HIDDEN,
        in_keys=["observation", "rs"],
        out_keys=["features", ("next", "rs")],
    )
    head = TensorDictModule(torch.nn.Linear(HIDDEN, ACTIONS), in_keys=["features"], out_keys=["logits"])
    return TensorDictSequential(gru, head)


def _subject(policy=lstm_policy, **wiring):
    return lambda: TorchRL(policy(), (OBS,), **wiring)


HEALTHY = _subject()

PATIENTS = [
    Patient("torchrl-no-primer", 4, "memoryless", _subject(primed=False), HEALTHY),
    Patient("torchrl-no-init", 1, "reset-dropped-in-training", _subject(init_tracker=False), HEALTHY),
    Patient("torchrl-int-init", 22, "flags-not-bool", _subject(is_init_dtype=torch.int64), HEALTHY),
    Patient("torchrl-no-mode", 12, "over-detached", _subject(recurrent_mode=False), HEALTHY),
    Patient(
        "torchrl-gru-no-mode", 12, "over-detached", _subject(gru_policy, recurrent_mode=False), _subject(gru_policy)
    ),
]
