"""How the processes of a job find each other after torchrun has restarted it.

torchrun's agent keeps one key-value store over all restarts of a job, and torch.distributed writes its addresses under the
same keys each time. A process that starts before the others reads their addresses from before the restart: its connection
is refused, or it waits forever. So the processes agree on a prefix that no earlier start has used. They cannot count the
restarts: torchrun counts per machine, from 0 on a machine that was replaced.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

POLL_SECONDS = 0.01


def fresh_store(store: Store, rank: int, size: int, patience: timedelta) -> Store:
    """`store` under a prefix known to the `size` processes that are alive now, and to no earlier one.

    Rank 0 makes the prefix. Every other process writes an id of its own, is answered under that id, and confirms under
    the prefix; when all have, rank 0 confirms that. An answer from a rank 0 that dies is superseded: the next rank 0
    answers the same id again.
    """
    from torch.distributed.distributed_c10d import PrefixStore  # some builds of torch have no torch.distributed

    meeting = PrefixStore("holdfast", store)
    gives_up = time.monotonic() + patience.total_seconds()
    prefix = _lead(meeting, size, gives_up) if rank == 0 else _follow(meeting, rank, gives_up)
    return PrefixStore(prefix, store)


def _lead(store: Store, size: int, gives_up: float) -> str:
    prefix = uuid.uuid4().hex
    answered: set[bytes] = set()
    missing = list(range(1, size))
    while missing:
        for rank in missing:
            if store.check([f"id of {rank}"]) and (found := store.get(f"id of {rank}")) not in answered:
                store.set(f"answer to {found.decode()}", prefix)
                answered.add(found)
        missing = [rank for rank in missing if not store.check([f"{prefix}: {rank} is there"])]
        if missing:
            _wait(gives_up, f"{size - len(missing)} of {size} processes joined, ranks {missing} are missing")
    store.set(f"{prefix}: all are there", "")
    return prefix


def _follow(store: Store, rank: int, gives_up: float) -> str:
    own_id, prefix = uuid.uuid4().hex, ""
    store.set(f"id of {rank}", own_id)
    while not (prefix and store.check([f"{prefix}: all are there"])):
        if store.check([f"answer to {own_id}"]) and (answer := store.get(f"answer to {own_id}").decode()) != prefix:
            prefix = answer
            store.set(f"{prefix}: {rank} is there", "")
        _wait(gives_up, f"rank {rank} waited, but {'not all others joined' if prefix else 'rank 0 did not answer'}")
    return prefix


def _wait(gives_up: float, otherwise: str) -> None:
    if time.monotonic() > gives_up:
        raise TimeoutError(
            f"{otherwise}; look for their errors above. HOLDFAST_RANK_TIMEOUT sets how many seconds to wait"
        )
    time.sleep(POLL_SECONDS)
