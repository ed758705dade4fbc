"""`OnPolicyConfig`: settings of algorithms that learn from each rollout once, in epochs of minibatches of sequences."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.config.run import RunConfig
from holdfast.config.settings import Doubling, given, named, setting


@dataclass
class OnPolicyConfig(RunConfig):
    """Settings of a training run whose rollouts are used and thrown away."""

    bptt: int | None = setting(None, low=1, short="bptt")
    """Length of the training sequences; must divide num_steps. None: whole segments."""
    epochs: int = setting(0, low=0, hint="; 0 chooses for the task", short="epochs", about="size", search=Doubling())
    """Passes over each rollout; 0: chosen for the task."""
    minibatches: int = setting(0, low=0, hint="; 0 chooses for the task", short="mb", about="size", search=Doubling())
    """Minibatches per pass, each of whole sequences; 0: chosen for the task."""
    refresh_states: bool = setting(False, short="refresh")
    """Recompute the start states of sequences before each epoch after the first (with bptt)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bptt is not None and self.num_steps % self.bptt:
            raise ValueError(f"{given('bptt', self.bptt)} must divide {given('num_steps', self.num_steps)}")
        sequences = self.num_envs * self.sequences_per_env
        known = self.num_envs and (self.num_steps or not self.bptt)
        if known and self.minibatches > sequences:
            raise ValueError(
                f"{given('minibatches', self.minibatches)} needs at least as many sequences, but a rollout has {sequences} "
                f"({given('num_envs', self.num_envs)} x {self.sequences_per_env} per segment)"
            )

    @property
    def sequence_length(self) -> int:
        """Steps of a training sequence; 0 while num_steps is not chosen."""
        return self.bptt or self.num_steps

    @property
    def sequences_per_env(self) -> int:
        """Training sequences in one environment's segment."""
        return self.num_steps // (self.bptt or self.num_steps) if self.num_steps else 1

    def require_envs_for(self, ranks: int) -> None:
        """Raise ValueError unless every rank gets enough environments for its part of each minibatch."""
        envs = self.num_envs // ranks  # on the rank with the fewest
        sequences = envs * self.sequences_per_env
        if envs == 0 or sequences < self.minibatches:
            raise ValueError(
                f"{given('num_envs', self.num_envs)} over {ranks} ranks leaves {envs} environments ({sequences} sequences) on "
                f"some ranks, too few for {given('minibatches', self.minibatches)}; use more environments, fewer ranks or "
                f"fewer {named('minibatches')}"
            )

    def describe_sizes(self) -> str:
        """The sizes of a run in words."""
        epochs = f"{self.epochs} epoch{'' if self.epochs == 1 else 's'}"
        minibatches = f"{self.minibatches} minibatch{'' if self.minibatches == 1 else 'es'}"
        return f"{super().describe_sizes()}, {epochs} x {minibatches}"
