"""`PPOConfig`, also named `TrainConfig`: settings of a run that learns by proximal policy optimization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from holdfast.config.on_policy import OnPolicyConfig
from holdfast.config.settings import Around, Between, NearOne, override, setting

_OPEN = "; None chooses for the task"


@dataclass
class PPOConfig(OnPolicyConfig):
    """Settings of a training run with PPO."""

    algorithm: str = override(OnPolicyConfig, "algorithm", "ppo")
    gae_lambda: float = setting(0.95, low=0, high=1, short="lambda", search=NearOne(4, least=0.5))
    """Lambda of generalized advantage estimation: lower has more bias and less variance."""
    clip_range: float = setting(0.2, low=0, above=True, short="clip", search=Between(0.1, 0.3))
    """PPO's clip range for the probability ratio."""
    clip_schedule: Literal["constant", "linear"] = setting("constant", short="clip-")
    """Clip range over the run: constant, or falling to 0 at total_steps."""
    clip_value: float | None = setting(None, low=0, above=True, hint="; None turns it off", short="clip-value")
    """Clip range for values; None: no clipping."""
    entropy_coef: float | None = setting(None, low=0, hint=_OPEN, short="ent", search=Around(8), chosen=(0.01, 0.0))
    """Weight of the entropy bonus; None: 0.01, and 0 for several Box actions."""
    entropy_schedule: Literal["constant", "linear"] = setting("constant", short="ent-")
    """Weight of the entropy bonus over the run: constant, or falling to 0 at total_steps."""
    value_coef: float = setting(0.5, low=0, short="vf")
    """Weight of the value loss."""
    target_kl: float | None = setting(None, low=0, above=True, hint="; None turns it off", short="kl")
    """Stop the epochs of an update when the approximate KL exceeds 1.5 times this; None: never."""
    normalize_advantage: bool = setting(True, short="norm-adv")
    """Scale advantages to mean 0 and standard deviation 1 over the whole rollout."""
    normalize_value: bool = setting(True, short="norm-value", fixed=True)
    """Let the critic learn normalized values, whatever the size of rewards; for a policy of your own, scale rewards."""
    scale_actions: bool = setting(True, short="scale-actions", fixed=True)
    """Box actions: mean and deviation of the policy are in units of half the distance between the bounds."""
    squash_actions: bool = setting(False, short="squash", fixed=True)
    """Box actions: a tanh keeps them inside their bounds, instead of cutting them off there."""
    initial_std: float | None = setting(None, low=0, above=True, hint=_OPEN, short="std", fixed=True, chosen=(1.0, 0.6))
    """Box actions: the policy's standard deviation at the start; None: 1, and 0.6 for several actions."""
    noise_correlation: float | None = setting(
        None, low=0, high=0.999, hint=f"; 0 is white noise{_OPEN}", short="noise", chosen=(0.9, 0.0)
    )
    """Box actions: correlation of the noise from one step to the next; None: 0.9, and 0 (white noise) for several."""

    @classmethod
    def _upgraded(cls, d: dict[str, Any]) -> dict[str, Any]:
        """In a config that 0.1 or 0.2 wrote, settings that it did not have are as it behaved."""
        return {**_AS_IN_0_1, **d} if d.keys() >= _ALWAYS_WRITTEN_BY_0_1 else d


_AS_IN_0_1: dict[str, Any] = dict(
    encoder="0.2",
    clip_schedule="constant",
    entropy_schedule="constant",
    normalize_value=False,
    scale_actions=False,
    squash_actions=False,
    initial_std=1.0,
    noise_correlation=0.0,
)
_ALWAYS_WRITTEN_BY_0_1 = {"env", "num_envs", "num_steps", "epochs", "minibatches", "normalize_obs", "run_dir", "quiet"}
