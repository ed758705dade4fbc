"""`TrainConfig`: every setting of a training run, with one line of help each, and the presets per task.

The flags of `holdfast train` are these fields, and `config.json` in a run folder holds them. This module is plain data:
it checks values against each other, and it imports no environment and no torch.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from holdfast.named_objects import is_import_name, name_of


@dataclass
class TrainConfig:
    """Settings of a training run."""

    env: str = "holdfast/RepeatPreviousEasy-v0"
    """Environment: ours (holdfast/...), any gymnasium id, popgym:Name, envpool:Name, or your own, my_module:MyEnv."""
    core: Literal["lstm", "gru", "mingru", "lru", "ffm", "mlstm", "window", "none"] | str | type = "lstm"
    """Memory: lstm, gru, mingru, lru, ffm, mlstm, window, none (memoryless control), or your own, my_module:MyCore."""
    hidden_size: int = 128
    """Units per layer of the core."""
    num_layers: int = 1
    """Layers of the core."""
    critic_core: Literal["shared", "separate", "none"] = "shared"
    """Memory of the critic: the actor's, its own, or none."""
    reset: Literal["zero", "learned", "detach", "never"] = "zero"
    """What happens to the memory when an episode starts."""
    memory_span: int | None = None
    """Steps to remember: gates start out that way, a window has that length. None: a few steps; a window: 64."""
    encoder_sizes: tuple[int, ...] | None = None
    """Sizes of the layers before the core; one layer of hidden_size by default, () for none."""
    head_sizes: tuple[int, ...] = ()
    """Sizes of the layers between core and outputs, in the actor and in the critic."""
    activation: Literal["tanh", "relu", "silu", "gelu"] = "tanh"
    """Activation of encoder and head layers."""
    inputs: tuple[str, ...] = ()
    """What the policy sees: obs, prev_action, prev_reward; empty: obs, and what the environment says it needs."""
    actor_obs: tuple[str, ...] = ()
    """Of Dict observations, the keys that the actor sees; empty: all. Deployment needs only these."""
    critic_obs: tuple[str, ...] = ()
    """Of Dict observations, the keys that the critic sees; empty: all. Its memory is then its own."""
    policy: str | None = None
    """A policy class of your own, my_module:MyPolicy, in place of the one that the settings above describe."""

    num_envs: int = 0
    """Environments that step together; 0: chosen for the task."""
    num_steps: int = 0
    """Steps per environment in a rollout, the length of a segment; 0: chosen for the task."""
    bptt: int | None = None
    """Length of the training sequences; must divide num_steps. None: whole segments."""
    total_steps: int = 1_000_000
    """Environment steps of the whole run."""
    stop_at: float | None = None
    """Stop early when the mean return of the last 100 episodes reaches this; None: never."""
    vectorization: Literal["sync", "async", "workers"] = "sync"
    """Where gymnasium environments run: here, a process each (EnvPool: in batches), or a worker process per core."""
    env_failure: Literal["rebuild", "stop"] = "rebuild"
    """When an environment raises, hangs or dies: rebuild all of them and continue, or stop the run."""
    max_env_failures: int = 10
    """Number of rebuilds before the run stops."""
    env_timeout: float | None = None
    """Seconds after which a step of the environments counts as hung (async and workers only); None: no limit."""
    mask_velocity: bool = False
    """Hide velocities of known gymnasium tasks, so that memory is needed."""
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments for the environment's constructor."""

    learning_rate: float = 7e-4
    """Initial learning rate of Adam."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "linear"
    """Learning rate over the run: constant, or falling to 0 at total_steps."""
    gamma: float = 0.99
    """Discount factor."""
    gae_lambda: float = 0.95
    """Lambda of generalized advantage estimation: lower has more bias and less variance."""
    epochs: int = 0
    """Passes over each rollout; 0: chosen for the task."""
    minibatches: int = 0
    """Minibatches per pass, each of whole sequences; 0: chosen for the task."""
    clip_range: float = 0.2
    """PPO's clip range for the probability ratio."""
    clip_schedule: Literal["constant", "linear"] = "constant"
    """Clip range over the run: constant, or falling to 0 at total_steps."""
    clip_value: float | None = None
    """Clip range for values; None: no clipping."""
    entropy_coef: float = 0.01
    """Weight of the entropy bonus."""
    entropy_schedule: Literal["constant", "linear"] = "constant"
    """Weight of the entropy bonus over the run: constant, or falling to 0 at total_steps."""
    value_coef: float = 0.5
    """Weight of the value loss."""
    max_grad_norm: float = 0.5
    """Largest gradient norm; larger gradients are scaled down to it."""
    target_kl: float | None = None
    """Stop the epochs of an update when the approximate KL exceeds 1.5 times this; None: never."""
    adam_eps: float = 1e-5
    """Adam's epsilon."""
    normalize_advantage: bool = True
    """Scale advantages to mean 0 and standard deviation 1 over the whole rollout."""
    normalize_obs: bool = True
    """Running normalization of float observations; frozen during rollout and update."""
    normalize_reward: bool = False
    """Divide rewards by the running standard deviation of returns; frozen during rollout and update."""
    normalize_value: bool = True
    """Let the critic learn normalized values, whatever the size of rewards; for a policy of your own, scale rewards."""
    scale_actions: bool = True
    """Box actions: mean and deviation of the policy are in units of half the distance between the bounds."""
    squash_actions: bool = False
    """Box actions: a tanh keeps them inside their bounds, instead of cutting them off there."""
    initial_std: float = 1.0
    """Box actions: the policy's standard deviation at the start."""
    noise_correlation: float = 0.9
    """Box actions: correlation of the exploration noise from one step to the next; 0: white noise."""
    refresh_states: bool = False
    """Recompute the start states of sequences before each epoch after the first (with bptt)."""
    max_bad_updates: int = 10
    """Stop after this many updates in a row without a finite loss and gradient."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Precision of rollout and update; bf16 runs under autocast."""

    seed: int = 1
    """Seed for environments, policy and sampling."""
    device: str = "auto"
    """cpu, cuda, or auto (cuda if there is a GPU)."""
    threads: int | None = None
    """CPU threads; None: chosen by the size of the network and the batch."""

    name: str | None = None
    """Name of the run; by default core, what differs from the defaults, and seed."""
    run_dir: str | None = None
    """Folder of the run; by default runs/<env>/<name>."""
    checkpoint_every: int = 50
    """Updates between checkpoints; 0: only at the end."""
    keep_checkpoints: int = 3
    """Number of recent checkpoints to keep, in addition to the best."""
    eval_every: int = 0
    """Updates between evaluations during training; 0: none."""
    eval_episodes: int = 20
    """Episodes per evaluation during training."""
    final_eval_episodes: int = 100
    """Episodes of the final evaluation, which gives the result."""
    replay_check_every: int = 50
    """Updates between replay checks; 0: only the first update is checked."""
    track: bool = False
    """Also log to Weights & Biases, if installed."""
    tensorboard: bool = True
    """Write TensorBoard events, if installed."""
    quiet: bool = False
    """Print only the result."""

    def __post_init__(self) -> None:
        _check_objects(self)
        _check_none(self)
        _check_sequences(self)  # tuples from here on
        if isinstance(self.core, type):
            _check_core_class(self.core)
            self.core = name_of(self.core)
        _check_core(self)
        _check_choices(self)
        _check_name(self)
        _check_ranges(self)
        _check_env_timeout(self)
        _check_bptt(self)
        _check_minibatches(self)
        _check_inputs(self)

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
                f"--num-envs {self.num_envs} over {ranks} ranks leaves {envs} environments ({sequences} sequences) on "
                f"some ranks, too few for --minibatches {self.minibatches}; use more environments, fewer ranks or "
                "fewer minibatches"
            )

    def shared_by_ranks(self) -> dict[str, Any]:
        """What must be equal on all ranks of a run: everything but what belongs to one process or machine."""
        own = ("device", "threads", "quiet", "run_dir")  # a shared disk may be mounted elsewhere on another machine
        return {name: value for name, value in self.to_dict().items() if name not in own}

    @property
    def num_updates(self) -> int:
        """Rollouts that reach total_steps; the last one may go beyond. Known once num_envs and num_steps are."""
        if not (self.num_envs and self.num_steps):
            raise ValueError("num_envs and num_steps are chosen when the run is made; see trainer.config")
        return max(1, -(-self.total_steps // (self.num_envs * self.num_steps)))

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        if self.run_dir:
            return Path(self.run_dir)
        env = self.env.removeprefix("holdfast/").replace("/", "-").replace(":", "-")
        return Path("runs") / env / (self.name or self.automatic_name)

    @property
    def automatic_name(self) -> str:
        """The name of a run that is given none: core or policy, what differs from the defaults, seed (gru-lr0.001-seed3).

        A run with the settings of its environment's preset has a plain name, too: the defaults are those of the preset then.
        """
        return "-".join([self._kind, *_named_differences(self), f"seed{self.seed}"])

    @property
    def plain_name(self) -> str:
        """Core or policy, and seed: what 0.1 named a run that was given no name."""
        return f"{self._kind}-seed{self.seed}"

    @property
    def _kind(self) -> str:
        return (str(self.core) if self.policy is None else self.policy).rpartition(":")[2]

    def to_dict(self) -> dict[str, Any]:
        """Plain data: strings, numbers, lists, dicts."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> TrainConfig:
        """The inverse of `to_dict`. In a config that 0.1 wrote, settings that it did not have are as it behaved."""
        if not isinstance(d, dict):
            raise ValueError(f"settings are a table of names and values, this is a {type(d).__name__}")
        known = {f.name for f in dataclasses.fields(cls)}
        if d.keys() >= _ALWAYS_WRITTEN_BY_0_1:
            d = {**_AS_IN_0_1, **d}
        unknown = sorted(set(d) - known)
        if unknown:
            similar = get_close_matches(str(unknown[0]), known, 1)
            hint = f"did you mean {similar[0]}?" if similar else "`holdfast train --help` lists them, with - for _"
            raise ValueError(f"unknown settings {unknown}; {hint}")
        _check_types(d)
        return cls(**d)

    @classmethod
    def load(cls, path: str | Path) -> TrainConfig:
        """Read a run's config.json."""
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=_each_once))
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{path}: not a JSON file ({error})") from error
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    @classmethod
    def preset(cls, name: str, /, **overrides: Any) -> TrainConfig:
        """Settings that solve a task: `TrainConfig.preset("repeat-previous-easy", seed=2)`."""
        if name not in PRESETS:
            likely = get_close_matches(name, PRESETS, 1)
            hint = f"did you mean {likely[0]}?" if likely else f"one of {', '.join(PRESETS)}"
            raise ValueError(f"unknown preset {name!r}; {hint}")
        return cls(**{**PRESETS[name], **overrides})


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, which would silently take the last of two entries with one name."""
    names = [name for name, _ in pairs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"{twice} comes twice")
    return dict(pairs)


# --- names of runs ----------------------------------------------------------------------------------------------------

# What a setting is called in the name of a run. Others do not make another method, or say it by the name of the policy.
_SHORT = {
    "hidden_size": "h", "num_layers": "layers", "critic_core": "critic-", "reset": "reset-", "memory_span": "span",
    "activation": "", "bptt": "bptt", "mask_velocity": "mask-velocity", "env_kwargs": "", "learning_rate": "lr",
    "lr_schedule": "", "gamma": "gamma", "gae_lambda": "lambda", "clip_range": "clip", "clip_schedule": "clip-",
    "clip_value": "clip-value", "entropy_coef": "ent", "entropy_schedule": "ent-", "adam_eps": "eps", "value_coef": "vf",
    "max_grad_norm": "grad", "target_kl": "kl",
    "normalize_advantage": "norm-adv", "normalize_obs": "norm-obs", "normalize_reward": "norm-reward",
    "normalize_value": "norm-value", "scale_actions": "scale-actions", "squash_actions": "squash", "initial_std": "std",
    "noise_correlation": "noise", "refresh_states": "refresh", "precision": "", "encoder_sizes": "encoder",
    "head_sizes": "heads", "actor_obs": "actor-sees-", "critic_obs": "critic-sees-",
}  # fmt: skip
# By default these are chosen for the task, so their numbers are named only where a preset has others.
_SHORT_SIZES = {"num_envs": "envs", "num_steps": "steps", "epochs": "epochs", "minibatches": "mb"}
_MOST_NAMED = 4


def _named_differences(config: TrainConfig) -> list[str]:
    """What differs from the defaults, or from a preset of this environment if that is closer; at most a few."""
    bases = [{}, *(settings for settings in PRESETS.values() if settings["env"] == config.env)]
    named_always = {"mask_velocity": False, "env_kwargs": {}}  # another task in the same environment's folder
    found = min((_differences(config, {**base, **named_always}) for base in bases), key=len)
    return found if len(found) <= _MOST_NAMED else [*found[:_MOST_NAMED], "etc"]


def _differences(config: TrainConfig, base: dict[str, Any]) -> list[str]:
    sizes = {name: short for name, short in _SHORT_SIZES.items() if name in base}
    found = []
    for name, short in {**_SHORT, **sizes}.items():
        usual = base[name] if name in base else TrainConfig.__dataclass_fields__[name].default
        usual = {} if usual is dataclasses.MISSING else usual
        if getattr(config, name) != usual:
            found.append(_in_a_name(short, getattr(config, name)))
    return found


def _in_a_name(short: str, value: Any) -> str:
    """
    >>> _in_a_name("lr", 0.001), _in_a_name("norm-obs", False), _in_a_name("heads", (64, 64)), _in_a_name("", {"length": 5})
    ('lr0.001', 'no-norm-obs', 'heads64x64', 'length5')
    """
    if isinstance(value, bool):
        return short if value else f"no-{short}"
    if isinstance(value, dict):
        text = "-".join(f"{key}{inner}" for key, inner in value.items())
    elif isinstance(value, (list, tuple)):
        text = ("-" if isinstance(next(iter(value), None), str) else "x").join(map(str, value)) or "0"
    else:
        text = f"{value:g}" if isinstance(value, float) else "-none" if value is None else str(value)
    return short + re.sub(r"[^\w.+-]+", "_", text)[:40]


# Settings that 0.1 did not have, and what it did in their place.
_AS_IN_0_1: dict[str, Any] = dict(
    clip_schedule="constant",
    entropy_schedule="constant",
    normalize_value=False,
    scale_actions=False,
    squash_actions=False,
    initial_std=1.0,
    noise_correlation=0.0,
)
_ALWAYS_WRITTEN_BY_0_1 = {"env", "num_envs", "num_steps", "epochs", "minibatches", "normalize_obs", "run_dir", "quiet"}

_HINTS = get_type_hints(TrainConfig)

# --- checks: each raises a ValueError that names the flag -------------------------------------------------------------


class Range(NamedTuple):
    """Accepted values of a number, both ends included unless `above`, which leaves out `low`."""

    low: float
    high: float | None = None
    hint: str = ""
    above: bool = False


RANGES = {
    "hidden_size": Range(1),
    "num_layers": Range(1),
    "memory_span": Range(1),
    "encoder_sizes": Range(1),
    "head_sizes": Range(1),
    "num_envs": Range(0, hint="; 0 chooses for the task"),
    "num_steps": Range(0, hint="; 0 chooses for the task"),
    "bptt": Range(1),
    "total_steps": Range(1),
    "max_env_failures": Range(0),
    "env_timeout": Range(0, hint=" seconds", above=True),
    "learning_rate": Range(0, above=True),
    "gamma": Range(0, 1),
    "gae_lambda": Range(0, 1),
    "epochs": Range(0, hint="; 0 chooses for the task"),
    "minibatches": Range(0, hint="; 0 chooses for the task"),
    "initial_std": Range(0, above=True),
    "noise_correlation": Range(0, 0.999, hint="; 0 is white noise"),
    "clip_range": Range(0, above=True),
    "clip_value": Range(0, hint="; None turns it off", above=True),
    "entropy_coef": Range(0),
    "value_coef": Range(0),
    "max_grad_norm": Range(0, hint="; a large number turns clipping off", above=True),
    "target_kl": Range(0, hint="; None turns it off", above=True),
    "adam_eps": Range(0, above=True),
    "max_bad_updates": Range(1),
    "seed": Range(0, 2**63 - 1),  # what numpy and torch both take
    "threads": Range(1, 1024),  # OpenMP crashes with very many
    "checkpoint_every": Range(0, hint="; 0 saves only at the end"),
    "keep_checkpoints": Range(1),
    "eval_every": Range(0, hint="; 0 turns it off"),
    "eval_episodes": Range(1),
    "final_eval_episodes": Range(1),
    "replay_check_every": Range(0, hint="; 0 checks only the first update"),
}
UNBOUNDED = {"stop_at": "returns can be any number"}
"""Numbers without a range, and the reason."""


def flag_of(name: str) -> str:
    """The flag of a setting.

    >>> flag_of("num_envs")
    '--num-envs'
    """
    return "--" + name.replace("_", "-")


def _check_objects(config: TrainConfig) -> None:
    """An environment and a policy are given by name here, and as an object to the trainer."""
    for name, known_as in (("env", "MyEnv"), ("policy", "MyPolicy")):
        value = getattr(config, name)
        if not isinstance(value, str) and not (name == "policy" and value is None):
            what = f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
            raise ValueError(
                f'{name} is {what}, expected a name: {name}="my_module:{known_as}"; or pass it to the trainer, '
                f"hf.Trainer(config, {name}=...)"
            )


def _check_none(config: TrainConfig) -> None:
    for name, kind in _HINTS.items():
        if getattr(config, name) is None and NoneType not in get_args(kind):
            raise ValueError(f"{flag_of(name)} is None, but it needs a value; leave it out for its default")


def _check_sequences(config: TrainConfig) -> None:
    """Settings of several values become tuples; in JSON they are lists."""
    for name, kind in _HINTS.items():
        value = getattr(config, name)
        of = next((member for member in (kind, *get_args(kind)) if get_origin(member) is tuple), None)
        if of is None or value is None:
            continue
        if isinstance(value, str) or not isinstance(value, Iterable):
            several = "(64,)" if get_args(of)[0] is int else '("obs",)'
            raise ValueError(f"{flag_of(name)} must be a tuple, such as {several}, got {value!r:.40}")
        setattr(config, name, tuple(value))


def _check_core_class(core: type) -> None:
    # Known by its name: this module imports no torch.
    if not any((base.__module__, base.__name__) == ("holdfast.cores.base", "Core") for base in core.__mro__):
        raise ValueError(
            f"core is the class {core.__module__}.{core.__qualname__}, which is no hf.Core; use one by its name, "
            'core="lstm", or a class such as hf.LSTM'
        )


def _check_core(config: TrainConfig) -> None:
    names = [name for kind in get_args(_HINTS["core"]) for name in get_args(kind)]
    if not isinstance(config.core, str) or not (config.core in names or is_import_name(config.core)):
        raise ValueError(f"--core must be one of {', '.join(names)}, or my_module:MyCore, got {config.core!r}")


def _check_types(settings: dict[str, Any]) -> None:
    """Settings from a file may be of any type."""
    for name, value in settings.items():
        if not _is_a(value, _HINTS[name]):
            raise ValueError(f"{flag_of(name)} is {value!r:.40}, which is not a value of its type")


def _is_a(value: Any, kind: Any) -> bool:
    arguments = get_args(kind)
    if get_origin(kind) is Literal:
        return isinstance(value, str)  # which ones is checked below
    if get_origin(kind) in (Union, UnionType):
        return any(_is_a(value, member) for member in arguments)
    if get_origin(kind) is tuple:
        return isinstance(value, (list, tuple)) and all(_is_a(part, arguments[0]) for part in value)
    if get_origin(kind) is dict:
        return isinstance(value, dict) and all(isinstance(key, str) for key in value)
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool) and value == value
    return isinstance(value, kind)


def _check_choices(config: TrainConfig) -> None:
    for name, kind in _HINTS.items():
        value = getattr(config, name)
        if get_origin(kind) is Literal and value not in get_args(kind):
            raise ValueError(f"{flag_of(name)} must be one of {', '.join(get_args(kind))}, got {value!r}")


def _check_ranges(config: TrainConfig) -> None:
    for name in (*RANGES, *UNBOUNDED):
        value = getattr(config, name)
        if isinstance(value, float) and value.is_integer() and _is_whole(name):
            setattr(config, name, value := int(value))  # 1e6
        for number in value if isinstance(value, tuple) else () if value is None else (value,):
            _check_number(name, number)


def _is_whole(name: str) -> bool:
    return "int" in TrainConfig.__annotations__[name]


def _check_number(name: str, value: Any) -> None:
    flag, kind = flag_of(name), "an integer" if _is_whole(name) else "a number"
    if isinstance(value, bool) or not isinstance(value, int if _is_whole(name) else (int, float)):
        raise ValueError(f"{flag} must be {kind}, got {value!r}")
    low, high, hint, above = RANGES.get(name, Range(-math.inf))
    if high is not None and not low <= value <= high:
        raise ValueError(f"{flag} must be between {low} and {high}, got {value}{hint}")
    if isinstance(value, int) and abs(value) > 2**63:  # more than numpy, torch and C count to
        raise ValueError(f"{flag} must be less than 2**63, got {value!s:.40}")
    if not math.isfinite(value):
        raise ValueError(f"{flag} must be a finite number, got {value}{hint}")
    if value < low or (above and value == low):
        raise ValueError(f"{flag} must be {'greater than' if above else 'at least'} {low}, got {value}{hint}")


def _check_name(config: TrainConfig) -> None:
    if config.name and not config.name.isprintable():
        raise ValueError(f"--name {config.name!r:.40} is the name of a folder: use letters, digits and signs")
    if config.name and (Path(config.name).is_absolute() or {"..", ".", ""} & set(config.name.split("/"))):
        raise ValueError(f"--name {config.name!r} leaves the folder runs/; use --run-dir for a folder elsewhere")


def _check_env_timeout(config: TrainConfig) -> None:
    if config.env_timeout is not None and config.vectorization == "sync":
        raise ValueError(
            f"--env-timeout {config.env_timeout} needs --vectorization async or workers: a step can only be timed out if the "
            "environments run in processes of their own"
        )


def _check_bptt(config: TrainConfig) -> None:
    if config.bptt is not None and config.num_steps % config.bptt:
        raise ValueError(f"--bptt {config.bptt} must divide --num-steps {config.num_steps}")


def _check_minibatches(config: TrainConfig) -> None:
    sequences = config.num_envs * config.sequences_per_env
    known = config.num_envs and (config.num_steps or not config.bptt)
    if known and config.minibatches > sequences:
        raise ValueError(
            f"--minibatches {config.minibatches} needs at least as many sequences, but a rollout has {sequences} "
            f"(--num-envs {config.num_envs} x {config.sequences_per_env} per segment)"
        )


def _check_inputs(config: TrainConfig) -> None:
    if (config.inputs and "obs" not in config.inputs) or not set(config.inputs) <= {
        "obs",
        "prev_action",
        "prev_reward",
    }:
        raise ValueError(f"--inputs must be obs and optionally prev_action and prev_reward, got {config.inputs}")


# --- presets ----------------------------------------------------------------------------------------------------------

_EASY: dict[str, Any] = dict(
    hidden_size=64, num_envs=64, num_steps=64, epochs=4, minibatches=8, learning_rate=3e-3, normalize_obs=False,
    normalize_value=False,
)  # fmt: skip
_RECALL: dict[str, Any] = dict(
    core="window", hidden_size=64, num_envs=64, num_steps=128, epochs=4, minibatches=4, learning_rate=2e-3, gamma=0.3,
    gae_lambda=0.9, entropy_coef=0.003, normalize_obs=False, normalize_value=False,
)  # fmt: skip

# One reward in an episode. Advantages keep their size, which tells a reward from noise; with a small epsilon Adam moves anyway.
# A large entropy bonus keeps a policy walking that does not know the turn yet: with a small one it learns to be late (0) after
# the sign that it answers wrongly (-1), and stays there. It falls to 0, because the last turns are sampled too.
_MAZE: dict[str, Any] = dict(
    env="holdfast/TMaze-v0", hidden_size=64, epochs=4, minibatches=4, learning_rate=2e-3, gae_lambda=0.5, entropy_coef=0.02,
    entropy_schedule="linear", value_coef=0.01, adam_eps=1e-8, normalize_advantage=False,
)  # fmt: skip

# Common tasks of gymnasium: the defaults, and as many steps as they need with velocities hidden. A fall of CartPole costs much of
# its return, and the entropy bonus makes sampled actions fall now and then, so it ends at 0. Pendulum is more reliable so, too.
_GYMNASIUM: dict[str, dict[str, Any]] = {
    "cartpole": dict(env="CartPole-v1", total_steps=300_000, entropy_schedule="linear"),
    "acrobot": dict(env="Acrobot-v1", total_steps=100_000),
    "pendulum": dict(env="Pendulum-v1", total_steps=100_000, entropy_schedule="linear"),
    "mountain-car-continuous": dict(env="MountainCarContinuous-v0", total_steps=300_000),
    "lunar-lander": dict(env="LunarLander-v3", total_steps=1_000_000),
}


def _gymnasium_presets() -> dict[str, dict[str, Any]]:
    """Each task twice: "cartpole" as it is, "cartpole-masked" with its velocities hidden."""
    presets = {}
    for name, settings in _GYMNASIUM.items():
        presets[name] = dict(settings, core="gru")
        presets[f"{name}-masked"] = dict(presets[name], mask_velocity=True)
    return presets


PRESETS: dict[str, dict[str, Any]] = {
    "repeat-previous-easy": dict(
        _EASY, env="holdfast/RepeatPreviousEasy-v0", total_steps=300_000, gamma=0.6, gae_lambda=0.9
    ),
    "repeat-previous-medium": dict(
        _RECALL, env="holdfast/RepeatPreviousMedium-v0", total_steps=200_000, memory_span=32,
    ),
    "repeat-previous-hard": dict(
        _RECALL, env="holdfast/RepeatPreviousHard-v0", total_steps=300_000, memory_span=64,
    ),
    "repeat-first-easy": dict(
        _EASY, env="holdfast/RepeatFirstEasy-v0", total_steps=400_000, gamma=0.9, gae_lambda=0.9, memory_span=64
    ),
    "position-only-cartpole-easy": dict(
        env="holdfast/PositionOnlyCartPoleEasy-v0", total_steps=1_000_000, entropy_schedule="linear"
    ),
    "t-maze": dict(_MAZE, total_steps=500_000, num_envs=32, num_steps=128, memory_span=60),
    "t-maze-200": dict(
        _MAZE, env_kwargs={"length": 200}, core="lstm", total_steps=2_000_000, num_envs=16, num_steps=1024, memory_span=600,
    ),
    "higher-lower-easy": dict(
        _EASY, env="holdfast/HigherLowerEasy-v0", total_steps=1_000_000, gamma=0.9, gae_lambda=0.9, learning_rate=1e-3,
        memory_span=64,
    ),
    **_gymnasium_presets(),
}  # fmt: skip
