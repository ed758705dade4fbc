"""Processes of a job that torchrun has started again meet each other, and nobody from the life before."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore, Store

from holdfast.distributed.ranks import fresh_store

PATIENCE = timedelta(seconds=20)


def meet(store: Store, order: list[int], seconds_between: float = 0.0) -> list[bytes]:
    """One life: ranks start in this order; what each reads where rank 0 has written."""

    def live(rank: int) -> bytes:
        mine = fresh_store(store, rank, len(order), PATIENCE)
        if rank == 0:
            mine.set("address", f"of the life begun at {time.monotonic()}")
        return mine.get("address")

    with ThreadPoolExecutor(len(order)) as pool:
        started: dict[int, Future[bytes]] = {}
        for rank in order:
            started[rank] = pool.submit(live, rank)
            time.sleep(seconds_between)
        return [started[rank].result() for rank in sorted(order)]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
def test_every_life_reads_what_it_wrote_itself_whoever_comes_first(order: list[int]):
    store = HashStore()
    lives = [meet(store, order, 0.05) for _ in range(3)]
    assert all(len(set(life)) == 1 for life in lives), "the ranks of a life read the same"
    assert len({life[0] for life in lives}) == 3, "and nothing of an earlier one"


def test_a_life_that_never_came_together_does_not_disturb_the_next():
    store, short = HashStore(), timedelta(seconds=0.1)
    for alone in (0, 1, 2):
        with pytest.raises(TimeoutError, match="HOLDFAST_RANK_TIMEOUT"):
            fresh_store(store, alone, 3, short)
    assert len(set(meet(store, [2, 0, 1], 0.05))) == 1


def test_a_rank_0_that_is_about_to_die_takes_nobody_with_it():
    # On another machine, where nobody has noticed yet, the old rank 0 still answers. It waits for a rank 3 of old.
    store = HashStore()
    with ThreadPoolExecutor(1) as machine:
        old = machine.submit(fresh_store, store, 0, 4, timedelta(seconds=1.5))
        time.sleep(0.05)
        assert len(set(meet(store, [1, 2, 0], 0.2))) == 1, "ranks 1 and 2 were answered by the old one first"
        assert isinstance(old.exception(), TimeoutError)


def test_who_is_missing_is_said():
    with pytest.raises(TimeoutError, match=r"1 of 3 processes joined, ranks \[1, 2\] are missing"):
        fresh_store(HashStore(), 0, 3, timedelta(seconds=0.05))
    with pytest.raises(TimeoutError, match="rank 2 waited, but rank 0 did not answer"):
        fresh_store(HashStore(), 2, 3, timedelta(seconds=0.05))


def test_one_process_waits_for_nobody():
    fresh_store(HashStore(), 0, 1, timedelta(seconds=0)).set("key", "value")
