"""Sequence layers of language models, trained on rows that hold several documents end to end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from holdfast.doctor.subjects.base import RecordedSegment, Replay, Subject, SubjectStep

#: how a layer is told where documents begin; the first documents of the row are those of `lengths`
Boundaries = Literal["cu_seqlens", "segment_ids", "position_ids"]


class Packed(Subject):
    """A layer that is called with one row of documents, `layer(x [1, N, I], cu_seqlens=...)`, and returns `[1, N, O]`.

    Each document is also played by itself, as a generator would do: token by token, each time with the whole document so
    far and without boundaries. The two must agree, and no gradient may go from one document to another. Documents are
    the episodes of the report, and rows its environments.

    `boundaries`: the form of the boundaries, and the keyword unless `keyword` names another. `"cu_seqlens"`: int32
    `[documents + 1]`, where documents begin and end. `"segment_ids"`: int32 `[1, N]`, 1, 2, ... (0 is often padding);
    `"position_ids"`: int64 `[1, N]`, from 0 in each document. `call(x, lengths)` replaces all that; `lengths` of the
    documents is None for one document by itself. Of a tuple, the first part counts.
    """

    framework = "packed"

    def __init__(
        self,
        layer: nn.Module,
        input_size: Any,
        *,
        boundaries: Boundaries = "cu_seqlens",
        keyword: str | None = None,
        call: Callable[[Tensor, Sequence[int] | None], Any] | None = None,
        num_envs: int = 5,
        name: str | None = None,
    ) -> None:
        super().__init__(input_size, name=name or type(layer).__name__)
        if boundaries not in _FORMS:
            raise ValueError(f"subjects.Packed: boundaries must be one of {', '.join(_FORMS)}, got {boundaries!r}")
        self.layer, self.call, self.num_envs = layer, call, num_envs
        self.boundaries, self.keyword = boundaries, keyword or boundaries
        self._documents: list[Tensor] = []  # per row, the tokens of its present document

    def begin(self, num_envs: int) -> None:
        self._documents = [torch.empty(0)] * num_envs

    def step(self, obs: Any, terminated: Tensor, truncated: Tensor, env_ids: Tensor) -> SubjectStep:
        for row, first in enumerate((terminated | truncated).tolist()):
            document = self._documents[row]
            token = obs[row][None]
            self._documents[row] = token if first or not len(document) else torch.cat([document, token])
        lengths = [len(document) for document in self._documents]
        outputs: dict[int, Tensor] = {}
        with torch.no_grad():
            for length in sorted(set(lengths)):
                rows = [row for row, n in enumerate(lengths) if n == length]
                last = self._run(torch.stack([self._documents[row] for row in rows]), None)[:, -1]
                outputs.update(zip(rows, last))
        return SubjectStep(torch.stack([outputs[row] for row in range(len(lengths))]))

    def mark(self) -> Any:
        return tuple(self._documents)

    def replay(self, segment: RecordedSegment) -> Replay:
        """One call for each row: what its document holds before the segment, then the segment."""
        rows = [self._row(segment, row) for row in range(segment.terminated.shape[1])]
        outputs = [self._run(x[None], lengths)[0, before:] for x, lengths, before in rows]
        return Replay(torch.stack(outputs, dim=1))

    def minibatches(self, segment: RecordedSegment) -> Replay:
        """All rows end to end, in one call."""
        rows = [self._row(segment, row) for row in range(segment.terminated.shape[1])]
        lengths = [length for _, inside, _ in rows for length in inside]
        whole = self._run(torch.cat([x for x, _, _ in rows])[None], lengths)[0]
        parts = whole.split([len(x) for x, _, _ in rows])
        return Replay(torch.stack([part[before:] for part, (_, _, before) in zip(parts, rows)], dim=1))

    def _row(self, segment: RecordedSegment, row: int) -> tuple[Tensor, list[int], int]:
        """(tokens `[N, ...]`, lengths of the documents, how many tokens are older than the segment)."""
        older, tokens = segment.start[row], segment.obs[:, row]
        before = len(older)
        first = (segment.terminated | segment.truncated)[:, row]
        cuts = [before + t for t in first.nonzero().flatten().tolist() if before + t > 0]
        x = torch.cat([older, tokens]) if before else tokens
        return x, [end - start for start, end in pairwise([0, *cuts, len(x)])], before

    def _run(self, x: Tensor, lengths: Sequence[int] | None) -> Tensor:
        if self.call is not None:
            result = self.call(x, lengths)
        elif lengths is None:
            result = self.layer(x)
        else:
            told = _FORMS[self.boundaries](torch.tensor(lengths, device=x.device))
            result = self.layer(x, **{self.keyword: told})
        y: Tensor = result[0] if isinstance(result, (tuple, list)) else result
        return y


_FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "cu_seqlens": lambda lengths: torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int(),
    "segment_ids": lambda lengths: (torch.arange(len(lengths)).to(lengths) + 1).repeat_interleave(lengths).int()[None],
    "position_ids": lambda lengths: torch.cat([torch.arange(int(n)).to(lengths) for n in lengths])[None],
}
