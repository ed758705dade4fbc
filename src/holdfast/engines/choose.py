"""Which engine runs what: the only place that decides, from policy, environment, config, device and ranks.

A rollout is played step by step (with the policy in C on a CPU, or as a CUDA graph) or as one CUDA graph. A minibatch runs in C, as a
CUDA graph, or through autograd, which takes everything. Each choice says what keeps a faster engine from being used. What fails
when it is tried falls back here, and is announced.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from holdfast.algorithms.auxiliary import AuxiliaryLosses
from holdfast.algorithms.base import Algorithm
from holdfast.algorithms.loss import Loss, MinibatchEngine
from holdfast.algorithms.optimizers import CAPTURABLE, Groups, make_optimizer
from holdfast.algorithms.ppo import ClippedLoss
from holdfast.config import RunConfig
from holdfast.distributed.ranks import ALONE, Ranks
from holdfast.engines import fused_policy, graph_rollout, graph_step, graph_update, native
from holdfast.engines.autograd import Minibatches, copy_weights_from_leader
from holdfast.engines.cuda_graph import NotCapturable, exclusive_gpu, read_later
from holdfast.engines.fused_policy import FusedPolicy
from holdfast.engines.fused_update import FusedMinibatches
from holdfast.engines.graph_rollout import GraphCollector
from holdfast.engines.graph_step import StepGraphActing
from holdfast.engines.graph_update import GraphMinibatches
from holdfast.engines.native import NativeActing, NativeMinibatches
from holdfast.kernels.cpu import recurrence as native_kernel
from holdfast.policies.actor_critic import ActorCritic
from holdfast.policies.base import RecurrentPolicy, autocast_dtype
from holdfast.rollout.collector import Acting, Collector
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
SWITCHED_OFF = "accelerators are off"


class Engines:
    """The engines of a run. `rollout` and `update` are the latest choices; before the first, what is expected."""

    def __init__(self, config: RunConfig, device: torch.device, ranks: Ranks = ALONE) -> None:
        self.config, self.device, self.ranks = config, device, ranks
        self.on_gpu, self.accelerated = device.type == "cuda", config.accelerators == "on"
        self.rollout = self.update = Choice(AUTOGRAD)
        self._refused: dict[str, str] = {}  # what could not be captured, and why

    def report(self) -> dict[str, str]:
        """For the first lines of a run, its meta.json and `holdfast info`."""
        return {"rollout": str(self.rollout), "update": str(self.update)}

    # --- rollouts -----------------------------------------------------------------------------------------------------

    def collector(self, env: Any, policy: RecurrentPolicy, algorithm: Algorithm, seed: int) -> Collector:
        """The collector of a run."""
        config = self.config
        kind = GraphCollector if self._whole_graph_obstacle(env) is None else Collector
        collector = kind(
            env,
            policy,
            config.num_steps,
            gamma=None,
            bptt=config.sequence_length,
            inputs=config.inputs or ("obs",),
            autocast=autocast_dtype(config.precision),
            seed=seed,
            records=algorithm.records,
            noise=algorithm.make_noise(env.num_envs),
        )
        collector.choose_acting = self.acting
        if isinstance(collector, GraphCollector):
            collector.refused = lambda reason: self._refused.update(whole=reason)
            collector.make_fused = lambda: self._fused_policy(policy, algorithm)
            self.rollout = Choice(GRAPH)
        else:
            self._choose_acting(collector)
        return collector

    def acting(self, collector: Collector) -> Acting:
        """What steps the policy in the next rollout of a collector that does not run as one graph."""
        kind = self._choose_acting(collector)
        if type(collector.acting) is not kind:
            collector.acting = _made(kind, collector)
        if kind is StepGraphActing:
            try:
                collector.acting.begin(collector.adapter, collector.steps)
            except NotCapturable as reason:
                self._refused["step"] = str(reason)
                return self.acting(collector)
        return collector.acting

    @property
    def for_evaluation(self) -> type[Acting] | None:
        """What steps the policy in evaluations during training; None: the policy itself."""
        return NativeActing if self.rollout.engine == STEP_IN_C else None

    def _choose_acting(self, collector: Collector) -> type[Acting]:
        env = collector.adapter.env
        if getattr(env, "is_asynchronous", False):
            self.rollout = Choice(IN_BATCHES)
            return Acting
        because = "" if self.accelerated else SWITCHED_OFF
        if self.on_gpu:
            because = self._refused.get("whole") or self._whole_graph_obstacle(env) or ""
            if self._step_graph_obstacle(collector) is None:
                self.rollout = Choice(STEP_GRAPH, because)
                return StepGraphActing
        elif self._native_step_obstacle(collector) is None:
            self.rollout = Choice(STEP_IN_C)
            return NativeActing
        self.rollout = Choice(STEP_BY_STEP, because)
        return Acting

    def _whole_graph_obstacle(self, env: Any) -> str | None:
        if not self.accelerated:
            return SWITCHED_OFF
        if not self.on_gpu or getattr(env, "is_asynchronous", False):
            return "there is no GPU"
        return graph_rollout.obstacle(env, self.device)

    def _step_graph_obstacle(self, collector: Collector) -> str | None:
        if not self.accelerated:
            return SWITCHED_OFF
        if collector.adapter.action_mask is not None:
            return "the environment masks actions"
        if collector.records - {"log_prob", "value"}:
            return "the algorithm records more than log-probabilities and values"
        return self._refused.get("step") or graph_step.obstacle(collector.policy)

    def _native_step_obstacle(self, collector: Collector) -> str | None:
        if not self.accelerated:
            return SWITCHED_OFF
        if self.config.precision != "fp32":
            return f"the precision is {self.config.precision}"
        if collector.memory.in_place:
            return "the memory is updated in place"
        return native.native_step_obstacle(collector.policy)

    def _fused_policy(self, policy: RecurrentPolicy, algorithm: Algorithm) -> FusedPolicy | None:
        """For a captured rollout that records what the fused kernels give."""
        more = algorithm.records - {"log_prob", "value"}
        if more or fused_policy.obstacle(policy, self.config.precision) is not None:
            return None
        assert isinstance(policy, ActorCritic)
        return FusedPolicy(policy)

    # --- updates ------------------------------------------------------------------------------------------------------

    def optimizer(self, groups: Groups, config: RunConfig) -> torch.optim.Optimizer:
        """The optimizer that the config names; ranks start from equal weights."""
        if self.ranks.joined:
            for group in groups:
                copy_weights_from_leader(group["params"], self.ranks)
        return make_optimizer(groups, config)

    def minibatches(
        self, policy: RecurrentPolicy, config: Any, optimizer: torch.optim.Optimizer
    ) -> Callable[[Segment, Loss], MinibatchEngine]:
        """Gives the engine for each update."""
        return _MinibatchEngines(self, policy, config, optimizer)

    def read_later(self, numbers: torch.Tensor) -> Callable[[], list[float]]:
        """Numbers of the device for the host; the result waits for them and for nothing that is queued after."""
        return read_later(numbers) if self.on_gpu else numbers.tolist

    def exclusive(self) -> AbstractContextManager[None]:
        """Inside, no other run of this process uses the GPU."""
        return exclusive_gpu(self.device) if self.on_gpu else nullcontext()


def _made(kind: type[Acting], collector: Collector) -> Acting:
    return kind(collector.policy, collector.memory, collector.noise, collector.autocast, collector.records)


class _MinibatchEngines:
    """Gives the engine for each update of one policy."""

    def __init__(
        self, engines: Engines, policy: RecurrentPolicy, config: Any, optimizer: torch.optim.Optimizer
    ) -> None:
        self.engines, self.policy, self.config, self.optimizer = engines, policy, config, optimizer
        self.ranks, self.auxiliary = engines.ranks, AuxiliaryLosses.of(policy, config)
        self._graph: GraphMinibatches | None = None
        sequences = len(self.ranks.share(config.num_envs)) * config.sequences_per_env
        self._choose(sequences, masked=False, loss=None)

    def __call__(self, batch: Segment, loss: Loss) -> MinibatchEngine:
        """The engine that trains on this batch, loaded with it."""
        self._choose(batch.num_envs, batch.action_mask is not None, loss)
        if self.engines.on_gpu:
            graph = self._graph_for(batch, loss)
            if graph is not None:
                graph.load(batch, loss)
                return graph
        kind = NativeMinibatches if self.engines.update.engine == NATIVE else Minibatches
        engine = self._made(kind)
        engine.load(batch, loss)
        return engine

    def _made(self, kind: type[Minibatches]) -> Minibatches:
        engine = kind(self.policy, self.config, self.optimizer, self.ranks)
        engine.auxiliary = self.auxiliary
        return engine

    def _choose(self, sequences: int, masked: bool, loss: Loss | None) -> None:
        """loss None: not known yet; PPO's on an ActorCritic is expected."""
        engines = self.engines
        if engines.on_gpu:
            obstacle, fast = graph_update.obstacle(sequences, self.config.minibatches, masked), GRAPH
            if self.config.optimizer not in CAPTURABLE:
                obstacle = f"steps of the optimizer {self.config.optimizer} are not captured"
            obstacle = obstacle or engines._refused.get("update")
        else:
            obstacle, fast = self._native_obstacle(loss), NATIVE
        engines.update = Choice(fast) if obstacle is None else Choice(AUTOGRAD, obstacle)

    def _native_obstacle(self, loss: Loss | None) -> str | None:
        """What keeps minibatches on a CPU from running in C; None if nothing does, on any of the ranks (all must ask)."""
        obstacle = native.native_obstacle(self.policy)
        if loss is not None and type(loss) is not ClippedLoss:
            obstacle = f"the update in C knows PPO's loss, and this is {type(loss).__name__}"
        if self.config.precision != "fp32":
            obstacle = f"the precision is {self.config.precision}"
        if not self.engines.accelerated:
            obstacle = SWITCHED_OFF
        blocked = int(self.ranks.sum(torch.tensor(obstacle is not None, dtype=torch.int32)))
        return "another rank cannot run its minibatches in C" if blocked and obstacle is None else obstacle

    def _graph_for(self, batch: Segment, loss: Loss) -> GraphMinibatches | None:
        """The captured minibatch, captured again if sizes changed. All ranks replay or none does, all capture or none:
        what they exchange must match."""
        engines, size = self.engines, batch.num_envs // self.config.minibatches
        can = engines.update.engine == GRAPH
        capture = can and (self._graph is None or not self._graph.fits(batch, loss, size))
        if self.ranks.joined:
            flags = torch.tensor([can, capture], dtype=torch.int32, device=batch.resets.device)
            ranks_can, ranks_capture = self.ranks.sum(flags).tolist()
            can, capture = ranks_can == self.ranks.size, ranks_capture > 0
        if not can:
            if engines.update.engine == GRAPH:
                engines.update = Choice(AUTOGRAD, "another rank cannot capture its minibatches")
            return None
        if capture:
            kind = FusedMinibatches if self._fuses(loss) else Minibatches
            eager = self._made(kind)
            try:
                self._graph = GraphMinibatches(eager, batch, loss, size)
            except NotCapturable as reason:
                engines._refused["update"] = str(reason)
                engines.update = Choice(AUTOGRAD, str(reason))
                return None
        return self._graph

    def _fuses(self, loss: Loss) -> bool:
        if self.ranks.joined or type(loss) is not ClippedLoss or not self.engines.accelerated:
            return False
        if type(self.optimizer) is not torch.optim.Adam or len(self.optimizer.param_groups) > 1:
            return False
        return fused_policy.obstacle(self.policy, self.config.precision) is None


# --- for people ------------------------------------------------------------------------------------------------------


def describe_machine() -> list[tuple[str, str]]:
    """Which engines this machine can use, for `holdfast info`."""
    if torch.cuda.is_available():
        return [
            ("rollout engine", "CUDA graph in environments of holdfast.envs; step by step otherwise"),
            (
                "update engine",
                "CUDA graph; autograd for one minibatch, minibatches of unequal size, action masks, or a policy that waits for "
                "the GPU",
            ),
        ]
    kernel = native_kernel.status()
    if kernel["kernel"] == "native":
        rollout = f"{STEP_IN_C}, for hf.ActorCritic in fp32 with one layer of memory; {STEP_BY_STEP} for other policies"
        update = "C, without autograd, for PPO with hf.ActorCritic in fp32; autograd for others"
    else:
        rollout = STEP_BY_STEP
        update = f"autograd, because the compiled CPU kernel is not in use ({kernel['reason']})"
    return [("rollout engine", rollout), ("update engine", update)]
