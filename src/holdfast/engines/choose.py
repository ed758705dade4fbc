"""Which engine runs what: the only place that decides, from policy, environment, config, device and ranks.

A rollout is played step by step (`rollout.Collector`; on a CPU with the policy in C) or as one CUDA graph. A minibatch runs
in C, as a CUDA graph, or through autograd, which takes everything. Each choice says what keeps a faster engine from being
used.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from holdfast.algorithms.ppo import PPO, LossSettings, MinibatchEngine
from holdfast.config import TrainConfig
from holdfast.distributed.ranks import ALONE, Ranks
from holdfast.engines import fused_policy, graph_rollout, graph_step, graph_update, native_obstacles, native_step
from holdfast.engines.cuda_graph import NotCapturable
from holdfast.engines.eager import AutogradMinibatches
from holdfast.engines.fused_update import FusedMinibatches
from holdfast.engines.graph_rollout import GraphCollector
from holdfast.engines.graph_step import StepGraphCollector
from holdfast.engines.graph_update import GraphMinibatches
from holdfast.engines.minibatch import make_adam
from holdfast.engines.native import NativeMinibatches
from holdfast.engines.native_step import NativeStepCollector
from holdfast.engines.queued_update import QueuedPPO
from holdfast.engines.ranks import copy_weights_from_leader, wrap_for_averaging
from holdfast.kernels.cpu import recurrence as native_kernel
from holdfast.policies.base import RecurrentPolicy
from holdfast.policies.precision import autocast_dtype
from holdfast.rollout.async_collector import AsyncCollector
from holdfast.rollout.collector import Collector
from holdfast.rollout.segment import Segment


class Choice(NamedTuple):
    """An engine, and what keeps a faster one from being used ("" if none is faster)."""

    engine: str
    because: str = ""

    def __str__(self) -> str:
        return f"{self.engine}, because {self.because}" if self.because else self.engine


STEP_BY_STEP, GRAPH, NATIVE, AUTOGRAD = "step by step", "CUDA graph", "C, without autograd", "autograd"
STEP_GRAPH = "step by step, the policy a CUDA graph"
STEP_IN_C = "step by step, the policy in C"
IN_BATCHES = "asynchronous batches"


# --- rollouts --------------------------------------------------------------------------------------------------------


def rollout_choice(env: Any, device: torch.device) -> Choice:
    """How rollouts in this environment run."""
    if getattr(env, "is_asynchronous", False):
        return Choice(IN_BATCHES)
    if device.type != "cuda":
        return Choice(STEP_BY_STEP)
    obstacle = graph_rollout.obstacle(env, device)
    return Choice(GRAPH) if obstacle is None else Choice(STEP_BY_STEP, obstacle)


def make_collector(
    env: Any, policy: RecurrentPolicy, config: TrainConfig, device: torch.device, seed: int
) -> tuple[Collector, Choice]:
    """The collector of a run."""
    choice = rollout_choice(env, device)
    if choice.engine == STEP_BY_STEP and device.type == "cuda" and graph_step.obstacle(policy) is None:
        choice = choice._replace(engine=STEP_GRAPH)
    in_fp32_on_cpu = device.type == "cpu" and config.precision == "fp32"
    if choice.engine == STEP_BY_STEP and in_fp32_on_cpu and native_step.obstacle(policy) is None:
        choice = choice._replace(engine=STEP_IN_C)
    kinds = {
        GRAPH: GraphCollector,
        IN_BATCHES: AsyncCollector,
        STEP_GRAPH: StepGraphCollector,
        STEP_IN_C: NativeStepCollector,
    }
    kind = kinds.get(choice.engine, Collector)
    collector = kind(
        env,
        policy,
        config.num_steps,
        gamma=config.gamma,
        gae_lambda=config.gae_lambda,
        bptt=config.bptt,
        inputs=config.inputs,
        autocast=autocast_dtype(config.precision),
        noise_correlation=config.noise_correlation,
        seed=seed,
    )
    return collector, choice


# --- updates ---------------------------------------------------------------------------------------------------------


class UpdateEngines:
    """Gives the engine for each update. `choice` is the latest one; before the first update, what is expected.

    ddp_policy: the policy inside DDP, which averages gradients over ranks; None: engines do it, or there is one rank.
    """

    def __init__(
        self,
        policy: RecurrentPolicy,
        config: TrainConfig,
        optimizer: torch.optim.Adam,
        ranks: Ranks = ALONE,
        ddp_policy: nn.Module | None = None,
    ) -> None:
        self.policy, self.config, self.optimizer, self.ranks, self.ddp_policy = (
            policy,
            config,
            optimizer,
            ranks,
            ddp_policy,
        )
        self._graph: GraphMinibatches | None = None
        self._waits_at: str | None = None
        self._device = next(policy.parameters()).device
        self.choice = self._choose(len(ranks.share(config.num_envs)) * config.sequences_per_env, masked=False)

    def __call__(self, batch: Segment, settings: LossSettings, all_valid: bool) -> MinibatchEngine:
        """The engine that trains on this batch, loaded with it."""
        self.choice = self._choose(batch.num_envs, masked=batch.action_mask is not None)
        if self._device.type == "cuda" and self.ddp_policy is None:
            graph = self._graph_for(batch, settings, all_valid)
            if graph is not None:
                graph.load(batch, settings)
                return graph
        engine = (NativeMinibatches if self.choice.engine == NATIVE else AutogradMinibatches)(
            self.policy, self.config, self.optimizer, self.ranks, all_valid
        )
        engine.ddp_policy = self.ddp_policy
        engine.load(batch, settings)
        return engine

    def _choose(self, sequences: int, masked: bool) -> Choice:
        on_gpu = self._device.type == "cuda"
        if self.ddp_policy is not None:
            obstacle = None if on_gpu else native_obstacle(self.policy, self.config)
            return Choice(AUTOGRAD, obstacle or "DistributedDataParallel averages the gradients of the ranks")
        if on_gpu:
            obstacle = graph_update.obstacle(sequences, self.config.minibatches, masked) or self._waits_at
            return Choice(GRAPH) if obstacle is None else Choice(AUTOGRAD, obstacle)
        obstacle = native_obstacle(self.policy, self.config, self.ranks)
        return Choice(NATIVE) if obstacle is None else Choice(AUTOGRAD, obstacle)

    def _graph_for(self, batch: Segment, settings: LossSettings, all_valid: bool) -> GraphMinibatches | None:
        """The captured minibatch, captured again if sizes changed. All ranks replay or none does, all capture or none:
        what they exchange must match."""
        size = batch.num_envs // self.config.minibatches
        can = self.choice.engine == GRAPH
        capture = can and (self._graph is None or not self._graph.fits(batch, size))
        if self.ranks.joined:
            flags = torch.tensor([can, capture], dtype=torch.int32, device=batch.resets.device)
            ranks_can, ranks_capture = self.ranks.sum(flags).tolist()
            can, capture = ranks_can == self.ranks.size, ranks_capture > 0
        if not can:
            if self.choice.engine == GRAPH:
                self.choice = Choice(AUTOGRAD, "another rank cannot capture its minibatches")
            return None
        if capture:
            fused = not self.ranks.joined and fused_policy.obstacle(self.policy, self.config.precision) is None
            kind = FusedMinibatches if fused else AutogradMinibatches
            eager = kind(self.policy, self.config, self.optimizer, self.ranks, all_valid)
            try:
                self._graph = GraphMinibatches(eager, batch, settings, size)
            except NotCapturable as reason:
                self._waits_at = str(reason)
                self.choice = Choice(AUTOGRAD, self._waits_at)
                return None
        return self._graph


def native_obstacle(policy: RecurrentPolicy, config: TrainConfig, ranks: Ranks = ALONE) -> str | None:
    """What keeps minibatches on a CPU from running in C; None if nothing does, on any of the ranks (all must ask)."""
    obstacle = native_obstacles.obstacle(policy)
    if config.precision != "fp32":
        obstacle = f"the precision is {config.precision}"
    blocked = int(ranks.sum(torch.tensor(obstacle is not None, dtype=torch.int32)))
    return "another rank cannot run its minibatches in C" if blocked and obstacle is None else obstacle


def make_ppo(
    policy: RecurrentPolicy,
    config: TrainConfig,
    ranks: Ranks = ALONE,
    *,
    some_unused: bool = False,
    capturable: bool = False,
) -> tuple[PPO, UpdateEngines]:
    """PPO with its optimizer and engines.

    some_unused: a minibatch may give some parameters no gradient. capturable: minibatches may become CUDA graphs. In a
    graph, as in C, DDP's hooks do not run: engines then average the gradients of ranks themselves.
    """
    on_cpu = next(policy.parameters()).is_cpu
    engines_average = native_obstacle(policy, config, ranks) is None if on_cpu else capturable and not some_unused
    ddp_policy = None if engines_average else wrap_for_averaging(policy, ranks, some_unused)
    if ranks.joined and ddp_policy is None:
        copy_weights_from_leader(policy, ranks)
    optimizer = make_adam(policy, config)
    engines = UpdateEngines(policy, config, optimizer, ranks, ddp_policy)
    kind = PPO if on_cpu else QueuedPPO
    return kind(policy, config, optimizer, engines, ranks), engines


# --- for people ------------------------------------------------------------------------------------------------------


def describe_machine() -> list[tuple[str, str]]:
    """Which engines this machine can use, for `holdfast info`."""
    if torch.cuda.is_available():
        return [
            (
                "rollout engine",
                "CUDA graph in environments of holdfast.envs; step by step otherwise",
            ),
            (
                "update engine",
                "CUDA graph; autograd for one minibatch, minibatches of unequal size, action masks, a policy that waits for "
                "the GPU, or under DDP",
            ),
        ]
    kernel = native_kernel.status()
    if kernel["kernel"] == "native":
        rollout = f"{STEP_IN_C}, for hf.ActorCritic in fp32 with one layer of memory; {STEP_BY_STEP} for other policies"
        update = "C, without autograd, for hf.ActorCritic in fp32; autograd for other policies"
    else:
        rollout = STEP_BY_STEP
        update = f"autograd, because the compiled CPU kernel is not in use ({kernel['reason']})"
    return [("rollout engine", rollout), ("update engine", update)]
