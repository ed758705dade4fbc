"""`make`: a vector environment by name, from Holdfast, gymnasium or POPGym, always with SAME_STEP autoreset.

Environments of Holdfast are on `device` and use tensors. All others are a gymnasium `SyncVectorEnv` or `AsyncVectorEnv`
and use numpy arrays, whatever `device` is. What the trainer does with an environment is in `rollout/vector_env.py`.
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
    """No environment has this id. The message names the most similar ids."""


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
    """A vector environment with `num_envs` copies of `env_id`.

    `env_id` is one of ours ("holdfast/TMaze-v0"), any gymnasium id ("CartPole-v1", "package.module:MyEnv-v0"), or a
    POPGym name ("popgym:RepeatPreviousEasy"). With `seed` the environments are reset once with it, so that a later
    `reset()` without a seed and `action_space.sample()` are reproducible. `vectorization` says how gymnasium
    environments run: "sync", one after another, or "async", each in its own process. `env_kwargs` are the arguments of
    the environment's constructor.

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
            kwargs.setdefault("disable_env_checker", True)  # it warns about info dicts that some of them share
        wrappers: list[Any] = [VelocityMask, _tuple_to_array] if mask_velocity else [_tuple_to_array]
        wrappers.append(_ignore_ctrl_c_in_worker)
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
    """The gymnasium spec of an id that `make` accepts, or an error that names the most similar ids."""
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
    """POPGym's environments: gymnasium's id to the name that `make` accepts. Empty if POPGym is not installed."""
    try:
        import popgym.envs  # noqa: F401  (registers its environments)
    except ModuleNotFoundError:
        return {}
    ids = [name for name in gym.registry if name.startswith("popgym-")]
    return {name: "popgym:" + name.removeprefix("popgym-").removesuffix("-v0") for name in ids}


def _nearest(wanted: str, known: list[str]) -> str:
    """The end of an error message: the most similar ids, ours first among equals."""

    def similarity(name: str) -> tuple[float, bool, float, str]:
        whole = SequenceMatcher(None, wanted.lower(), name.lower()).ratio()
        short = SequenceMatcher(None, _short_name(wanted), _short_name(name)).ratio()
        return max(whole, short), name.startswith("holdfast/"), whole, name

    ranked = sorted((similarity(name) for name in known), reverse=True)
    found = [name for score, *_, name in ranked[:3] if score >= 0.7]
    if found:
        return f"; did you mean {' or '.join(found)}?"
    return f"; `holdfast envs` lists ours, {CATALOG[0].id} and {len(CATALOG) - 1} more"


def _short_name(env_id: str) -> str:
    """Without namespace and version, in lower case."""
    return re.sub(r"^.*[/:]|-v\d+$", "", env_id).lower()


def _ignore_ctrl_c_in_worker(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    """Ctrl-C reaches all processes. Only the one that trains should handle it, not the processes of environments."""
    if multiprocessing.current_process().name.startswith("Worker<"):  # the names that AsyncVectorEnv gives them
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    return env


class TupleAsMultiDiscrete(gym.ObservationWrapper[Any, Any, Any]):
    """Turns a tuple of small integers into one array, which a vector environment can stack and a policy can read."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        assert isinstance(env.observation_space, gym.spaces.Tuple)
        parts = [space for space in env.observation_space if isinstance(space, gym.spaces.Discrete)]
        self.observation_space = gym.spaces.MultiDiscrete(
            [part.n for part in parts], start=[part.start for part in parts]
        )

    def observation(self, observation: Any) -> Any:
        return np.array(observation, dtype=np.int64)


def _tuple_to_array(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    space = env.observation_space
    if isinstance(space, gym.spaces.Tuple) and all(isinstance(part, gym.spaces.Discrete) for part in space):
        return TupleAsMultiDiscrete(env)
    return env
