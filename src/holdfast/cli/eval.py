"""`holdfast eval RUN`: play episodes with a trained policy and print returns and lengths."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from holdfast.cli.errors import user_errors
from holdfast.cli.flags import named_values, parse
from holdfast.shown_text import show


@dataclass
class EvalFlags:
    """Measure a trained policy over whole episodes."""

    run: Annotated[Path, tyro.conf.arg(metavar="RUN")]
    """A run folder, or one of its checkpoints."""
    env: str | None = None
    """Play in this environment instead of the run's, such as my_module:MyEnv."""
    env_args: tuple[str, ...] = ()
    """Arguments for the environment's constructor, as name=value; the run's other arguments stay."""
    policy: str | None = None
    """The policy class, my_module:MyPolicy, if the run does not name it."""
    episodes: int = 100
    """Episodes to play."""
    deterministic: bool = False
    """Take the most likely action, or sample; by default as the run's algorithm is evaluated: PPO samples."""
    num_envs: int | None = None
    """Environments that play at the same time; by default as many as in training, at most one per episode."""
    seed: int = 0
    """Seed for environments and sampling."""
    device: str = "cpu"
    """Where the policy runs: cpu, cuda, or auto (cuda if there is a GPU)."""
    allow_imports: bool = False
    """Import modules that the run names (an environment my_module:MyEnv-v0), which runs their code."""
    record: Path | None = None
    """An .npz file for observations, states, values, actions and distributions of every step."""
    video: Path | None = None
    """Folder for animated GIFs of three episodes, for environments that render."""


def main(argv: list[str]) -> int:
    flags = parse(EvalFlags, argv, "eval")
    env_args = named_values("--env-args", flags.env_args, "length=40")

    import numpy as np

    import holdfast as hf
    from holdfast import envs
    from holdfast.algorithms import algorithm_class
    from holdfast.config import imports
    from holdfast.display.dashboard import compact, counted, number
    from holdfast.distributed.ranks import pick_device
    from holdfast.policies.base import autocast, autocast_dtype
    from holdfast.runs import saved_policy
    from holdfast.training.eval_record import RECORDED

    with user_errors():
        device = pick_device(flags.device)
        file, saved = saved_policy.read(flags.run)
        config = saved_policy.settings(file, saved)
        if flags.env is not None and flags.env != config.env:
            config = dataclasses.replace(config.without_env_options(), env=flags.env)
        config = dataclasses.replace(config, env_kwargs={**config.env_kwargs, **env_args})
        imports.require_allowed(config, file, flags.allow_imports, typed=(flags.env,), policy=False, training=False)
        if not {"--deterministic", "--no-deterministic"} & set(argv):
            flags.deterministic = algorithm_class(config.algorithm).evaluates_deterministically
        policy = hf.load(file, flags.policy, device=str(device), allow_imports=flags.allow_imports)
        env = envs.make(
            config.env,
            flags.num_envs or min(config.num_envs, max(1, flags.episodes)),
            device=device,
            vectorization=config.vectorization,
            **config.env_options,
        )
        if flags.record is not None:
            flags.record.open("ab").close()  # a wrong place is said before the episodes
        with autocast(device, autocast_dtype(config.precision)):
            result = hf.evaluate(
                policy,
                env,
                flags.episodes,
                deterministic=flags.deterministic,
                seed=flags.seed,
                inputs=config.inputs,
                record=None if flags.record is None else RECORDED,
            )
        if flags.record is not None:
            assert result.record is not None
            with user_errors(writes=flags.record), flags.record.open("wb") as npz:
                np.savez_compressed(npz, **result.record)  # type: ignore[arg-type]
    actions = "most likely actions" if flags.deterministic else "sampled actions"
    played = " ".join([config.env, *(f"{name}={value}" for name, value in env_args.items())])
    show(f"{file}: {played}, {config.policy or config.core}, {compact(saved['steps'])} steps")
    several = len(result.returns) > 1  # one episode has no standard error
    spread = f" ± {number(result.std_error)} (mean, standard error)" if several else " (mean)"
    lowest, highest = number(min(result.returns)), number(max(result.returns))
    show(f"return  {number(result.mean_return)}{spread}, {lowest} to {highest}")
    show(f"length  {number(result.mean_length, 1)} (mean), {min(result.lengths)} to {max(result.lengths)}")
    if result.returns_in_trial:
        first, last = number(result.returns_in_trial[0]), number(result.returns_in_trial[-1])
        show(f"trials  first episode {first}, last episode {last} (means); returns and lengths are of trials")
    show(f"{counted(flags.episodes, 'trial' if result.returns_in_trial else 'episode')}, {actions}, seed {flags.seed}")
    if flags.record is not None:
        show(f"record  {flags.record}: {', '.join(result.record or ())}")
    if flags.video is not None:
        from holdfast.training.video import record_episodes

        with user_errors():
            count = min(3, flags.episodes)
            paths = record_episodes(
                policy, config, flags.video, episodes=count, deterministic=flags.deterministic, seed=flags.seed
            )
        show(*(f"video   {path}" for path in paths))
    return 0
