"""`Algorithm`: what a trainer runs. It is given what was played, a segment at a time, and learns from it.

    env ──► collector ──► Segment ──► algorithm.start_update(segment, progress) ──► metrics

A trainer knows this class and no particular algorithm. A method that learns from each rollout in epochs of minibatches derives
from `OnPolicy` and writes a `Loss`. How things are executed is an engine's business, which `RunContext.engines` offers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from holdfast.algorithms.auxiliary import AuxiliaryLosses
from holdfast.algorithms.optimizers import Groups
from holdfast.config import RunConfig
from holdfast.distributed.metrics import Metric
from holdfast.distributed.ranks import Ranks
from holdfast.policies.base import RecurrentPolicy, autocast, autocast_dtype, merge_time
from holdfast.policies.heads import parameters_of
from holdfast.rollout.exploration import Noise
from holdfast.rollout.reward_scale import RewardScale
from holdfast.rollout.segment import Segment
from holdfast.state import State, named_leaves

Finish = Callable[[], dict[str, float]]
"""Waits for an update and gives its metrics."""


SMALL = 0.1
"""Parameters of distributions count against their largest one, or against this: those of a fresh network are near 0."""


class Task(NamedTuple):
    """What sizes of rollouts depend on."""

    on_gpu: bool
    fast_env: bool  # all copies step together, in torch or JAX
    num_envs: int | None = None  # of an environment that the user made
    ranks: int = 1


class Progress(NamedTuple):
    """How far a run is: before this update."""

    steps: int
    total_steps: int
    update: int
    num_updates: int
    fraction: float
    """From 0 in the first update towards 1; what schedules follow."""


class Engines(Protocol):
    """How an algorithm's computations are executed (`engines/choose.py`)."""

    def optimizer(self, groups: Groups, config: RunConfig) -> torch.optim.Optimizer:
        """The optimizer that the config names, in the form that fits the device."""

    def minibatches(self, policy: RecurrentPolicy, config: Any, optimizer: torch.optim.Optimizer) -> Any:
        """Gives an engine for each batch: `(batch, loss) -> MinibatchEngine`."""

    def read_later(self, numbers: Tensor) -> Callable[[], list[float]]:
        """Numbers of the device for the host; the result waits for them and for nothing that is queued after."""


class RunContext(NamedTuple):
    """What an algorithm gets of the run that it belongs to."""

    ranks: Ranks
    device: torch.device
    seed: int
    engines: Engines
    num_envs: int = 1  # in this process
    action_space: Any = None
    observation_space: Any = None
    """Of what the policy sees."""
    plays_final_obs: bool = False
    """Whether a step of the environment shows the final observation of an episode (NEXT_STEP autoreset)."""


class Algorithm(ABC):
    """How a policy learns from what was played. Subclasses are named by `--algorithm`, `module:Name` for those of users."""

    name: ClassVar[str]
    """What `--algorithm` takes, and the key of its state in a checkpoint."""
    Config: ClassVar[type[RunConfig]]
    """Its settings; each is a flag."""
    records: ClassVar[frozenset[str]] = frozenset()
    """What a rollout keeps for it besides what was played, out of log_prob, value, params, final_obs."""
    metrics: tuple[Metric, ...] = ()
    """What `start_update` reports."""
    inputs: ClassVar[tuple[str, ...]] = ("obs",)
    """What its policies see, besides what the environment says they need."""
    evaluates_deterministically: ClassVar[bool] = True
    """Whether evaluations play the most likely actions."""
    explores_with: str = "sampled actions"
    """How training episodes are played, in words."""

    policy: RecurrentPolicy
    config: Any
    run: RunContext
    generator: torch.Generator
    """For everything that it draws on the host."""
    reward_scale: RewardScale | None = None
    """Running scale of rewards, if it uses one. The trainer moves it between an update and the next rollout, and saves it."""

    def __init__(self, policy: RecurrentPolicy, config: Any, run: RunContext) -> None:
        self.policy, self.config, self.run = policy, config, run
        self.generator = torch.Generator().manual_seed(run.seed)
        flags = [p.requires_grad for p in policy.parameters()]
        if flags and not any(flags):
            raise ValueError(
                f"every parameter of {type(policy).__name__} is frozen (requires_grad is False), so there is nothing to train; "
                "call requires_grad_() on what should learn"
            )
        self.auxiliary = AuxiliaryLosses.of(policy, config)
        if self.auxiliary is not None:
            self.metrics = (*self.metrics, *(Metric(f"train/{name}", name) for name in self.auxiliary.names))
        if self.scales_rewards():
            self.reward_scale = RewardScale(run.num_envs, config.gamma, run.device)

    # --- before a run is built ----------------------------------------------------------------------------------------

    @classmethod
    def choose_sizes(cls, config: Any, task: Task) -> tuple[Any, str]:
        """The config with all sizes filled in that the user left open, and a line about them ("" if there were none)."""
        return config, ""

    @classmethod
    def choose_threads(cls, config: Any, num_envs: int) -> int:
        """CPU threads for `num_envs` environments in this process."""
        return 1

    @classmethod
    @abstractmethod
    def make_policy(cls, config: Any, observation_space: Any, action_space: Any) -> RecurrentPolicy:
        """The policy that a config describes, if it names no class of the user's."""

    @classmethod
    def advice(cls, config: Any) -> str:
        """What to try in a run that has learned nothing in its first two thirds."""
        return "Try more steps, or another seed."

    # --- rollouts -----------------------------------------------------------------------------------------------------

    def make_noise(self, num_envs: int) -> Noise | None:
        """Exploration noise of rollouts; None: distributions draw their own."""
        return None

    def evaluates_with(self) -> str:
        """How evaluations are played, in words; those of `explores_with` where they are the same."""
        return "most likely actions" if self.evaluates_deterministically else "sampled actions"

    def scales_rewards(self) -> bool:
        """Whether rewards are divided by the running deviation of returns."""
        return bool(self.config.normalize_reward)

    def prepare(self, segment: Segment) -> None:
        """Called with each segment before callbacks see it. A segment that has advantages is told here how to compute them."""
        return None

    def first_lines(self) -> list[str]:
        """What a run says of it when it begins, one fact per line."""
        return []

    # --- updates ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def start_update(self, segment: Segment, progress: Progress) -> Finish:
        """Learn from a segment. May return before a GPU has finished; the result waits for it and gives the metrics."""

    # --- checks of the trainer ----------------------------------------------------------------------------------------

    def replay_difference(self, segment: Segment) -> Tensor:
        """Law 1: how far what a segment recorded is from what the training leg gives for it, [T, B]; 0 in dummy steps."""
        return replay_difference(
            self.policy, segment, self.config.sequence_length, autocast_dtype(self.config.precision)
        )

    def replay_gap(self, segment: Segment) -> float:
        """The largest of `replay_difference`."""
        return float(self.replay_difference(segment).amax())

    @torch.no_grad()
    def staleness(self, segment: Segment) -> float | dict[str, float]:
        """How far the states after a segment (`segment.end_state`) are from what the current weights give: RMS of the difference
        over that of the state. A dict also holds metrics of the algorithm's own."""
        with autocast(segment.resets.device, autocast_dtype(self.config.precision)):
            _, recomputed = self.policy.features(segment.obs, segment.start_state, segment.resets)
        return relative_distance(segment.end_state, recomputed)

    # --- saving -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain data: tensors, numbers, strings, lists, dicts."""
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, d: dict[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self.generator.set_state(d["generator"])

    def check(self, d: dict[str, Any]) -> None:
        """Raise ValueError unless a saved state fits, before anything is replaced by it."""
        return None

    keeps_files: ClassVar[bool] = False
    """Whether a checkpoint needs what `save_files` writes."""

    def save_files(self, folder: Path) -> dict[str, Any]:
        """Write what is too large for a checkpoint. Returns what the checkpoint says about it."""
        return {}

    def prune_files(self, folder: Path) -> None:
        """The checkpoint that holds what `save_files` returned last is written: remove what is not needed any more."""
        return None

    def load_files(self, folder: Path, manifest: dict[str, Any]) -> None:
        """Read what `save_files` wrote. Raises ValueError if it is damaged or missing."""
        return None


@torch.no_grad()
def replay_difference(
    policy: RecurrentPolicy, segment: Segment, length: int | None = None, half_precision: torch.dtype | None = None
) -> Tensor:
    """How far what a segment recorded is from what `unroll` gives for its chunks of `length`, [T, B]; 0 in dummy steps.

    Of log-probabilities, values against their scale, and parameters of the distributions, whatever was recorded. Log-probabilities of
    a normal distribution count against 1 / its deviation where that is below 1: so much more they show of any rounding of the mean.
    """
    cut = segment.as_sequences(length)
    T, B = cut.resets.shape
    with autocast(cut.resets.device, half_precision):
        new = policy.unroll(cut.obs, cut.start_state, cut.resets, action_mask=cut.action_mask)
        log_prob = (
            None if cut.log_prob is None else new.dist.log_prob(merge_time(cut.actions, T, B, "actions")).view(T, B)
        )
    apart = torch.zeros(T, B, device=cut.resets.device)
    if log_prob is not None:
        apart = torch.maximum(apart, (log_prob.float() - cut.log_prob).abs() * _smallest_deviation(new.dist, T, B))
    if cut.value is not None:
        scale = cut.value.abs().max().clamp(min=1.0)
        apart = torch.maximum(apart, (new.value.float() - cut.value).abs() / scale)
    if cut.params is not None:
        scale = cut.params.abs().max().clamp(min=SMALL)
        params = parameters_of(new.dist).float().view(cut.params.shape)
        apart = torch.maximum(apart, (params - cut.params.float()).abs().flatten(2).amax(2) / scale)
    apart = torch.where(cut.valid, apart, 0.0)  # [length, chunks * B]
    return apart.unflatten(1, (-1, segment.num_envs)).transpose(0, 1).flatten(0, 1)


def _smallest_deviation(dist: Any, T: int, B: int) -> Any:
    """Of a normal distribution's numbers, [T, B], at most 1; 1 for other distributions."""
    inner = dist.base_dist if isinstance(dist, torch.distributions.Independent) else dist
    normal = isinstance(inner, torch.distributions.Normal)
    deviation = inner.stddev if normal else getattr(dist, "deviation", None)
    return 1.0 if deviation is None else deviation.float().reshape(T, B, -1).amin(2).clamp(max=1.0)


@torch.no_grad()
def relative_distance(stored: State, recomputed: State) -> float:
    """RMS of the difference of two states over that of the first."""
    new = named_leaves(recomputed)
    pairs = [(leaf, new[name]) for name, leaf in named_leaves(stored).items() if leaf.is_floating_point()]
    if not pairs:
        return 0.0
    difference = sum(((a - b).float().square().sum() for a, b in pairs), torch.zeros((), device=pairs[0][0].device))
    size = sum((a.float().square().sum() for a, _ in pairs), torch.zeros((), device=pairs[0][0].device))
    return float((difference / size.clamp(min=1e-12)).sqrt())
