"""Every cause that the doctor and the trainer's checks can name: one stable word, what it means in a sentence, and how to
fix it. `causes.toml` lists them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from holdfast.data_files import read_toml

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Cause:
    """`meaning` is written for a reader who has never trained a recurrent policy."""

    meaning: str
    fix: str
    severity: Severity = "error"


CAUSES: dict[str, Cause] = {word: Cause(**entry) for word, entry in read_toml(__file__, "causes.toml").items()}
