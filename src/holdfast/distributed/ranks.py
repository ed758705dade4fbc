"""One run in many processes, started by torchrun: rank, share of the environments, sums over all ranks.

    torchrun --nproc-per-node 4 -m holdfast train --num-envs 256

It uses `torch.distributed`: gloo between CPUs, NCCL between GPUs. Numbers of ranks on the CPUs of one machine go through
memory that they share. Without torchrun there is one rank, and every function here returns its input. Nothing here knows
what is trained.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import time
import uuid
import weakref
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from holdfast.config.settings import named
from holdfast.distributed.shared_memory import RankEndedError, SharedMemory, share_memory
from holdfast.spans import span

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


EXCHANGE = "exchange with other ranks"
"""The span of everything that waits for other processes."""


@dataclass(frozen=True)
class Ranks:
    """The processes of a run and this one's rank. `joined`: a process group exists."""

    rank: int = 0
    size: int = 1
    joined: bool = False
    shared: SharedMemory | None = field(default=None, compare=False, repr=False)  # of ranks on the CPUs of one machine

    @property
    def leads(self) -> bool:
        """Whether this process keeps the run: folder, logs, evaluation."""
        return self.rank == 0

    def share(self, count: int, rank: int | None = None) -> range:
        """Which of `count` environments belong to a rank; the first ranks have one more if they do not divide evenly.

        >>> [list(Ranks(r, 3, True).share(7)) for r in range(3)]
        [[0, 1, 2], [3, 4], [5, 6]]
        """
        rank = self.rank if rank is None else rank
        each, more = divmod(count, self.size)
        first = rank * each + min(rank, more)
        return range(first, first + each + (rank < more))

    def seed(self, seed: int, *salt: int) -> int:
        """A seed of this rank: the run's own on rank 0, a fixed other one elsewhere."""
        if self.rank == 0 and not salt:
            return seed
        return int(np.random.SeedSequence([seed, self.rank, *salt]).generate_state(1)[0])

    # --- numbers -----------------------------------------------------------------------------------------------------

    def sum(self, x: Tensor) -> Tensor:
        """Over all ranks; no gradient passes."""
        if not self.joined:
            return x
        return self.sum_(x.detach().clone())

    def sum_(self, x: Tensor) -> Tensor:
        """Over all ranks, in place."""
        if self.joined:
            with span(EXCHANGE):
                if self.shared is not None and x.is_cpu:
                    self.shared.sum_(x)
                else:
                    dist.all_reduce(x)
        return x

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mean and variance over the rows [N, ...] of all ranks, and how many rows those are, in float64."""
        x = x.double()
        count = x.new_full((), float(len(x)))  # new_tensor would wait for the GPU
        mean = x.sum(0) / (count if self.size == 1 else count.clamp(min=1))
        squares = (x - mean).square().sum(0)
        if self.size == 1:
            return mean, squares / count, count
        # One exchange for all three, joined as in Chan et al.: means weighted by rows, and how far they lie apart.
        mine = torch.cat([count.view(1), mean.flatten(), squares.flatten()])
        counts, means, all_squares = self._all_gather(mine).split([1, mean.numel(), mean.numel()], dim=1)
        total = counts.sum()
        whole = (counts * means).sum(0) / total
        apart = (counts * (means - whole).square()).sum(0)
        return whole.view(mean.shape), ((all_squares.sum(0) + apart) / total).view(mean.shape), total

    def all_gather(self, numbers: list[float], device: torch.device) -> list[list[float]]:
        """The numbers of every rank, in order; all give equally many."""
        if not self.joined:
            return [numbers]
        mine = torch.tensor(numbers, dtype=torch.float64, device=device)
        return self._all_gather(mine).tolist()

    def _all_gather(self, mine: Tensor) -> Tensor:
        """[ranks, ...]"""
        with span(EXCHANGE):
            if self.shared is not None and mine.is_cpu:
                return self.shared.all_gather(mine)
            parts = [torch.empty_like(mine) for _ in range(self.size)]
            dist.all_gather(parts, mine)
            return torch.stack(parts)

    # --- data --------------------------------------------------------------------------------------------------------

    def gather(self, value: Any) -> list[Any]:
        """The plain data of all ranks on rank 0, in order; nothing elsewhere."""
        if not self.joined:
            return [value]
        parts: list[Any] | None = [None] * self.size if self.leads else None
        with span(EXCHANGE):
            dist.gather_object(value, parts)
        return parts or []

    def from_leader(self, value: Any) -> Any:
        """The value that rank 0 passed."""
        if not self.joined:
            return value
        box = [value]
        with span(EXCHANGE):
            dist.broadcast_object_list(box, src=0)
        return box[0]


ALONE = Ranks()
"""One process."""


class RankLostError(RuntimeError):
    """Another process of the job is gone, so this one cannot go on."""


def is_lost_rank(error: RuntimeError) -> bool:
    """Whether an exchange with another rank failed. gloo has no error class of its own."""
    return isinstance(error, (dist.DistError, RankEndedError)) or "/gloo/" in str(error)


def join(device: str) -> tuple[Ranks, torch.device]:
    """This process's rank and device; one rank without torchrun."""
    chosen = pick_device(device, int(os.environ.get("LOCAL_RANK", 0)) if launched() else None)
    if not dist.is_available():
        return ALONE, chosen
    if not dist.is_initialized():
        if not launched():
            return ALONE, chosen
        # Its functions keep the group that exists when it is imported as a default argument, and so keep gloo's threads.
        import torch.distributed.nn.functional  # noqa: F401
        from torch.distributed.rendezvous import rendezvous

        # Tensors on a GPU go through NCCL, what a checkpoint gathers on the host through gloo.
        patience = timedelta(seconds=_patience())
        store, rank, size = next(rendezvous("env://", timeout=patience))
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo",
            store=fresh_store(store, rank, size, patience),
            rank=rank,
            world_size=size,
            timeout=patience,
        )
        atexit.register(leave)
    shared = _shared_memory() if chosen.type == "cpu" else None
    return Ranks(dist.get_rank(), dist.get_world_size(), True, shared), chosen


_LONGEST_PATIENCE = 10**8  # seconds; more than torch can count is an error inside it


def _patience() -> float:
    """Seconds to wait for a rank that neither answers nor ends."""
    text = os.environ.get("HOLDFAST_RANK_TIMEOUT") or "1800"
    with contextlib.suppress(ValueError):
        if 0 < float(text) <= _LONGEST_PATIENCE:
            return float(text)
    raise ValueError(
        f"HOLDFAST_RANK_TIMEOUT is {text!r}, expected a number of seconds above 0 and up to {_LONGEST_PATIENCE:,}"
    )


_shared_by_group: weakref.WeakKeyDictionary[Any, SharedMemory | None] = weakref.WeakKeyDictionary()


def _shared_memory() -> SharedMemory | None:
    """That of the process group, made when its ranks first ask, all of them together."""
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    if group not in _shared_by_group:
        _shared_by_group[group] = share_memory(rank, size, _patience()) if size > 1 else None
    return _shared_by_group[group]


def leave() -> None:
    """Destroy the process group and end gloo's threads.

    A thread that releases a tensor while the interpreter shuts down aborts the process ("terminate called without an
    active exception"). Threads end when nothing refers to their group any more.
    """
    if dist.is_initialized():
        dist.destroy_process_group()


def require_equal_settings(ranks: Ranks, settings: dict[str, Any]) -> None:
    """Raise the same ValueError on every rank if their settings differ; it names the first setting that does."""
    difference = _first_difference(ranks.gather(settings)) if ranks.joined else None
    if (difference := ranks.from_leader(difference)) is not None:
        raise ValueError(f"{difference}; start all ranks with the same settings")


def _first_difference(of_ranks: list[dict[str, Any]]) -> str | None:
    """
    >>> _first_difference([{"seed": 1}, {"seed": 1}, {"seed": 7}])
    'the ranks have different settings: seed is 1 on rank 0 and 7 on rank 2'
    """
    for rank, settings in enumerate(of_ranks):
        for name, value in settings.items():
            first = of_ranks[0].get(name)
            if value != first:
                return (
                    f"the ranks have different settings: {named(name)} is {first} on rank 0 and {value} on rank {rank}"
                )
    return None


def launched() -> bool:
    """Whether torchrun, or a launcher that sets the same variables, started this process."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))


def launched_ranks() -> int:
    """How many processes torchrun started; 1 without it."""
    return int(os.environ["WORLD_SIZE"]) if launched() else 1


def launcher() -> int | None:
    """The process id of this process's torchrun; None without torchrun."""
    return os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None


def restarted() -> bool:
    """Whether torchrun (`--max-restarts`) restarted this machine's processes after one of the job died."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0


def any_restarted(ranks: Ranks, device: torch.device) -> bool:
    """Whether any machine's processes were restarted: a machine that joined later does not know."""
    return any(flag for (flag,) in ranks.all_gather([float(restarted())], device))


def pick_device(name: str, local_rank: int | None = None) -> torch.device:
    """The device of a setting; with torchrun, `cuda` is the GPU of this process's number on its machine."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(f"device {name!r}: Holdfast runs on CPUs and NVIDIA GPUs; use cpu, cuda, cuda:N or auto")
    device = torch.device(name)
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise ValueError(f"device {name!r}, but torch sees no GPU; use cpu or auto")
    count = torch.cuda.device_count()
    if device.index is not None and device.index >= count:
        raise ValueError(f"device {name!r}, but torch sees {count} GPU{'s' * (count > 1)}, numbered from 0")
    if device.index is None and local_rank is not None:
        if local_rank >= count:
            raise ValueError(
                f"process {local_rank} of this machine has no GPU: torch sees {count}; "
                "start as many processes as GPUs (torchrun --nproc-per-node)"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    return device


# --- rendezvous ------------------------------------------------------------------------------------------------------
# How the processes of a job find each other after torchrun has restarted it.
#
# torchrun's agent keeps one key-value store over all restarts of a job, and torch.distributed writes its addresses under the
# same keys each time. A process that starts before the others reads their addresses from before the restart: its connection
# is refused, or it waits forever. So the processes agree on a prefix that no earlier start has used. They cannot count the
# restarts: torchrun counts per machine, from 0 on a machine that was replaced.


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
