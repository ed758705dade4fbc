"""`OnPolicy`: algorithms that learn from each rollout in epochs of minibatches, then throw it away.

Minibatches are whole sequences, each from the state that the rollout had there, with resets inside: what is trained is what was
played. A subclass writes a `Loss` and says what its policy is. How a minibatch is executed is an engine's business.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from holdfast import plain_checks as check
from holdfast.algorithms import auto_sizes, optimizers
from holdfast.algorithms.base import Algorithm, Finish, Progress, RunContext, Task
from holdfast.algorithms.loss import Loss
from holdfast.config import OnPolicyConfig
from holdfast.distributed.metrics import Metric
from holdfast.policies.base import RecurrentPolicy, autocast, autocast_dtype
from holdfast.rollout.segment import Segment
from holdfast.spans import span
from holdfast.state import State, tree_map

UPDATE_METRICS = (
    Metric("train/grad_norm", "grad norm"),
    Metric("train/skipped_steps"),
    Metric("train/learning_rate", "learn rate", form="exponent"),
    Metric("train/epochs"),
)


class OnPolicy(Algorithm):
    """The update: epochs of minibatches over one rollout. With several ranks each has a part of the rollout and takes its part of
    every minibatch; averages are over the steps of all of them."""

    Config = OnPolicyConfig
    metrics: tuple[Metric, ...] = UPDATE_METRICS

    def __init__(self, policy: RecurrentPolicy, config: Any, run: RunContext) -> None:
        super().__init__(policy, config, run)
        groups = optimizers.groups_of(policy.parameters(), policy.core, config.learning_rate, config)
        self.optimizer = run.engines.optimizer(groups, config)
        self.engine_for = run.engines.minibatches(policy, config, self.optimizer)
        self.rates = optimizers.LearningRates([self.optimizer], config)

    @abstractmethod
    def make_loss(self, segment: Segment, progress: Progress) -> Loss:
        """The loss of this update. Also the place to move statistics before the update."""

    def observe(self, segment: Segment) -> Tensor | None:
        """Numbers of the rollout on the device, float64, for `describe`; before the update."""
        return None

    def describe(self, observed: list[float]) -> dict[str, float]:
        """Metrics from the numbers that `observe` gave."""
        return {}

    def has_gone_far(self, means: Mapping[str, float]) -> bool:
        """Whether to stop after this epoch, from the means of its terms. Called only if `looks_at_epochs`."""
        return False

    looks_at_epochs = False
    """Whether the host waits for each epoch's terms."""

    @classmethod
    def choose_sizes(cls, config: Any, task: Task) -> tuple[Any, str]:
        return auto_sizes.choose_sizes(config, task)

    @classmethod
    def choose_threads(cls, config: Any, num_envs: int) -> int:
        return auto_sizes.threads_for(config, num_envs)

    # --- the update ---------------------------------------------------------------------------------------------------

    def start_update(self, segment: Segment, progress: Progress) -> Finish:
        with span("update"):
            return self._start_update(segment, progress)

    def _start_update(self, segment: Segment, progress: Progress) -> Finish:
        config, ranks, device = self.config, self.run.ranks, segment.resets.device
        rate = self.rates.set(progress.fraction)
        observed = self.observe(segment)
        loss = self.make_loss(segment, progress)
        targets = loss.targets(segment)
        batch = targets.as_sequences(config.bptt)
        engine = self.engine_for(batch, loss)
        sums, count, epoch = torch.zeros(len(engine.names), device=device), 0, 0
        for epoch in range(config.epochs):
            if config.refresh_states and epoch > 0 and config.sequences_per_env > 1:
                batch = batch.changed(start_state=self.refreshed_starts(segment))
                engine.load(batch, loss)
            before, count_before = sums.clone() if self.looks_at_epochs else sums, count
            minibatches = self.minibatches(batch.num_envs, device)
            for columns, weight in zip(minibatches, self._rank_weights(batch.valid, minibatches)):
                sums += engine.step(columns, weight)
                count += 1
            if self.looks_at_epochs:
                means, _ = self._means(engine.names, ranks.sum(sums - before).tolist(), count - count_before)
                if self.has_gone_far(means):
                    break
        numbers = [ranks.sum(sums).double(), *([] if observed is None else [observed])]
        read, epochs = self.run.engines.read_later(torch.cat(numbers)), float(epoch + 1)

        def finish() -> dict[str, float]:
            with span("waiting for the update"):
                found = read()
            means, skipped = self._means(engine.names, found[: len(engine.names)], count)
            return {
                **{f"train/{name}": number for name, number in means.items()},
                **self.describe(found[len(engine.names) :]),
                "train/skipped_steps": skipped,
                "train/learning_rate": rate,
                "train/epochs": epochs,
            }

        return finish

    def _means(self, names: tuple[str, ...], sums: list[float], count: int) -> tuple[dict[str, float], float]:
        """The mean of each number over the steps taken, and how many steps were skipped."""
        total = dict(zip(names, sums))
        skipped = total.pop("skipped") / self.run.ranks.size  # all ranks skip the same ones
        taken = count - skipped or float("nan")
        return {name: number / taken for name, number in total.items()}, skipped

    def minibatches(self, columns: int, device: torch.device) -> list[Tensor | None]:
        """The columns of each minibatch of an epoch, shuffled; [None] for one minibatch of all."""
        if self.config.minibatches == 1:
            return [None]
        on_gpu = device.type == "cuda"  # pinned, so that the copy does not wait for what runs there
        order = torch.randperm(columns, generator=self.generator, pin_memory=on_gpu)
        return list(order.to(device, non_blocking=on_gpu).tensor_split(self.config.minibatches))

    def _rank_weights(self, valid: Tensor, minibatches: list[Tensor | None]) -> list[Any]:
        """This rank's part of each minibatch's real steps, times the number of ranks: with these weights an average over
        ranks is an average over steps."""
        ranks = self.run.ranks
        if not ranks.joined:
            return [1.0] * len(minibatches)
        mine = torch.stack([(valid if c is None else valid.index_select(1, c)).sum() for c in minibatches]).double()
        return list((ranks.size * mine / ranks.sum(mine).clamp(min=1)).float())

    @torch.no_grad()
    def refreshed_starts(self, segment: Segment) -> State:
        """The start state of every chunk under the current weights, in the order of `Segment.as_sequences`."""
        states, state = [], segment.start_state
        for begin in range(0, segment.num_steps, self.config.sequence_length):
            states.append(state)
            part = segment.steps(begin, begin + self.config.sequence_length)
            with autocast(segment.resets.device, autocast_dtype(self.config.precision)):
                _, state = self.policy.features(part.obs, state, part.resets)
        return tree_map(lambda *s: torch.cat(s), *states)

    # --- saving -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict(), **super().state_dict()}

    def load_state_dict(self, d: dict[str, Any]) -> None:
        optimizers.restore(self.optimizer, d["optimizer"], self.config)
        super().load_state_dict(d)

    def check(self, d: dict[str, Any]) -> None:
        check.mapping(d, self.name, "optimizer", "generator")
        check.generator_state(d["generator"], f"{self.name} generator")
        optimizers.check_state(d["optimizer"], self.optimizer, self.config)
