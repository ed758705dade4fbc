"""`RunConfig`: the settings that every training run has, whatever its algorithm; configs as files and as names of runs.

The flags of `holdfast train` are these fields and those of the algorithm, and `config.json` in a run folder holds them. This module is
plain data: it checks values against each other, and it imports no environment and no torch.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from holdfast.config import imports, run_names, settings
from holdfast.config.presets import PRESETS
from holdfast.config.settings import Around, Doubling, NearOne, given, named, setting, settings_of
from holdfast.named_objects import import_named, is_import_name, name_of

Config = TypeVar("Config", bound="RunConfig")

ENV_OPTIONS = ("mask_velocity", "mask_position", "keep_obs", "trial_episodes", "env_kwargs")
BEFORE_ALGORITHMS = "ppo"
"""What files without the setting `algorithm` were trained with."""


@dataclass
class RunConfig:
    """Settings of a training run."""

    env: str = setting("holdfast/RepeatPreviousEasy-v0", about="task", fixed=True, names="env")
    """Environment: ours (holdfast/...), any gymnasium id, popgym:Name, envpool:Name, or your own, my_module:MyEnv."""
    algorithm: str = setting("", fixed=True, names="algorithm")
    """How it learns: ppo, pqn, sac, r2d2, or your own, my_module:MyAlgorithm."""
    core: Literal["lstm", "gru", "mingru", "lru", "ffm", "mlstm", "window", "none"] | str | type = setting(
        "lstm", about="network", fixed=True, names="core"
    )
    """Memory: lstm, gru, mingru, lru, ffm, mlstm, window, none (memoryless control), or your own, my_module:MyCore."""
    hidden_size: int = setting(128, low=1, short="h", about="network", fixed=True, search=Doubling())
    """Units per layer of the core."""
    num_layers: int = setting(1, low=1, short="layers", about="network", fixed=True)
    """Layers of the core."""
    critic_core: Literal["shared", "separate", "none"] = setting("shared", short="critic-", about="network", fixed=True)
    """Memory of the critic: the actor's, its own, or none."""
    reset: Literal["zero", "learned", "detach", "never"] = setting("zero", short="reset-", about="network", fixed=True)
    """What happens to the memory when an episode starts."""
    memory_span: int | None = setting(None, low=1, short="span", about="network", fixed=True)
    """Steps to remember: gates start out that way, a window has that length. None: a few steps; a window: 64."""
    encoder: Literal["auto", "vector", "nature", "impala", "grid", "0.2"] | str = setting(
        "auto", short="", about="network", fixed=True, names="encoder"
    )
    """Network for images: auto, vector, nature, impala, grid, 0.2 (as 0.2 chose), or your own, my_module:MyEncoder."""
    channels: Literal["auto", "first", "last"] = setting("auto", short="channels-", about="network", fixed=True)
    """Where images have their channels; auto: as their shape tells."""
    encoder_sizes: tuple[int, ...] | None = setting(None, low=1, short="encoder", about="network", fixed=True)
    """Sizes of the layers before the core; one layer of hidden_size by default, () for none."""
    head_sizes: tuple[int, ...] = setting((), low=1, short="heads", about="network", fixed=True)
    """Sizes of the layers between core and outputs, in the actor and in the critic."""
    activation: Literal["tanh", "relu", "silu", "gelu"] = setting("tanh", short="", about="network", fixed=True)
    """Activation of encoder and head layers."""
    inputs: tuple[str, ...] = setting((), about="task", fixed=True)
    """What the policy sees: obs, prev_action, prev_reward; empty: obs, and what the environment says it needs."""
    actor_obs: tuple[str, ...] = setting((), short="actor-sees-", about="network", fixed=True)
    """Of Dict observations, the keys that the actor sees; empty: all. Deployment needs only these."""
    critic_obs: tuple[str, ...] = setting((), short="critic-sees-", about="network", fixed=True)
    """Of Dict observations, the keys that the critic sees; empty: all. Its memory is then its own."""
    policy: str | None = setting(None, about="network", fixed=True, names="policy")
    """A policy class of your own, my_module:MyPolicy, in place of the one that the settings above describe."""

    num_envs: int = setting(0, low=0, hint="; 0 chooses for the task", short="envs", about="size", fixed=True)
    """Environments that step together; 0: chosen for the task."""
    num_steps: int = setting(
        0, low=0, hint="; 0 chooses for the task", short="steps", about="size", fixed=True, search=Doubling()
    )
    """Steps per environment in a rollout, the length of a segment; 0: chosen for the task."""
    total_steps: int = setting(1_000_000, low=1, about="budget")
    """Environment steps of the whole run."""
    stop_at: float | None = setting(None, unbounded="returns can be any number", about="budget")
    """Stop early when the mean return of the last 100 episodes reaches this; None: never."""
    vectorization: Literal["sync", "async", "workers"] = setting("sync", about="budget")
    """Where gymnasium environments run: here, a process each (EnvPool: in batches), or a worker process per core."""
    env_failure: Literal["rebuild", "stop"] = setting("rebuild", about="upkeep")
    """When an environment raises, hangs or dies: rebuild all of them and continue, or stop the run."""
    max_env_failures: int = setting(10, low=0, about="upkeep")
    """Number of rebuilds before the run stops."""
    env_timeout: float | None = setting(None, low=0, above=True, hint=" seconds", about="upkeep")
    """Seconds after which a step of the environments counts as hung (async and workers only); None: no limit."""
    mask_velocity: bool = setting(False, short="mask-velocity", about="task", fixed=True)
    """Hide velocities of known gymnasium tasks, so that memory is needed."""
    mask_position: bool = setting(False, short="mask-position", about="task", fixed=True)
    """Hide positions of known gymnasium tasks: the policy sees velocities only."""
    keep_obs: tuple[str, ...] = setting((), short="keep", about="task", fixed=True)
    """Hide all entries of a flat observation but these, such as 0:5 7."""
    trial_episodes: int = setting(1, low=1, short="trials", about="task", fixed=True)
    """Episodes of one task that make a trial: memory runs through them, and resets between trials; 1: no trials."""
    env_kwargs: dict[str, Any] = setting({}, short="", about="task", fixed=True)
    """Arguments for the environment's constructor."""

    optimizer: Literal["adam", "adamw", "muon"] | str = setting("adam", short="", fixed=True, names="optimizer")
    """adam, adamw, muon (matrices; adamw for the rest), torch.optim:RMSprop, ..., or your own, my_module:MyOptimizer."""
    learning_rate: float = setting(7e-4, low=0, above=True, short="lr", search=Around(5))
    """Initial learning rate."""
    memory_learning_rate: float | None = setting(None, low=0, above=True, short="memory-lr")
    """Learning rate of the cores; None: learning_rate."""
    lr_schedule: Literal["constant", "linear", "cosine"] | str = setting("linear", short="", names="schedule")
    """Learning rates over the run: constant, down to 0 (linear, cosine), or your own, my_module:my_schedule."""
    weight_decay: float = setting(0.01, low=0, short="decay")
    """Weight decay of adamw and muon, of weights with two dimensions or more; adam has none."""
    gamma: float = setting(0.99, low=0, high=1, short="gamma", search=NearOne(4))
    """Discount factor."""
    max_grad_norm: float = setting(
        0.5, low=0, above=True, hint="; a large number turns clipping off", short="grad", search=Around(4)
    )
    """Largest gradient norm; larger gradients are scaled down to it."""
    adam_eps: float = setting(1e-5, low=0, above=True, short="eps")
    """Epsilon of adam and adamw."""
    loss_weights: tuple[str, ...] = setting((), short="losses")
    """Weights of the losses that your policy adds (its method losses), such as next_obs=0.5."""
    normalize_obs: bool = setting(True, short="norm-obs", fixed=True)
    """Running normalization of float observations; frozen during rollout and update."""
    normalize_reward: bool = setting(False, short="norm-reward", fixed=True)
    """Divide rewards by the running standard deviation of returns; frozen during rollout and update."""
    precision: Literal["fp32", "bf16"] = setting("fp32", short="")
    """Precision of rollout and update; bf16 runs under autocast."""
    max_bad_updates: int = setting(10, low=1, about="upkeep")
    """Stop after this many updates in a row without a finite loss and gradient."""
    accelerators: Literal["on", "off"] = setting("on", about="upkeep")
    """Hand-written forms of losses and rollouts; off: plain PyTorch computes the same, for comparisons."""

    seed: int = setting(1, low=0, high=2**63 - 1, about="sample", fixed=True)  # what numpy and torch both take
    """Seed for environments, policy and sampling."""
    device: str = setting("auto", about="place", per_process=True)
    """cpu, cuda, or auto (cuda if there is a GPU)."""
    threads: int | None = setting(
        None, low=1, high=1024, about="place", per_process=True
    )  # OpenMP crashes with very many
    """CPU threads; None: chosen by the size of the network and the batch."""

    name: str | None = setting(None, about="place", fixed=True)
    """Name of the run; by default core, what differs from the defaults, and seed."""
    run_dir: str | None = setting(None, about="place", per_process=True)  # a shared disk may be mounted elsewhere
    """Folder of the run; by default runs/<env>/<name>."""
    checkpoint_every: int = setting(50, low=0, hint="; 0 saves only at the end", about="upkeep")
    """Updates between checkpoints; 0: only at the end."""
    keep_checkpoints: int = setting(3, low=1, about="upkeep")
    """Number of recent checkpoints to keep, in addition to the best."""
    eval_every: int | None = setting(None, low=0, hint="; 0 turns it off", about="upkeep")
    """Updates between evaluations during training; None: up to 20 in all, for at most 2.5% of the steps; 0: none."""
    eval_episodes: int = setting(20, low=1, about="upkeep")
    """Episodes per evaluation, if eval_every is a number."""
    final_eval_episodes: int = setting(100, low=1, about="sample")
    """Episodes of the final evaluation, which gives the result."""
    replay_check_every: int = setting(50, low=0, hint="; 0 checks only the first update", about="upkeep")
    """Updates between replay checks; 0: only the first update is checked."""
    track: bool = setting(False, about="place")
    """Also log to Weights & Biases, if installed."""
    tensorboard: bool = setting(True, about="place")
    """Write TensorBoard events, if installed."""
    quiet: bool = setting(False, about="place", per_process=True)
    """Print only the result."""

    def __post_init__(self) -> None:
        self._check_objects()
        if isinstance(self.core, type):
            self.core = _core_name(self.core)
        if isinstance(self.loss_weights, dict):
            self.loss_weights = tuple(f"{name}={weight}" for name, weight in self.loss_weights.items())
        settings.check(self)
        self.weights_of_losses()
        self._check_algorithm()
        self._check_named("core")
        for name in ("encoder", "optimizer", "lr_schedule"):
            self._check_named(name)
        self._check_name()
        if self.env_timeout is not None and self.vectorization == "sync":
            raise ValueError(
                f"{given('env_timeout', self.env_timeout)} needs {named('vectorization')} async or workers: a step can only be "
                "timed out if the environments run in processes of their own"
            )
        self.keep_obs = checked_entries(self.keep_obs)
        inputs = set(self.inputs)
        if (inputs and "obs" not in inputs) or not inputs <= {"obs", "prev_action", "prev_reward"}:
            raise ValueError(f"{given('inputs', self.inputs)} must be obs and optionally prev_action and prev_reward")

    # --- what follows from the settings ------------------------------------------------------------------------------

    def weights_of_losses(self) -> dict[str, float]:
        """The weights of the policy's own losses by name. In Python, `loss_weights` may be such a dict."""
        try:
            pairs = [(name, float(weight)) for name, _, weight in (text.partition("=") for text in self.loss_weights)]
        except ValueError:
            pairs = [("", 0.0)]
        weights = dict(pairs)
        if len(weights) < len(pairs) or not all(n and n.isprintable() and math.isfinite(w) for n, w in pairs):
            raise ValueError(
                f"{given('loss_weights', self.loss_weights)} must be names with numbers, each once, such as next_obs=0.5"
            )
        return weights

    @property
    def sequence_length(self) -> int:
        """Steps of a training sequence; 0 while num_steps is not chosen."""
        return self.num_steps

    @property
    def num_updates(self) -> int:
        """Rollouts that reach total_steps; the last one may go beyond. Known once num_envs and num_steps are."""
        if not (self.num_envs and self.num_steps):
            raise ValueError("num_envs and num_steps are chosen when the run is made; see trainer.config")
        return max(1, -(-self.total_steps // (self.num_envs * self.num_steps)))

    @property
    def env_options(self) -> dict[str, Any]:
        """What `holdfast.envs.make` takes, besides the environment, to make the task of this run."""
        return {name: getattr(self, name) for name in ENV_OPTIONS}

    def without_env_options(self: Config) -> Config:
        """For another environment: the arguments and masks of this one do not apply to it."""
        return dataclasses.replace(self, **{name: settings.default_of(RunConfig, name) for name in ENV_OPTIONS})

    @property
    def hidden(self) -> tuple[str, str] | None:
        """What of the observations is set to 0, and the wrapper that does it; None without a mask."""
        if self.keep_obs:
            return f"all but entries {' '.join(self.keep_obs)} hidden", f"KeepObs(env, {self.keep_obs})"
        if self.mask_position:
            return "positions hidden", "PositionMask(env)"
        return ("velocities hidden", "VelocityMask(env)") if self.mask_velocity else None

    def require_envs_for(self, ranks: int) -> None:
        """Raise ValueError unless every rank gets enough environments."""
        if self.num_envs < ranks:
            raise ValueError(
                f"{given('num_envs', self.num_envs)} over {ranks} ranks leaves some without an environment; use more "
                "environments or fewer ranks"
            )

    def describe_sizes(self) -> str:
        """The sizes of a run in words."""
        return f"{_counted(self.num_envs, 'environment')} x {_counted(self.num_steps, 'step')}"

    def shared_by_ranks(self) -> dict[str, Any]:
        """What must be equal on all ranks of a run: everything but what belongs to one process or machine."""
        declared = settings_of(type(self))
        return {name: value for name, value in self.to_dict().items() if not declared[name].per_process}

    # --- where a run lies --------------------------------------------------------------------------------------------

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
        presets = [preset for preset in PRESETS.values() if preset["env"] == self.env and _is_of(preset, type(self))]
        return "-".join([run_names.kind_of(self), *run_names.differences(self, presets), f"seed{self.seed}"])

    @property
    def plain_name(self) -> str:
        """Core or policy, and seed: what 0.1 named a run that was given no name."""
        return f"{run_names.kind_of(self)}-seed{self.seed}"

    # --- as plain data -----------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Plain data: strings, numbers, lists, dicts."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_dict(cls: type[Config], d: dict[str, Any], allow_imports: bool | Collection[str] = False) -> Config:
        """The inverse of `to_dict`: a config of the class that "algorithm" names, which must be this class or one based on it.

        allow_imports: import the module of an algorithm of the user's own, `module:Name`; True, or the names that may be.
        """
        if not isinstance(d, dict):
            raise ValueError(f"settings are a table of names and values, this is a {type(d).__name__}")
        algorithm = d.get("algorithm", BEFORE_ALGORITHMS if cls is RunConfig else None)
        if algorithm is not None:
            found = config_class(algorithm, allow_imports)
            if not issubclass(found, cls):
                raise ValueError(
                    f"these are settings of {algorithm}; read them with {_public_name(found)}, or hf.RunConfig"
                )
            cls = found
        d = cls._upgraded(d)
        known = settings_of(cls)
        unknown = sorted(set(d) - set(known))
        if unknown:
            similar = get_close_matches(str(unknown[0]), known, 1)
            hint = f"did you mean {similar[0]}?" if similar else "`holdfast train --help` lists them, with - for _"
            more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
            raise ValueError(f"unknown settings {unknown[:5]}{more}; {hint}")
        settings.check_types(cls, d)
        return cls(**d)

    @classmethod
    def _upgraded(cls, d: dict[str, Any]) -> dict[str, Any]:
        """Settings that an earlier version wrote, completed by those that it did not have."""
        return d

    @classmethod
    def load(cls: type[Config], path: str | Path, allow_imports: bool | Collection[str] = False) -> Config:
        """Read a run's config.json."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=_each_once)
            return cls.from_dict(data, allow_imports)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{path}: not a JSON file ({error})") from error
        except imports.ImportNotAllowedError as error:
            raise imports.ImportNotAllowedError(f"{path}: {error}") from error
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    @classmethod
    def preset(cls: type[Config], name: str, /, **overrides: Any) -> Config:
        """Settings that solve a task: `TrainConfig.preset("repeat-previous-easy", seed=2)`."""
        if name not in PRESETS:
            likely = get_close_matches(name, PRESETS, 1)
            hint = f"did you mean {likely[0]}?" if likely else f"one of {', '.join(PRESETS)}"
            raise ValueError(f"unknown preset {name!r}; {hint}")
        found = config_class(PRESETS[name].get("algorithm", BEFORE_ALGORITHMS))
        if not issubclass(found, cls):
            raise ValueError(
                f"the preset {name} belongs to {_public_name(found)}: {_public_name(found)}.preset({name!r})"
            )
        return found(**{**PRESETS[name], **overrides})

    # --- checks that need more than one setting, or more than its type -----------------------------------------------

    def _check_objects(self) -> None:
        """Objects are given by name here; environment, policy and algorithm as an object to the trainer."""
        for name, kind in imports.names_objects(type(self)).items():
            value = getattr(self, name)
            if name != "core" and not isinstance(value, str) and not (name == "policy" and value is None):
                what = f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
                or_object = f"; or pass it to the trainer, hf.Trainer(config, {name}=...)"
                raise ValueError(
                    f'{name} is {what}, expected a name: {name}="my_module:My{kind.title()}"'
                    f"{or_object if name in ('env', 'policy', 'algorithm') else ''}"
                )

    def _check_algorithm(self) -> None:
        from holdfast.config import ALGORITHMS

        known = ALGORITHMS.get(self.algorithm)
        if known is not None and not isinstance(self, known):
            raise ValueError(
                f"{given('algorithm', self.algorithm)} has settings of its own; use {_public_name(known)}(...)"
            )
        if known is None and self.algorithm and not is_import_name(self.algorithm):
            raise ValueError(
                f"{given('algorithm', self.algorithm)} must be one of {', '.join(ALGORITHMS)}, or my_module:MyAlgorithm"
            )

    def _check_named(self, name: str) -> None:
        value, kinds = getattr(self, name), get_args(settings.types_of(RunConfig)[name])
        known = [choice for kind in kinds for choice in get_args(kind)]
        if not isinstance(value, str) or not (value in known or is_import_name(value)):
            own = f"my_module:My{imports.names_objects(type(self))[name].title()}"
            raise ValueError(f"{given(name, value)} must be one of {', '.join(known)}, or {own}")

    def _check_name(self) -> None:
        if self.name and not self.name.isprintable():
            raise ValueError(
                f"{named('name')} {self.name!r:.40} is the name of a folder: use letters, digits and signs"
            )
        if self.name and (Path(self.name).is_absolute() or {"..", ".", ""} & set(self.name.split("/"))):
            raise ValueError(
                f"{named('name')} {self.name!r} leaves the folder runs/; use {named('run_dir')} for a folder elsewhere"
            )


def checked_entries(parts: Iterable[str | int]) -> tuple[str, ...]:
    """Entries of a flat observation as `keep_obs` names them: numbers and slices. ValueError for anything else.

    >>> checked_entries(["0:5", 7])
    ('0:5', '7')
    """
    texts = tuple(map(str, parts))
    for text in texts:
        if not re.fullmatch(r"[0-9]{1,9}|[0-9]{0,9}:[0-9]{0,9}(:[1-9][0-9]{0,8})?", text):
            raise ValueError(f"{given('keep_obs', text)}: expected numbers and slices from 0 on, such as 7, 0:5 or 8:")
    return texts


def config_class(algorithm: Any, allow_imports: bool | Collection[str] = True) -> type[RunConfig]:
    """The config class of an algorithm by its name. allow_imports: for `module:Name`; see `RunConfig.from_dict`."""
    from holdfast.config import ALGORITHMS

    if isinstance(algorithm, str) and algorithm in ALGORITHMS:
        return ALGORITHMS[algorithm]
    if not isinstance(algorithm, str) or not is_import_name(algorithm):
        raise ValueError(
            f"{named('algorithm')} is {algorithm!r:.40}, expected one of {', '.join(ALGORITHMS)}, or my_module:MyAlgorithm"
        )
    imports.require_name_allowed("algorithm", algorithm, "it names", allow_imports)
    found = import_named(algorithm, kind="algorithm")
    if not isinstance(found, type) or not imports.is_subclass_of(found, "algorithm"):
        raise ValueError(f"algorithm {algorithm!r} is no class based on hf.Algorithm")
    return found.Config  # type: ignore[attr-defined]


def _is_of(preset: dict[str, Any], config: type) -> bool:
    from holdfast.config import ALGORITHMS

    return ALGORITHMS[preset.get("algorithm", BEFORE_ALGORITHMS)] is config


def _public_name(config: type) -> str:
    return f"hf.{config.__name__}" if config.__module__.startswith("holdfast.") else config.__name__


def _core_name(core: type) -> str:
    if not imports.is_subclass_of(core, "core"):
        raise ValueError(
            f"core is the class {core.__module__}.{core.__qualname__}, which is no hf.Core; use one by its name, "
            'core="lstm", or a class such as hf.LSTM'
        )
    return name_of(core)


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, which would silently take the last of two entries with one name."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name} comes twice")
        found[name] = value
    return found


def _counted(count: int, thing: str) -> str:
    return f"{count} {thing}{'' if count == 1 else 's'}"
