"""`TrainConfig`: every setting of a training run, one line of help each, and the presets per task.

The command line's flags are these fields; `config.json` in a run folder holds the resolved ones.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints


@dataclass
class TrainConfig:
    """Settings of a training run."""

    env: str = "holdfast/RepeatPreviousEasy-v0"
    """Environment: ours (holdfast/...), any gymnasium id, or popgym:Name."""
    core: Literal["lstm", "gru", "none"] = "lstm"
    """What remembers: lstm, gru, or none (the memoryless control)."""
    hidden_size: int = 128
    """Units of the core, per layer."""
    num_layers: int = 1
    """Layers of the core."""
    critic_core: Literal["shared", "separate", "none"] = "shared"
    """The critic's memory: the actor's, its own, or none."""
    reset: Literal["zero", "learned", "detach", "never"] = "zero"
    """What happens to memory at an episode's start."""
    memory_span: int | None = None
    """Start with gates that remember for up to about so many steps; None: torch's initialisation."""
    encoder_sizes: tuple[int, ...] | None = None
    """Layers before the core; one of hidden_size by default, () for none."""
    head_sizes: tuple[int, ...] = ()
    """Layers between core and outputs, in actor and critic each."""
    activation: Literal["tanh", "relu", "silu", "gelu"] = "tanh"
    """Activation of those layers."""
    inputs: tuple[str, ...] = ("obs",)
    """What the policy sees: obs, prev_action, prev_reward."""

    num_envs: int = 64
    """Environments that step together."""
    num_steps: int = 64
    """Steps per environment in a rollout: the length of a segment."""
    bptt: int | None = None
    """Length of the sequences trained on; must divide num_steps. None: whole segments."""
    total_steps: int = 1_000_000
    """Environment steps in all."""
    stop_at: float | None = None
    """Stop early when the mean return of the last 100 episodes reaches this; None: never."""
    vectorization: Literal["sync", "async"] = "sync"
    """How gymnasium environments run: in this process, or one process each."""
    env_failure: Literal["rebuild", "stop"] = "rebuild"
    """When an environment raises, hangs or dies: build all anew and go on, or stop the run."""
    max_env_failures: int = 10
    """How many times they are built anew before the run stops."""
    env_timeout: float | None = None
    """Seconds that a step of the environments may take before it counts as hung (async only); None: for ever."""
    mask_velocity: bool = False
    """Hide velocities of known gymnasium tasks, so that memory is needed."""
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments for the environment's constructor."""

    learning_rate: float = 1e-3
    """Adam's learning rate at the start."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "linear"
    """How the learning rate goes on: constant, or down to 0 at total_steps."""
    gamma: float = 0.99
    """Discount."""
    gae_lambda: float = 0.95
    """Bias against variance in advantages."""
    epochs: int = 4
    """Passes over each rollout."""
    minibatches: int = 4
    """Minibatches per pass, each of whole sequences."""
    clip_range: float = 0.2
    """How far the policy may move from the one that acted."""
    clip_value: float | None = None
    """The same for values; None: not clipped."""
    entropy_coef: float = 0.01
    """Weight of the entropy bonus."""
    value_coef: float = 0.5
    """Weight of the value loss."""
    max_grad_norm: float = 0.5
    """Gradients are scaled down to this norm."""
    target_kl: float | None = None
    """Stop an update's epochs when the policy moved further than 1.5 times this; None: never."""
    adam_eps: float = 1e-5
    """Adam's epsilon."""
    normalize_advantage: bool = True
    """Advantages to mean 0 and deviation 1, over the whole rollout."""
    normalize_obs: bool = False
    """Running normalisation of float observations; frozen during rollout and update."""
    normalize_reward: bool = False
    """Scale rewards by the running deviation of returns; frozen likewise."""
    refresh_states: bool = False
    """Recompute the start states of chunks before each epoch after the first (with bptt)."""
    max_bad_updates: int = 10
    """Stop after so many updates in a row of which loss or gradients were never finite."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Precision of both legs; bf16 runs under autocast."""

    seed: int = 1
    """Of everything."""
    device: str = "auto"
    """cpu, cuda, or auto."""
    threads: int | None = None
    """CPU threads; None chooses by size."""

    name: str | None = None
    """Name of the run; by default core and seed."""
    run_dir: str | None = None
    """Folder of the run; by default runs/<env>/<name>."""
    checkpoint_every: int = 50
    """Updates between checkpoints; 0: only at the end."""
    keep_checkpoints: int = 3
    """How many rolling checkpoints are kept, besides the best."""
    eval_every: int = 0
    """Updates between evaluations in training; 0: none."""
    eval_episodes: int = 20
    """Episodes per evaluation in training."""
    final_eval_episodes: int = 100
    """Fresh episodes that the result is measured on."""
    replay_check_every: int = 50
    """Updates between replay checks (the first update is always checked); 0: no others."""
    track: bool = False
    """Log to Weights & Biases too, if installed."""
    tensorboard: bool = True
    """Write TensorBoard events, if installed."""
    quiet: bool = False
    """Print nothing but the result."""

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self)).items():
            if get_origin(kind) is Literal and getattr(self, name) not in get_args(kind):
                known = ", ".join(map(repr, get_args(kind)))
                raise ValueError(f"{name}={getattr(self, name)!r}: one of {known}")
        for name in ("hidden_size", "num_layers", "num_envs", "num_steps", "total_steps", "epochs", "minibatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("checkpoint_every", "eval_every", "replay_check_every"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}; 0 turns it off")
        for name in ("eval_episodes", "final_eval_episodes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_env_failures < 0 or self.max_bad_updates < 1:
            raise ValueError(
                f"max_env_failures={self.max_env_failures} must not be negative, "
                f"max_bad_updates={self.max_bad_updates} must be at least 1"
            )
        if self.env_timeout is not None and (self.env_timeout <= 0 or self.vectorization != "async"):
            raise ValueError(
                f"env_timeout={self.env_timeout} with vectorization={self.vectorization!r}: a positive number of "
                "seconds, and only environments in processes of their own (async) can be given up on"
            )
        for name in ("gamma", "gae_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie between 0 and 1, got {getattr(self, name)}")
        if self.bptt is not None and (self.bptt < 1 or self.num_steps % self.bptt):
            raise ValueError(f"bptt={self.bptt} must divide num_steps={self.num_steps}")
        rows = self.num_envs * (self.num_steps // (self.bptt or self.num_steps))
        if self.minibatches > rows:
            raise ValueError(
                f"{self.minibatches} minibatches of whole sequences need at least as many sequences, but there are "
                f"{rows} (num_envs={self.num_envs} x {self.num_steps // (self.bptt or self.num_steps)} per segment)"
            )
        unknown = set(self.inputs) - {"obs", "prev_action", "prev_reward"}
        if unknown or "obs" not in self.inputs:
            raise ValueError(f"inputs={self.inputs}: 'obs', and optionally 'prev_action' and 'prev_reward'")
        self.inputs = tuple(self.inputs)
        self.head_sizes = tuple(self.head_sizes)
        self.encoder_sizes = None if self.encoder_sizes is None else tuple(self.encoder_sizes)

    def require_envs_for(self, ranks: int) -> None:
        """An error unless every one of so many processes gets environments enough for its part of each minibatch."""
        smallest = self.num_envs // ranks
        sequences = smallest * (self.num_steps // (self.bptt or self.num_steps))
        if smallest == 0 or sequences < self.minibatches:
            raise ValueError(
                f"num_envs={self.num_envs} over {ranks} ranks leaves {smallest} environments ({sequences} sequences) "
                f"on some, too few for minibatches={self.minibatches}; use more environments, fewer ranks or fewer "
                "minibatches"
            )

    @property
    def num_updates(self) -> int:
        return max(1, -(-self.total_steps // (self.num_envs * self.num_steps)))

    @property
    def folder(self) -> Path:
        """Where the run is kept."""
        if self.run_dir:
            return Path(self.run_dir)
        env = self.env.removeprefix("holdfast/").replace("/", "-").replace(":", "-")
        return Path("runs") / env / (self.name or f"{self.core}-seed{self.seed}")

    def to_dict(self) -> dict[str, Any]:
        """Plain data: strings, numbers, lists, dicts."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> TrainConfig:
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(d) - known)
        if unknown:
            raise ValueError(f"unknown settings {unknown}; known are {sorted(known)}")
        return cls(**d)

    @classmethod
    def load(cls, path: str | Path) -> TrainConfig:
        """From a run's config.json."""
        return cls.from_dict(json.loads(Path(path).read_text()))

    @classmethod
    def preset(cls, name: str, /, **overrides: Any) -> TrainConfig:
        """Settings that solve a task; `TrainConfig.preset("repeat-previous-easy", seed=2)`."""
        if name not in PRESETS:
            raise ValueError(f"unknown preset {name!r}; one of {', '.join(PRESETS)}")
        return cls(**{**PRESETS[name], **overrides})


_EASY: dict[str, Any] = dict(hidden_size=64, num_envs=64, num_steps=64, minibatches=8, learning_rate=3e-3)

PRESETS: dict[str, dict[str, Any]] = {
    "repeat-previous-easy": dict(
        _EASY, env="holdfast/RepeatPreviousEasy-v0", total_steps=300_000, gamma=0.6, gae_lambda=0.9
    ),
    "repeat-previous-medium": dict(
        _EASY, env="holdfast/RepeatPreviousMedium-v0", total_steps=4_000_000, gamma=0.6, gae_lambda=0.9,
        hidden_size=128, num_steps=104, memory_span=64,
    ),
    "repeat-first-easy": dict(
        _EASY, env="holdfast/RepeatFirstEasy-v0", total_steps=400_000, gamma=0.9, gae_lambda=0.9, memory_span=64
    ),
    "position-only-cartpole-easy": dict(
        _EASY, env="holdfast/PositionOnlyCartPoleEasy-v0", total_steps=800_000, learning_rate=2e-3, entropy_coef=0.001,
        target_kl=0.015,
    ),
    "t-maze": dict(
        _EASY, env="holdfast/TMaze-v0", total_steps=1_500_000, num_steps=128, learning_rate=2e-3,
        lr_schedule="constant", entropy_coef=0.02, gae_lambda=0.99, memory_span=40, stop_at=0.98,
    ),
    "higher-lower-easy": dict(
        _EASY, env="popgym:HigherLowerEasy", total_steps=1_000_000, gamma=0.9, gae_lambda=0.9, learning_rate=1e-3,
        memory_span=64,
    ),
}  # fmt: skip
