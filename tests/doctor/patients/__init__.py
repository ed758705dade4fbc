"""Small sick policies, each with exactly one bug, and for each a healthy twin that differs in nothing else."""

from __future__ import annotations

from patients.base import Patient
from patients.cleanrl_agents import PATIENTS as CLEANRL
from patients.modules import PATIENTS as MODULES
from patients.own_loops import PATIENTS as OWN
from patients.puffer_policies import PATIENTS as PUFFER
from patients.sb3_policies import PATIENTS as SB3
from patients.stateful_policies import PATIENTS as STATEFUL
from patients.torchrl_policies import PATIENTS as TORCHRL

ALL: list[Patient] = [*CLEANRL, *STATEFUL, *MODULES, *PUFFER, *OWN, *TORCHRL, *SB3]

__all__ = ["ALL", "Patient"]
