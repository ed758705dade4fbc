"""`OffPolicyConfig`: settings of algorithms that keep what was played in a buffer of sequences and learn from samples of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from holdfast.config.run import RunConfig
from holdfast.config.settings import Doubling, given, override, setting


@dataclass
class OffPolicyConfig(RunConfig):
    """Settings of a training run that learns from a buffer."""

    core: Literal["lstm", "gru", "mingru", "lru", "ffm", "mlstm", "window", "none"] | str | type = override(  # noqa: RUF009
        RunConfig, "core", "gru"
    )
    head_sizes: tuple[int, ...] | None = override(RunConfig, "head_sizes", None)  # type: ignore[assignment]
    """Sizes of the layers between core and outputs; by default 128 128 on a CPU, 256 256 on a GPU."""
    activation: Literal["tanh", "relu", "silu", "gelu"] = override(RunConfig, "activation", "relu")
    learning_rate: float = override(RunConfig, "learning_rate", 3e-4)
    lr_schedule: Literal["constant", "linear", "cosine"] | str = override(RunConfig, "lr_schedule", "constant")
    adam_eps: float = override(RunConfig, "adam_eps", 1e-8)
    buffer_size: int = setting(1_000_000, low=1, short="buffer", fixed=True)
    """Steps that the buffer keeps, of all environments; the oldest are overwritten."""
    batch_size: int = setting(
        0, low=0, hint="; 0 chooses for the device", short="batch", about="size", search=Doubling()
    )
    """Sequences per gradient step; 0: 8 on a CPU, 32 on a GPU."""
    train_length: int = setting(64, low=1, short="length", fixed=True, search=Doubling())
    """Steps of a training sequence."""
    burn_in: int = setting(0, low=0, short="burn", fixed=True)
    """Steps before each training sequence that only bring the memory up to date."""
    update_ratio: float = setting(0.5, low=0, above=True, short="ratio", search=Doubling())
    """Gradient steps per environment step."""
    warmup_steps: int = setting(1000, low=0, short="warmup")
    """Environment steps before the first gradient step; the initial policy plays them."""
    refill_buffer: bool = setting(False, about="upkeep")
    """Resume with an empty buffer, from a checkpoint whose buffer is not there any more."""

    def __post_init__(self) -> None:
        super().__post_init__()
        rows = self.burn_in + self.train_length + 1
        if self.num_envs and self.buffer_size < 2 * rows * self.num_envs:
            raise ValueError(
                f"{given('buffer_size', self.buffer_size)} is too small: {given('num_envs', self.num_envs)} with sequences of {rows} "
                f"steps need at least {2 * rows * self.num_envs}"
            )

    @property
    def sequence_length(self) -> int:
        """Steps between the states of a segment: no more than a training sequence, so that each step is reached by one."""
        return (
            max((n for n in range(1, self.train_length + 1) if self.num_steps % n == 0), default=0)
            if self.num_steps
            else 0
        )

    @property
    def steps_per_segment(self) -> int:
        """Environment steps between updates."""
        return self.num_envs * self.num_steps

    @property
    def gradient_steps(self) -> int:
        """Of one update."""
        return max(1, round(self.steps_per_segment * self.update_ratio))

    def describe_sizes(self) -> str:
        """The sizes of a run in words."""
        batch = f"{self.batch_size} sequences of {self.train_length}"
        after = f" after {self.burn_in} of burn-in" if self.burn_in else ""
        return f"{super().describe_sizes()}, then {self.gradient_steps} x {batch}{after} from the last {self.buffer_size:,} steps"
