"""A captured rollout without a GPU: the function that a graph would hold is called where the graph would be replayed."""

from __future__ import annotations

import time
from typing import Any

import torch

from holdfast.engines.cuda_graph import copy_into
from holdfast.engines.graph_rollout import CapturedRollout, GraphCollector
from holdfast.state import map_tensors, tree_map


class UncapturedRollout(CapturedRollout):
    """Like a graph, it reads and writes the same tensors in every rollout."""

    def __init__(self, collector: GraphCollector) -> None:
        self.collector, self.acting = collector, collector._make_acting()
        self.device, self.reader, self.outputs = collector.adapter.device, None, None
        self.inputs = tree_map(torch.clone, collector.rollout_inputs())

    @torch.no_grad()
    def replay(self) -> None:
        played = self.collector.roll(self.inputs, self.collector.steps, self.acting)
        if self.outputs is None:
            self.outputs = map_tensors(torch.clone, played)
        else:
            copy_tensors(self.outputs, played)

    def moment(self) -> Any:
        return time.perf_counter()


def copy_tensors(target: Any, source: Any) -> None:
    tree_map(lambda a, b: copy_into(a, b) if isinstance(a, torch.Tensor) else None, target, source)


class UncapturedCollector(GraphCollector):
    def _capture(self) -> Any:
        return UncapturedRollout(self)
