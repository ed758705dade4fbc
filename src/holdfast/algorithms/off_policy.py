"""`OffPolicy`: algorithms that keep what was played in a buffer of sequences, and learn from samples of it.

    segment ──► buffer.add ──► gradient_steps x ( buffer.sample ──► learn(batch) ──► terms )

A subclass writes `learn`: losses in plain PyTorch, and `step`, which ends it. Nothing in it looks at a number on the device or counts
on the host, so every call runs the same operations with the same constants, as a captured graph does. Rows of
a batch are [burn_in + length + 1, S]: the first bring the memory up to date, the last is only the successor of the one before it.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from abc import abstractmethod
from pathlib import Path
from typing import Any

import torch
from gymnasium.vector.utils import create_empty_array
from torch import Tensor, nn

from holdfast import plain_checks as check
from holdfast.algorithms import optimizers
from holdfast.algorithms.base import Algorithm, Finish, Progress, RunContext, Task, relative_distance
from holdfast.algorithms.optimizers import Groups, groups_of
from holdfast.config import OffPolicyConfig, given
from holdfast.cores.window import WINDOW
from holdfast.distributed.metrics import Metric
from holdfast.policies.base import PolicyOutput, RecurrentPolicy, autocast, autocast_dtype
from holdfast.rollout.buffer import SequenceBuffer, check_reset_modes
from holdfast.rollout.buffer_files import most_bytes_on_disk
from holdfast.rollout.segment import Segment
from holdfast.spans import span
from holdfast.state import State, leaves, tree_map

HISTORY = 4
"""So many training sequences before a stored start are replayed to see how stale it is."""
SEGMENT = 32
"""Steps of all environments between updates."""


class OffPolicy(Algorithm):
    """The buffer, the optimizers, a target network, and the loop over gradient steps."""

    Config = OffPolicyConfig
    records = frozenset(("params", "final_obs"))
    inputs = ("obs", "prev_action")
    metrics: tuple[Metric, ...] = (
        Metric("train/grad_norm", "grad norm"),
        Metric("train/skipped_steps"),
        Metric("train/learning_rate", "learn rate", form="exponent"),
        Metric("train/gradient_steps", "gradient steps", form="count"),
        Metric("memory/staleness_after_burn_in", over_ranks="mean"),
    )
    keeps_files = True
    terms: tuple[str, ...] = ()
    """What `learn` gives, in order; "grad_norm" and "skipped" come from `step`."""

    target: nn.Module
    """The network that targets are computed with."""

    def __init__(self, policy: RecurrentPolicy, config: Any, run: RunContext) -> None:
        check_reset_modes(policy.core, run.plays_final_obs)
        context = policy.core.context()
        if config.burn_in < (context or 0):
            raise ValueError(
                f"this memory holds the last {context} steps, which the buffer does not store: {given('burn_in', config.burn_in)} "
                f"must be at least {context}"
            )
        super().__init__(policy, config, run)
        if self.auxiliary is not None:
            self.terms = (*self.terms, *self.auxiliary.names)
        self.buffer = SequenceBuffer(
            config.buffer_size // run.ranks.size,
            run.num_envs,
            device=run.device,
            seed=run.seed,
            prioritized=getattr(config, "prioritized", False),
            context=context,
        )
        self.optimizers = [run.engines.optimizer(groups, config) for groups in self.groups()]
        self.target = self.make_target()  # of the weights that all ranks have now
        self.rates = optimizers.LearningRates(self.optimizers, config)
        self.gradient_steps = 0
        self.reward_factor = torch.ones((), device=run.device)
        """What rewards are multiplied by in `learn`."""

    @abstractmethod
    def make_target(self) -> nn.Module:
        """A `target_copy` of what targets are computed with."""

    def groups(self) -> list[Groups]:
        """The groups of each optimizer. Gradients of each optimizer are clipped together."""
        return [groups_of(self.policy.parameters(), self.policy.core, self.config.learning_rate, self.config)]

    @abstractmethod
    def learn(self, batch: Segment) -> dict[str, Tensor]:
        """One gradient step on sampled sequences: losses, `step`, the target network. Gives the numbers of `terms`."""

    @classmethod
    def choose_sizes(cls, config: Any, task: Task) -> tuple[Any, str]:
        """Few environments: fresh experience comes often."""
        envs = config.num_envs or task.num_envs or max(task.ranks, 16 if task.fast_env or task.on_gpu else 4)
        window = config.num_layers * ((config.memory_span or WINDOW) - 1) if config.core == "window" else 0
        filled = dataclasses.replace(
            config,
            burn_in=max(config.burn_in, window),
            num_envs=envs,
            num_steps=config.num_steps or SEGMENT,
            batch_size=config.batch_size or (32 if task.on_gpu else 8),
            head_sizes=(2 * [256 if task.on_gpu else 128]) if config.head_sizes is None else config.head_sizes,
        )
        chosen = [name for name in ("num_envs", "num_steps", "batch_size") if not getattr(config, name)]
        texts = [f"{', '.join(chosen)} chosen for a {'GPU' if task.on_gpu else 'CPU'}"] if chosen else []
        texts += [f"burn_in of {window}: what the window holds is not stored"] if window > config.burn_in else []
        return filled, "; ".join(texts)

    # --- the update ---------------------------------------------------------------------------------------------------

    def start_update(self, segment: Segment, progress: Progress) -> Finish:
        config = self.config
        rate = self.rates.set(progress.fraction)
        if self.reward_scale is not None:
            self.reward_factor.fill_(self.reward_scale.value)
        with span("adding to the buffer"):
            self.buffer.add(segment)
        count, sums = 0, torch.zeros(len(self.terms) + 2, device=self.run.device)
        played = progress.steps + config.steps_per_segment
        if played >= config.warmup_steps and self.all_ready():
            count = config.gradient_steps
        for _ in range(count):
            with span("gradient step"):
                with span("sampling"):
                    batch = self.buffer.sample(config.batch_size, config.train_length, config.burn_in)
                found = self.learn(batch)
                self.gradient_steps += 1
                numbers = torch.stack([found[name] for name in (*self.terms, "grad_norm")])
                sums[:-1] += torch.where(found["skipped"] > 0, 0.0, numbers)
                sums[-1] += found["skipped"]
        ranks = self.run.ranks
        read, taken = self.run.engines.read_later(ranks.sum(sums.double())), float(self.gradient_steps)

        def finish() -> dict[str, float]:
            *means, skipped = (number / ranks.size for number in read())
            steps = count - skipped or float("nan")
            return {
                **{f"train/{name}": number / steps for name, number in zip((*self.terms, "grad_norm"), means)},
                "train/skipped_steps": skipped,
                "train/learning_rate": rate,
                "train/gradient_steps": taken,
                "memory/staleness_after_burn_in": math.nan,  # unless it is measured
            }

        return finish

    def all_ready(self) -> bool:
        """Whether every rank can sample: gradients are averaged, so all take a step or none does."""
        ready, ranks = self.buffer.ready(self.config.train_length, self.config.burn_in), self.run.ranks
        if not ranks.joined:
            return ready
        return int(ranks.sum(torch.tensor(int(ready), device=self.run.device))) == ranks.size

    @torch.no_grad()
    def staleness(self, segment: Segment) -> dict[str, float]:
        """How far stored starts are from the states that the current weights give for the rows before them, and what burn-in leaves
        of that: RMS of the difference over that of the state. Of starts whose episode began not too long before."""
        config, buffer, stale, left = self.config, self.buffer, math.nan, math.nan
        if buffer.context is not None:
            stale = left = 0.0  # nothing is stored
        elif buffer.ready(config.train_length, config.burn_in):
            drawn = buffer.generator.get_state()
            batch = buffer.sample(config.batch_size, config.train_length, config.burn_in)
            buffer.generator.set_state(drawn)  # looking changes nothing
            obs, resets = buffer.before(batch.index, HISTORY * (config.burn_in + config.train_length))
            known = resets.any(0) & ~batch.resets[0] & (config.reset in ("zero", "learned"))
            if known.any():
                batch, columns = batch.select(known.nonzero().squeeze(1)), known.nonzero().squeeze(1)
                fresh = self.policy.initial_state(len(columns))
                with autocast(self.run.device, autocast_dtype(config.precision)):
                    obs = tree_map(lambda o: o.index_select(1, columns), obs)
                    _, state = self.policy.features(obs, fresh, resets[:, columns])
                    stale = relative_distance(batch.start_state, state)
                    left = relative_distance(
                        *(self.after_burn_in(batch, self.policy, s)[1] for s in (batch.start_state, state))
                    )
        return {"memory/staleness": stale, "memory/staleness_after_burn_in": left}

    def auxiliary_terms(self, features: Tensor, dist: Any, state: State, rows: Segment) -> dict[str, Tensor]:
        """The losses that the policy adds, by name, and their weighted sum, "loss"."""
        none = {"loss": torch.zeros((), device=features.device)}
        return (
            none
            if self.auxiliary is None
            else self.auxiliary.add(none, features, PolicyOutput(dist, None, state), rows)
        )

    def step(self, loss: Tensor) -> dict[str, Tensor]:
        """Differentiate a loss and step every optimizer, unless loss or gradients are not finite."""
        parameters = [[p for group in optimizer.param_groups for p in group["params"]] for optimizer in self.optimizers]
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        with torch.no_grad():
            gradients = [[p.grad for p in part if p.grad is not None] for part in parameters]
            whole = self.average([g for part in gradients for g in part], loss.detach())
            norms = [torch.linalg.vector_norm(torch.stack(torch._foreach_norm(part))) for part in gradients]
            skipped = (~(whole + sum(norms)).isfinite()).float()
            for optimizer, norm in zip(self.optimizers, norms):
                optimizers.clipped_step(optimizer, norm, self.config.max_grad_norm, skipped)
            return {"grad_norm": torch.linalg.vector_norm(torch.stack(norms)), "skipped": skipped}

    def average(self, gradients: list[Tensor], loss: Tensor) -> Tensor:
        """Average gradients over ranks, in place and at once; the mean loss."""
        if not self.run.ranks.joined:
            return loss
        flat = self.run.ranks.sum_(torch.cat([g.flatten() for g in [*gradients, loss.to(gradients[0].dtype)]]))
        *parts, loss = flat.div_(self.run.ranks.size).split([*(g.numel() for g in gradients), 1])
        torch._foreach_copy_(gradients, [part.view_as(g) for part, g in zip(parts, gradients)])
        return loss.squeeze(0)

    def after_burn_in(self, batch: Segment, network: RecurrentPolicy, start: State) -> tuple[Segment, State]:
        """The rows that are trained on, and the state before them of a network that began at `start`."""
        burn_in = self.config.burn_in
        if not burn_in:
            return batch, start
        before = batch.steps(0, burn_in)
        with torch.no_grad():
            _, state = network.features(before.obs, start, before.resets)
        return batch.steps(burn_in, batch.num_steps), state

    def first_lines(self) -> list[str]:
        """What the buffer takes, when it is full."""
        config, run = self.config, self.run
        row = bytes_of_space(run.observation_space) + bytes_of_space(run.action_space) + 5  # reward and flags
        state, gap = 0, config.sequence_length
        if self.buffer.context is None:
            dtype = self.policy.core.dtype_and_device()[0]
            shapes = leaves(self.policy.core.row_shapes())
            state = sum(math.prod(shape.shape) * (shape.dtype or dtype).itemsize for shape in shapes)
            gap *= max(1, min(math.ceil(state / row / gap), config.train_length // gap))
        per_row, rows = row + state / gap, self.buffer.num_envs * self.buffer.stream_rows * run.ranks.size
        at_once = config.steps_per_segment * config.checkpoint_every or rows
        disk = most_bytes_on_disk(round(rows * per_row), round(at_once * per_row))
        states = f", a state of {state:,} every {gap}" if state else ""
        sizes = f"{rows * per_row / 1e6:,.0f} MB in memory, at most {disk / 1e6:,.0f} MB on disk"
        return [f"buffer  {rows:,} rows of {row:,} bytes{states}: {sizes}"]

    # --- saving -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "target": {name: p.detach().cpu() for name, p in self.target.named_parameters()},
            "gradient_steps": self.gradient_steps,
            **super().state_dict(),
        }

    def load_state_dict(self, d: dict[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, d["optimizers"]):
            optimizers.restore(optimizer, state, self.config)
        with torch.no_grad():
            for name, p in self.target.named_parameters():
                p.copy_(d["target"][name])
        self.gradient_steps = d["gradient_steps"]
        super().load_state_dict(d)

    def check(self, d: dict[str, Any]) -> None:
        check.mapping(d, self.name, "optimizers", "target", "gradient_steps", "generator")
        check.generator_state(d["generator"], f"{self.name} generator")
        check.integer(d["gradient_steps"], f"{self.name} gradient_steps", 0)
        saved = check.sequence(d["optimizers"], f"{self.name} optimizers", len(self.optimizers))
        for state, optimizer in zip(saved, self.optimizers):
            optimizers.check_state(state, optimizer, self.config)
        own = dict(self.target.named_parameters())
        for name, value in check.mapping(d["target"], f"{self.name} target", *own).items():
            if name not in own:
                raise ValueError(f"{self.name} target has {name!r:.40}, which this network does not have")
            check.tensor(value, f"{self.name} target {name}", own[name].shape, own[name].dtype)

    def save_files(self, folder: Path) -> dict[str, Any]:
        return self.buffer.save_files(folder)

    def prune_files(self, folder: Path) -> None:
        self.buffer.prune_files(folder)

    def load_files(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.buffer.load_files(folder, manifest)


def bytes_of_space(space: Any) -> int:
    """Of an observation or action as a rollout holds it; float64 becomes float32."""
    arrays = leaves(create_empty_array(space, 1))
    return sum(x.size * (4 if x.dtype == "float64" else x.itemsize) for x in arrays)


def target_copy(network: nn.Module) -> Any:
    """The same network with weights of its own and the same buffers: statistics of observations are those of the policy."""
    other = copy.deepcopy(network)
    for mine, its in zip(network.modules(), other.modules(), strict=True):
        for name, buffer in mine.named_buffers(recurse=False):
            setattr(its, name, buffer)
    return other.requires_grad_(False)


@torch.no_grad()
def move_target(target: nn.Module, network: nn.Module, tau: float | Tensor) -> None:
    """Bring the weights of a target network closer to those of the network that it is a copy of. tau: 1 copies them; a tensor on
    their device is not looked at from the host."""
    own: list[Tensor] = list(target.parameters())
    weight: Any = [tau] * len(own) if isinstance(tau, Tensor) else tau
    torch._foreach_lerp_(own, [p.detach() for p in network.parameters()], weight)


def mean_over(valid: Tensor, numbers: Tensor) -> Tensor:
    """The mean of numbers [T, S] over the rows that were really played."""
    return torch.where(valid, numbers, 0.0).sum() / valid.sum().clamp(min=1)
