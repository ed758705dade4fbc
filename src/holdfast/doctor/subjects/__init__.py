"""Ready-made subjects: one file for each widespread way of writing a recurrent policy."""

from holdfast.doctor.subject import NotOffered, Replay, Segment, Step, Subject
from holdfast.doctor.subjects.cleanrl import CleanRL
from holdfast.doctor.subjects.holdfast import Holdfast
from holdfast.doctor.subjects.module import Module
from holdfast.doctor.subjects.puffer import Puffer
from holdfast.doctor.subjects.sb3 import SB3
from holdfast.doctor.subjects.stateful import Stateful
from holdfast.doctor.subjects.tensordict import TensorDictPolicy
from holdfast.doctor.subjects.torchrl import TorchRL

__all__ = [
    "SB3",
    "CleanRL",
    "Holdfast",
    "Module",
    "NotOffered",
    "Puffer",
    "Replay",
    "Segment",
    "Stateful",
    "Step",
    "Subject",
    "TensorDictPolicy",
    "TorchRL",
]
