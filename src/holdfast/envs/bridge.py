"""`make`: a vector environment by name, from Holdfast, gymnasium or POPGym, always with SAME_STEP autoreset.

Holdfast's environments live on `device` and speak torch. All others are gymnasium's `SyncVectorEnv` or
`AsyncVectorEnv` and speak numpy, whatever `device` is.
"""

from __future__ import annotations

import multiprocessing
import re
import signal
from difflib import SequenceMatcher
from typing import Any, Literal

import gymnasium as gym
import numpy as np

from holdfast.envs.catalog import CATALOG, register_all
from holdfast.envs.velocity_mask import VelocityMask, require_known_velocities

Vectorization = Literal["sync", "async"]


class UnknownEnvError(ValueError):
    """No environment has this id; the message names the nearest that exist."""


def make(
    env_id: str,
    num_envs: int,
    *,
    device: Any = "cpu",
    seed: int | None = None,
    vectorization: Vectorization = "sync",
    mask_velocity: bool = False,
    env_kwargs: dict[str, Any] | None = None,
) -> gym.vector.VectorEnv[Any, Any, Any]:
    """`num_envs` environments of the kind `env_id`.

    `env_id` is one of ours ("holdfast/TMaze-v0"), any gymnasium id ("CartPole-v1",
    "package.module:MyEnv-v0"), or a POPGym name ("popgym:RepeatPreviousEasy"). With `seed` the environments
    are reset once with it, so that a later `reset()` without a seed is repeatable; so is
    `action_space.sample()`. `vectorization` says how gymnasium's environments run: one after another, or
    each in a process. `env_kwargs` go to the environment's constructor.

    >>> env = make("holdfast/TMaze-v0", 2, seed=0, env_kwargs={"length": 5})
    >>> env.reset()[0].shape
    torch.Size([2, 4])
    """
    if vectorization not in ("sync", "async"):
        raise ValueError(f'vectorization is {vectorization!r}; expected "sync" or "async"')
    spec = find_spec(env_id)
    if mask_velocity:
        require_known_velocities(spec.id if spec.entry_point is None else spec.name)
    kwargs = dict(env_kwargs or {})
    if spec.entry_point is None:  # a vector environment already: ours, or another package's
        if spec.id.startswith("holdfast/"):
            kwargs["device"] = device
        env = gym.make_vec(spec, num_envs, **kwargs)
    else:
        if spec.id.startswith("popgym-"):
            kwargs.setdefault("disable_env_checker", True)  # it warns of info dicts that some of them share
        wrappers: list[Any] = [VelocityMask, _as_one_array] if mask_velocity else [_as_one_array]
        wrappers.append(_deaf_to_ctrl_c)
        env = gym.make_vec(
            spec,
            num_envs,
            vectorization_mode=vectorization,
            vector_kwargs={"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP},
            wrappers=wrappers,
            **kwargs,
        )
    if seed is not None:
        env.reset(seed=seed)
        env.action_space.seed(seed)
    return env


def find_spec(env_id: str) -> gym.envs.registration.EnvSpec:
    """The gymnasium spec that an id as given to `make` stands for, or an error that names the nearest ids."""
    register_all()
    if env_id.startswith("popgym:"):
        return _popgym_spec(env_id)
    module, colon, name = env_id.rpartition(":")
    if colon:
        try:
            __import__(module)
        except ModuleNotFoundError as missing:
            raise UnknownEnvError(
                f"{env_id!r}: there is no module {missing.name!r}; expected a gymnasium id, "
                "module:id, popgym:Name or holdfast/Name"
            ) from missing
    try:
        return gym.spec(name)
    except gym.error.Error as unknown:
        known = [*gym.registry, *_popgym_names().values()]
        raise UnknownEnvError(f"no environment {env_id!r}{_nearest(name, known)}") from unknown


def _popgym_spec(env_id: str) -> gym.envs.registration.EnvSpec:
    names = _popgym_names()
    if not names:
        raise ModuleNotFoundError(f"{env_id!r} needs POPGym: pip install 'holdfast[popgym]'")
    wanted = env_id.removeprefix("popgym:").removeprefix("popgym-").removesuffix("-v0")
    for registered, name in names.items():
        if name.removeprefix("popgym:").lower() == wanted.lower():
            return gym.spec(registered)
    raise UnknownEnvError(f"no POPGym environment {wanted!r}{_nearest(env_id, list(names.values()))}")


def _popgym_names() -> dict[str, str]:
    """POPGym's environments, gymnasium's id to the name `make` takes; empty when it is not installed."""
    try:
        import popgym.envs  # noqa: F401  (registers its environments)
    except ModuleNotFoundError:
        return {}
    ids = [name for name in gym.registry if name.startswith("popgym-")]
    return {name: "popgym:" + name.removeprefix("popgym-").removesuffix("-v0") for name in ids}


def _nearest(wanted: str, known: list[str]) -> str:
    """The end of an error message: the ids nearest to the wanted one, ours first among equals."""

    def likeness(name: str) -> tuple[float, bool, float, str]:
        whole = SequenceMatcher(None, wanted.lower(), name.lower()).ratio()
        bare = SequenceMatcher(None, _bare(wanted), _bare(name)).ratio()
        return max(whole, bare), name.startswith("holdfast/"), whole, name

    likely = sorted((likeness(name) for name in known), reverse=True)
    found = [name for score, *_, name in likely[:3] if score >= 0.7]
    if found:
        return f"; did you mean {' or '.join(found)}?"
    return f"; `holdfast envs` lists ours, {CATALOG[0].id} and {len(CATALOG) - 1} more"


def _bare(env_id: str) -> str:
    return re.sub(r"^.*[/:]|-v\d+$", "", env_id).lower()


def _deaf_to_ctrl_c(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    """In a process of its own an environment leaves Ctrl-C, which reaches all processes, to the one that trains."""
    if multiprocessing.current_process().name.startswith("Worker<"):  # as gymnasium's AsyncVectorEnv calls them
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    return env


class TupleAsMultiDiscrete(gym.ObservationWrapper[Any, Any, Any]):
    """Gives a tuple of small integers as one array, which a vector environment stacks and a policy takes."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        assert isinstance(env.observation_space, gym.spaces.Tuple)
        parts = [space for space in env.observation_space if isinstance(space, gym.spaces.Discrete)]
        self.observation_space = gym.spaces.MultiDiscrete(
            [part.n for part in parts], start=[part.start for part in parts]
        )

    def observation(self, observation: Any) -> Any:
        return np.array(observation, dtype=np.int64)


def _as_one_array(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    space = env.observation_space
    if isinstance(space, gym.spaces.Tuple) and all(isinstance(part, gym.spaces.Discrete) for part in space):
        return TupleAsMultiDiscrete(env)
    return env
