"""Deliberately broken policies, shared by the tests of the doctor, the conformance suite and the replay check.

One file per kind of policy, each mistake written once per kind. The doctor sees all of them. The conformance suite and
the replay check see those of Holdfast (`holdfast_policies`, `holdfast_loops`). `base.Broken` says what each must say.
"""

from __future__ import annotations

from broken.bare_modules import BROKEN as BARE
from broken.base import Broken
from broken.cleanrl_agents import BROKEN as CLEANRL
from broken.holdfast_loops import BROKEN as LOOPS
from broken.holdfast_policies import BROKEN as POLICIES
from broken.own_loops import BROKEN as OWN
from broken.puffer_policies import BROKEN as PUFFER
from broken.sb3_models import BROKEN as SB3
from broken.sparse_memories import BROKEN as SPARSE
from broken.stateful_modules import BROKEN as STATEFUL
from broken.torchrl_policies import BROKEN as TORCHRL

ALL: list[Broken] = [*CLEANRL, *STATEFUL, *BARE, *PUFFER, *OWN, *SPARSE, *TORCHRL, *SB3, *POLICIES, *LOOPS]
OF_HOLDFAST: list[Broken] = [*POLICIES, *LOOPS]

__all__ = ["ALL", "OF_HOLDFAST", "Broken"]
