"""`SequenceBuffer`: the last rows of every environment, and sequences of them to learn from.

    buffer = hf.SequenceBuffer(1_000_000, num_envs=8)
    buffer.add(segment)                                  # of a collector with records=("final_obs",)
    batch = buffer.sample(32, length=64, burn_in=16)     # a Segment [16 + 64 + 1, 32]

A row is one step of one environment; a stream is the rows of one environment in order, a ring with a write position of its own.
The successor of a row is the next row of its stream. A truncated episode ends with a row of its own that holds its final
observation; NEXT_STEP environments play that row, for others it is added::

    obs     o0 o1 o2 F  p0 p1 q0       F: final observation, not valid; p0, q0: first observations
    resets  1  0  0  0  1  0  1
    ends          tr       te          tr: truncated, te: terminated (needs no final row)

A sequence begins where a state was kept (the chunk starts of segments), runs over ends of episodes with `resets` inside, and
never crosses its stream's write position. Nothing here waits for a GPU. `buffer_files.py` keeps a buffer on disk.
"""

from __future__ import annotations

import warnings
from collections import deque
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from holdfast.checks import values_are_readable
from holdfast.cores.base import Core, check_sizes, reset_mode_of
from holdfast.rollout.buffer_checks import check_counters
from holdfast.rollout.buffer_files import BufferFiles
from holdfast.rollout.buffer_starts import Starts
from holdfast.rollout.segment import Segment
from holdfast.state import State, leaves, named_leaves, tree_map

_RESET, _TERMINATED, _TRUNCATED, _VALID, _UNKNOWN = 1, 2, 4, 8, 16
"""Flags of a row, in one byte. Unknown: its observation was not finite, so no row may take it for its successor."""


class SequenceBuffer:
    """The last `capacity` rows of `num_envs` environments, in equal parts. Spaces come from the first segment.

    Segments follow one another; one that does not continue the last begins with resets. Rows keep their dtype. Steps that failed
    are not valid; neither is an episode from its first number that is not finite, which is stored as 0. seed: of the sampling.
    prioritized: sample in proportion to what `update_priorities` says. context: steps after which the policy's state
    follows from its inputs alone (`core.context()`); no states are stored then, and `burn_in` must be at least this.
    """

    def __init__(
        self,
        capacity: int,
        num_envs: int,
        *,
        device: torch.device | str = "cpu",
        seed: int = 0,
        prioritized: bool = False,
        context: int | None = None,
    ) -> None:
        check_sizes(capacity=capacity, num_envs=num_envs)
        _check_count(context=context or 0)
        if capacity < 2 * num_envs:
            raise ValueError(
                f"capacity {capacity} is too small for {num_envs} environments; use at least {2 * num_envs}"
            )
        self.capacity, self.num_envs, self.device = capacity, num_envs, torch.device(device)
        self.prioritized, self.context = prioritized, context
        self.stream_rows = capacity // num_envs
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.steps = 0  # of every environment, so far
        self.rows: dict[str, Any] = {}  # leaves [num_envs * stream_rows + 1, ...]; the last one takes what nobody reads
        self.written = torch.zeros(num_envs, dtype=torch.int64, device=self.device)  # rows of each stream, so far
        self.starts = Starts(num_envs, self.device)
        self._nonfinite = torch.zeros(
            num_envs, dtype=torch.bool, device=self.device
        )  # the present episode is not finite
        self._open_truncation = torch.zeros_like(self._nonfinite)  # the last row is truncated and has no final row
        self._has_added_rows = False
        self._length: int | None = None  # the shortest that was sampled
        self._longest_chunk = 0
        self._files: dict[Path, BufferFiles] = {}  # by folder
        self._blank: State = None  # like the first state, one row of zeros

    def __len__(self) -> int:
        """Rows held, of all streams together."""
        return int(self.written.clamp(max=self.stream_rows).sum())

    # --- adding ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def add(self, segment: Segment) -> None:
        """Append the steps of a segment to the streams, and the states at its chunk starts."""
        states = self._checked_states(segment)
        T = segment.num_steps
        rows, nonfinite = self._rows_of(segment)
        self._check_or_make(rows, states[0])
        ended = segment.truncated.to(self.device)
        adds = segment.final_obs is not None
        self._check_ends(rows["flags"], ended, adds)
        counts = 1 + ended.long() if adds else torch.ones_like(ended, dtype=torch.int64)
        after = self.written + counts.cumsum(0)
        at = after - counts  # [T, B]: the number of each row in its stream
        finals = self._final_rows_of(segment, rows) if adds else None
        block = self.stream_rows // 2  # no slot twice in one write
        for first in range(0, T, block):
            part = slice(first, first + block)
            self._write(at[part], tree_map(lambda x, part=part: x[part], rows))
            if finals is not None:
                self._write(at[part] + 1, tree_map(lambda x, part=part: x[part], finals), ended[part])
        self._keep_states(at, states)
        self.written.copy_(after[-1])
        self._nonfinite.copy_(nonfinite)
        self._open_truncation.copy_(ended[-1] & (not adds))
        self.steps += T
        self._has_added_rows |= adds

    def _rows_of(self, segment: Segment) -> tuple[dict[str, Any], Tensor]:
        """The rows of a segment, leaves [T, B, ...], with zeros where numbers are not finite; and which episodes go on so [B]."""
        here = segment.to(self.device)
        obs, unknown = _finite(here.obs)
        actions, odd_action = _finite(here.actions)
        rewards, odd_reward = _finite(here.rewards)
        odd, resets = unknown | odd_action | odd_reward, here.resets
        # An episode is not finite from its first row that is odd: since then there was no reset.
        step = torch.arange(len(resets), device=self.device).unsqueeze(1)
        last_reset = torch.where(resets, step, -1).cummax(0).values
        last_odd = torch.where(odd, step, torch.where(self._nonfinite, -1, -2)).cummax(0).values
        nonfinite = last_odd >= last_reset
        valid = here.valid & ~nonfinite
        if here.failed is not None:
            valid = valid & ~here.failed
        rows = {
            "obs": obs,
            "actions": actions,
            "rewards": rewards,
            "flags": _flags(resets, here.terminated, here.truncated, valid, unknown),
        }
        if here.action_mask is not None:
            rows["action_mask"] = here.action_mask
        elif "action_mask" in self.rows:
            mask = self.rows["action_mask"]
            rows["action_mask"] = torch.ones((*resets.shape, *mask.shape[1:]), dtype=mask.dtype, device=self.device)
        return rows, nonfinite[-1]

    def _final_rows_of(self, segment: Segment, rows: dict[str, Any]) -> dict[str, Any]:
        """A row after each step [T, B, ...]; only those after truncations are kept. Its action is never played."""
        final, unknown = _finite(tree_map(lambda f, o: f.to(o), segment.final_obs, rows["obs"]))
        return {
            "obs": final,
            "actions": rows["actions"],
            "rewards": torch.zeros_like(rows["rewards"]),
            "flags": unknown.to(torch.uint8) * _UNKNOWN,
            **({"action_mask": torch.ones_like(rows["action_mask"])} if "action_mask" in rows else {}),
        }

    def _write(self, at: Tensor, rows: dict[str, Any], where: Tensor | None = None) -> None:
        """Put rows [t, B, ...] at these numbers of their streams, or some of them only."""
        slots = self._slots(at, torch.arange(self.num_envs, device=self.device)).flatten()
        rows = tree_map(lambda x: x.flatten(0, 1), rows)
        if where is not None and self.device.type == "cpu":
            some = where.flatten().nonzero().squeeze(1)
            slots, rows = slots[some], tree_map(lambda x: x[some], rows)
        elif where is not None:
            slots = torch.where(where.flatten(), slots, self.num_envs * self.stream_rows)
        tree_map(lambda store, x: store.index_copy_(0, slots, x), self.rows, rows)

    def _slots(self, at: Tensor, stream: Tensor) -> Tensor:
        return at % self.stream_rows + stream * self.stream_rows

    def _keep_states(self, at: Tensor, states: list[State]) -> None:
        """Keep the states of a segment, fewer where they cost more than the rows; a sequence may begin at any row that has one."""
        chunk = len(at) // len(states)
        self._longest_chunk = max(self._longest_chunk, chunk)
        end = self.steps + len(at)
        for number, state in enumerate(states):
            step, last = self.steps + number * chunk, self.starts.last_step
            gap = chunk if last is None else step - last
            if self._length is None or gap >= self._rows_per_state() or gap + chunk > self._length:
                self.starts.append(step, at[number * chunk], self._kept(state), end - self.stream_rows)

    def _rows_per_state(self) -> float:
        """So many rows cost as much as one state."""
        row = sum(x[0].numel() * x.element_size() for x in leaves(self.rows))
        return self.starts.state_bytes() / row

    def _kept(self, state: State) -> State:
        """What is stored of a state [B, ...]: numbers that are finite; nothing of a window, which is filled again."""
        if self.context is not None:
            return {}
        return tree_map(lambda x: _finite(x.to(self.device).unsqueeze(0))[0].squeeze(0), state)

    # --- checking ----------------------------------------------------------------------------------------------------

    def _checked_states(self, segment: Segment) -> list[State]:
        """The start states of a segment, if it is one and of these environments."""
        if not isinstance(segment, Segment):
            raise TypeError(f"a buffer takes a Segment, got a {type(segment).__name__}; hf.Collector gives them")
        T, B = segment.resets.shape
        if self.num_envs != B:
            raise ValueError(f"this segment has {B} environments, the buffer {self.num_envs}")
        for name in ("obs", "actions", "action_mask", "final_obs"):
            part = getattr(segment, name)
            wrong = [x.shape for x in leaves(part) if x.shape[:2] != (T, B)] if part is not None else []
            if wrong:
                raise ValueError(f"{name} of this segment has shape {tuple(wrong[0])}, expected [{T}, {B}, ...]")
        if segment.final_obs is not None and _shapes(segment.final_obs) != _shapes(segment.obs):
            found, expected = (" ".join(_shapes(part).values()) for part in (segment.final_obs, segment.obs))
            raise ValueError(f"final_obs of this segment is {found}, expected {expected} as its observations")
        states = segment.chunk_states or [segment.start_state]
        if T % len(states):
            raise ValueError(
                f"this segment has {T} steps and {len(states)} start states, which must be equally far apart"
            )
        for state in states:
            if state is None:
                raise ValueError("this segment has no start state; policy.initial_state(num_envs) begins an episode")
            if any(len(x) != B for x in leaves(state)):
                raise ValueError(f"this segment has a start state with {len(leaves(state)[0])} rows, expected {B}")
        return states

    def _check_or_make(self, rows: dict[str, Any], state: State) -> None:
        """Storage like the first rows; later ones must be like these."""
        if not self.rows:
            count = self.num_envs * self.stream_rows + 1
            self.rows = tree_map(lambda x: torch.zeros(count, *x.shape[2:], dtype=x.dtype, device=self.device), rows)
            self.starts.make(self._kept(state))
            self._blank = tree_map(lambda x: torch.zeros(1, *x.shape[1:], dtype=x.dtype, device=self.device), state)
        for what, stored, new in (
            ("rows", named_leaves(self.rows), named_leaves(rows)),
            ("states", named_leaves(self._blank), named_leaves(state)),
        ):
            lead = 2 if what == "rows" else 1
            shapes = [
                {k: (tuple(x.shape[n:]), x.dtype) for k, x in tree.items()} for tree, n in ((stored, 1), (new, lead))
            ]
            if shapes[0] != shapes[1]:
                names = sorted(k for k in stored.keys() | new.keys() if shapes[0].get(k) != shapes[1].get(k))
                raise ValueError(
                    f"this segment's {what} differ from those of the first in {', '.join(names)}: "
                    f"{[shapes[1].get(k) for k in names]}, the buffer holds {[shapes[0].get(k) for k in names]}"
                )

    def _check_ends(self, flags: Tensor, ended: Tensor, adds: bool) -> None:
        """A truncated row without a final row is followed by a dummy step. On a GPU it is not looked at: the row is not valid."""
        begins = flags & _RESET != 0
        before = torch.cat([self._open_truncation.unsqueeze(0), ended[:-1] & (not adds)])
        if values_are_readable(flags) and bool((begins & before).any()):
            raise ValueError(
                "an episode was truncated and its final observation is missing; collect with records=('final_obs',), "
                "or set segment.final_obs"
            )

    def _need(self, length: int, burn_in: int) -> int:
        """Rows of a sequence: those to learn from, those before, and the last one's successor."""
        check_sizes(length=length)
        _check_count(burn_in=burn_in)
        need = burn_in + length + 1
        if burn_in < (self.context or 0):
            raise ValueError(
                f"burn_in is {burn_in}, but this policy's window needs at least {self.context}: its states are not stored"
            )
        if self.stream_rows < 2 * need:
            raise ValueError(
                f"a capacity of {self.capacity} is {self.stream_rows} rows per environment; sequences of {burn_in} + {length} + 1 "
                f"rows need at least {2 * need}, a capacity of {2 * need * self.num_envs}"
            )
        return need

    # --- sampling ----------------------------------------------------------------------------------------------------

    def ready(self, length: int, burn_in: int = 0) -> bool:
        """Whether something can be sampled. On a GPU it is not looked at: True as soon as it is certain."""
        need = self._need(length, burn_in)
        if values_are_readable(self.written):
            return bool(self._can_start(need).any())
        most = self.stream_rows // 2 if self._has_added_rows else self.stream_rows
        return any(need <= self.steps - step <= most for step in self.starts.steps)

    @torch.no_grad()
    def sample(self, sequences: int, length: int, burn_in: int = 0) -> Segment:
        """Sequences [burn_in + length + 1, sequences], drawn independently from those that are held as a whole.

        `start_state` is the state before a sequence's first row and before that row's reset. `index` names the sequences, for
        `update_priorities`. `valid` is True where a row and its successor can be learned from; the last row is a successor only.
        """
        need = self._need(length, burn_in)
        check_sizes(sequences=sequences)
        self._take_note_of(length)
        chosen, something = self._draw(sequences, need)
        stream = chosen % self.num_envs
        at = self.starts.rows.flatten()[chosen] + torch.arange(need, device=self.device).unsqueeze(1)  # [need, S]
        slots = self._slots(at, stream)
        rows = tree_map(lambda x: x.index_select(0, slots.flatten()).unflatten(0, slots.shape), self.rows)
        flags = rows["flags"]
        terminated = flags & _TERMINATED != 0
        # The successor must be of the same episode and known, except after a termination.
        lost = (flags[1:] & (_RESET | _UNKNOWN) != 0) & ~terminated[:-1]
        valid = (flags & _VALID != 0) & something
        valid[:-1] &= ~lost
        if self.context is None:
            start = tree_map(lambda x: x.flatten(0, 1).index_select(0, chosen), self.starts.states)
        else:
            start = tree_map(lambda x: x.expand(sequences, *x.shape[1:]).clone(), self._blank)
        return Segment(
            obs=rows["obs"],
            actions=rows["actions"],
            resets=flags & _RESET != 0,
            rewards=rows["rewards"],
            terminated=terminated,
            truncated=flags & _TRUNCATED != 0,
            valid=valid,
            start_state=start,
            action_mask=rows.get("action_mask"),
            chunk_states=[start],
            index=self.starts.numbers.index_select(0, chosen // self.num_envs) * self.num_envs + stream,
        )

    @torch.no_grad()
    def before(self, index: Tensor, rows: int) -> tuple[Any, Tensor]:
        """Observations and resets [rows, S] of the rows before sampled sequences. Where they are not held any more, no reset and the
        oldest observation that is."""
        stream = index % self.num_envs
        start = self.starts.rows[index // self.num_envs % len(self.starts.rows), stream]
        at = start + torch.arange(-rows, 0, device=self.device).unsqueeze(1)
        oldest = (self.written - self.stream_rows).clamp(min=0)[stream]
        slots = self._slots(torch.maximum(at, oldest), stream)
        found = tree_map(lambda x: x.index_select(0, slots.flatten()).unflatten(0, slots.shape), self.rows)
        return found["obs"], (found["flags"] & _RESET != 0) & (at >= oldest)

    @torch.no_grad()
    def update_priorities(self, index: Tensor, priorities: Tensor) -> None:
        """Set the priorities [S] of sampled sequences; those that are gone are passed over. New ones get the largest so far."""
        if not self.prioritized:
            raise ValueError("this buffer has no priorities; make it with prioritized=True")
        if index.shape != priorities.shape or index.dim() != 1:
            raise ValueError(
                f"index has shape {tuple(index.shape)}, priorities {tuple(priorities.shape)}; both are [S]"
            )
        if index.is_floating_point() or index.dtype == torch.bool:
            raise ValueError(f"index has dtype {index.dtype}, expected torch.int64: the .index of what was sampled")
        if values_are_readable(priorities) and not bool((priorities.isfinite() & (priorities >= 0)).all()):
            raise ValueError("priorities must be finite and at least 0")
        oldest = self.written - self.stream_rows
        self.starts.prioritize(index.to(self.device).long(), priorities.to(self.device, torch.float32), oldest)

    def _take_note_of(self, length: int) -> None:
        """States are kept at least this often from now on."""
        if self._length is None and self._longest_chunk > length:
            warnings.warn(
                f"states were kept every {self._longest_chunk} rows, so sequences of {length} never reach the rows between; "
                f"collect with bptt={length} or less",
                stacklevel=4,
            )
        self._length = length if self._length is None else min(length, self._length)

    def _can_start(self, need: int) -> Tensor:
        """[N, B]: the starts whose sequences are held as a whole."""
        rows = self.starts.rows
        oldest = (self.written - self.stream_rows).clamp(min=0)
        return (rows >= oldest) & (rows + need <= self.written)

    def _draw(self, count: int, need: int) -> tuple[Tensor, Tensor]:
        """Which starts, flat in [N, B]; and whether there is one."""
        weights = self._can_start(need).long()
        if self.prioritized:
            weights = weights * self.starts.weights()
        # Whole numbers, so that sums are exact on every device and what weighs nothing is never drawn.
        total = weights.flatten().cumsum(0)
        whole = total[-1]
        if values_are_readable(whole) and not bool(whole):
            raise ValueError(f"nothing can be sampled yet: no environment has a start and {need} rows after it")
        point = torch.rand(count, dtype=torch.float64, generator=self.generator, device=self.device) * whole
        point = torch.minimum(point.long(), whole - 1)
        return torch.searchsorted(total, point, right=True).clamp(max=len(total) - 1), whole > 0

    # --- saving ------------------------------------------------------------------------------------------------------

    def counters(self) -> dict[str, Any]:
        """All but rows and starts: plain data."""
        return {
            "capacity": self.capacity,
            "num_envs": self.num_envs,
            "prioritized": self.prioritized,
            "context": self.context,
            "generator": self.generator.get_state(),
            "steps": self.steps,
            "written": _copy(self.written),
            "nonfinite": _copy(self._nonfinite),
            "open_truncation": _copy(self._open_truncation),
            "has_added_rows": self._has_added_rows,
            "length": self._length,
            "longest_chunk": self._longest_chunk,
            "start_steps": list(self.starts.steps),
            "start_count": self.starts.count,
            "start_slots": len(self.starts.rows),
            "priorities": _copy(self.starts.priorities),
            "largest_priority": float(self.starts.largest),
            "blank": None if self._blank is None else tree_map(_copy, self._blank),
        }

    def state_dict(self) -> dict[str, Any]:
        """Plain data, rows included: a copy."""
        return {
            **self.counters(),
            "rows": tree_map(_copy, self.rows),
            "start_rows": _copy(self.starts.rows),
            "states": tree_map(_copy, self.starts.states),
        }

    def load_state_dict(self, d: dict[str, Any]) -> None:
        """Continue from a `state_dict`."""
        check_counters(self, d)
        self.restore(
            d, *(tree_map(lambda x: x.to(self.device, copy=True), d[k]) for k in ("rows", "start_rows", "states"))
        )

    def save_files(self, folder: str | Path) -> dict[str, Any]:
        """Write to a folder what was added since the last time. Returns what a checkpoint must hold to load it."""
        return self._files_in(folder).save(self)

    def prune_files(self, folder: str | Path) -> None:
        """Delete files whose rows were overwritten. Call it once the checkpoint with what `save_files` returned is written."""
        self._files_in(folder).prune()

    def load_files(self, folder: str | Path, manifest: dict[str, Any]) -> None:
        """Continue from what `save_files` wrote and returned. ValueError if a file is damaged or missing; nothing changes then."""
        files = self._files_in(folder)
        files.load(self, manifest)
        self._files = {files.folder: files}

    def _files_in(self, folder: str | Path) -> BufferFiles:
        folder = Path(folder).absolute()
        if folder not in self._files:
            self._files[folder] = BufferFiles(folder, self.num_envs)
        return self._files[folder]

    def restore(self, d: dict[str, Any], rows: dict[str, Any], start_rows: Tensor, states: State) -> None:
        """Continue from `counters()`, with these tensors as storage."""
        self._files = {}  # they hold other rows
        self.rows, self.starts.rows, self.starts.states = rows, start_rows, states
        self._blank = None if d["blank"] is None else tree_map(lambda x: x.to(self.device, copy=True), d["blank"])
        self.generator.set_state(d["generator"])
        for name, own in (
            ("written", self.written),
            ("nonfinite", self._nonfinite),
            ("open_truncation", self._open_truncation),
        ):
            own.copy_(d[name])
        self.steps, self._has_added_rows = d["steps"], d["has_added_rows"]
        self._length, self._longest_chunk = d["length"], d["longest_chunk"]
        self.starts.steps, self.starts.count = deque(d["start_steps"]), d["start_count"]
        self.starts.number_slots()
        self.starts.priorities = d["priorities"].to(self.device, copy=True)
        self.starts.largest.fill_(float(d["largest_priority"]))


def _copy(x: Tensor) -> Tensor:
    return x.to("cpu", copy=True)


def _check_count(**counts: Any) -> None:
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{name} must be an integer of at least 0, got {value!r}")


def _shapes(tree: Any) -> dict[str, str]:
    return {name: f"{name} {list(x.shape)}".strip() for name, x in named_leaves(tree).items()}


def _finite(tree: Any) -> tuple[Any, Tensor]:
    """Leaves [T, B, ...] with zeros for numbers that are not finite; and which rows [T, B] had some."""
    odd: list[Tensor] = []

    def clean(x: Tensor) -> Tensor:
        if not x.is_floating_point() and not x.is_complex():
            odd.append(torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device))
            return x
        wrong = ~x.isfinite()
        odd.append(wrong.reshape(*x.shape[:2], -1).any(2))
        return x.masked_fill(wrong, 0)

    cleaned = tree_map(clean, tree)
    return cleaned, torch.stack(odd).any(0)


def _flags(resets: Tensor, terminated: Tensor, truncated: Tensor, valid: Tensor, unknown: Tensor) -> Tensor:
    """One byte per row."""
    parts = zip(
        (resets, terminated, truncated, valid, unknown),
        (_RESET, _TERMINATED, _TRUNCATED, _VALID, _UNKNOWN),
        strict=True,
    )
    return torch.stack([flag.to(torch.uint8) * bit for flag, bit in parts]).sum(0, dtype=torch.uint8)


def check_reset_modes(core: Core, next_step: bool) -> None:
    """Raise ValueError if an added final row would be played through a state that goes on. next_step: the autoreset mode."""
    mode = reset_mode_of(core)
    if mode != "zero" and not next_step:
        raise ValueError(
            f"reset mode {mode!r} with a buffer of sequences needs an environment with NEXT_STEP autoreset: final "
            "observations of others are added as rows, which the memory never played; use reset='zero' or 'learned'"
        )
