"""An examination computes in full float32 and leaves the user's settings as they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.backends import cuda, cudnn, mkldnn

import holdfast as hf
from holdfast import doctor
from holdfast.doctor import subjects

PARTS = (cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul, mkldnn.conv, mkldnn.rnn)


def settings() -> list[Any]:
    found: list[Any] = [part.fp32_precision for part in PARTS]
    for older in (torch.get_float32_matmul_precision, lambda: cuda.matmul.allow_tf32, lambda: cudnn.allow_tf32):
        try:
            found.append(older())
        except RuntimeError:  # torch refuses where older and newer settings disagree
            found.append("refused")
    return found


def set_part(part: Any, precision: str) -> None:
    part.fp32_precision = precision


SET_BY_THE_USER = {
    "nothing": lambda: None,
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "allow_tf32": lambda: setattr(cuda.matmul, "allow_tf32", True),
    "not in cuDNN": lambda: setattr(cudnn, "allow_tf32", False),
    "newer name": lambda: set_part(cuda.matmul, "tf32"),
    "newer name in cuDNN": lambda: set_part(cudnn.rnn, "ieee"),
}


@pytest.fixture
def restored():
    before = torch.get_float32_matmul_precision(), cudnn.allow_tf32, [part.fp32_precision for part in PARTS]
    yield
    torch.set_float32_matmul_precision(before[0])
    cudnn.allow_tf32 = before[1]
    for part, precision in zip(PARTS, before[2]):
        set_part(part, precision)


class Notes(nn.GRU):
    """Keeps the settings that it is called under."""

    seen: set[str]

    def forward(self, *args: Any) -> Any:
        self.seen.update(part.fp32_precision for part in PARTS)
        return super().forward(*args)

    def __deepcopy__(self, memo: Any) -> Notes:
        copy = Notes(self.input_size, self.hidden_size)
        copy.load_state_dict(self.state_dict())
        copy.seen = self.seen
        return copy


@pytest.mark.parametrize("choice", SET_BY_THE_USER)
def test_whatever_is_set_the_policy_is_examined_in_full_float32(choice: str, restored: None):
    SET_BY_THE_USER[choice]()
    before = settings()
    policy = Notes(4, 8)
    policy.seen = set()
    doctor.examine(subjects.Module(policy, (4,)), seed=1)
    assert policy.seen == {"ieee"} and settings() == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("choice", SET_BY_THE_USER)
@pytest.mark.parametrize("kind", [hf.LSTM, hf.GRU])
def test_tf32_on_a_gpu_is_no_finding(choice: str, kind: type[hf.Core], restored: None):
    SET_BY_THE_USER[choice]()
    torch.manual_seed(0)
    report = doctor.examine(kind(64, 128, kernel="reference").cuda(), seed=2)  # torch's products, step by step
    assert report.findings == (), report.to_text()
