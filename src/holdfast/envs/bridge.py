"""`make`: a vector environment from an id, a class, a function or an environment, always with SAME_STEP autoreset.

Environments of Holdfast and those written in JAX are on `device` and use tensors. All others are a gymnasium
`SyncVectorEnv` or `AsyncVectorEnv`, or a `WorkersVectorEnv`, and use numpy arrays, whatever `device` is. `user_envs.py` makes what
is not an id. What the trainer does with an environment is in `rollout/vector_env.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher, get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import gymnasium as gym

from holdfast.config.imports import BRIDGES
from holdfast.envs import observation_masks, trials, user_envs
from holdfast.envs.catalog import CATALOG, register_all
from holdfast.envs.jax.protocol import is_jax_env, keep_jax_from_preallocating
from holdfast.envs.observation_masks import Wrapper
from holdfast.named_objects import import_module, installed_only

Vectorization = Literal["sync", "async", "workers"]
EnvSpec = gym.envs.registration.EnvSpec


class UnknownEnvError(ValueError):
    """No environment has this id. The message names the most similar ids."""


def make(
    env: Any,
    num_envs: int,
    *,
    device: Any = "cpu",
    seed: int | None = None,
    vectorization: Vectorization = "sync",
    mask_velocity: bool = False,
    mask_position: bool = False,
    keep_obs: Sequence[str | int] = (),
    trial_episodes: int = 1,
    env_kwargs: dict[str, Any] | None = None,
) -> gym.vector.VectorEnv[Any, Any, Any]:
    """A vector environment with `num_envs` copies of `env`.

    `env` is an id: one of ours ("holdfast/TMaze-v0"), any gymnasium id ("CartPole-v1", "my_module:MyEnv-v0"), a class or
    function in a module ("my_module:MyEnv"), or a POPGym name ("popgym:RepeatPreviousEasy"). Modules are also found in the
    current folder. docs/environments.md lists the other prefixes. Or it is a class, a function that makes one environment
    (or, if it has a parameter `num_envs`, a vector environment), one gymnasium environment (row 0 is that object, the
    others are deep copies), or a vector environment, which stays as it is.

    With `seed` the environments are reset once with it, so that a later `reset()` without a seed and
    `action_space.sample()` are reproducible. `vectorization` says how gymnasium environments run: "sync", one after
    another; "async", each in its own process; or "workers", in a process per core, several in each. `env_kwargs` are the
    arguments of the environment's constructor. `mask_velocity`, `mask_position` and `keep_obs` set entries of flat
    observations to 0: velocities, positions, or all but those named, as in `keep_obs=("0:5", 7)`. `trial_episodes`
    episodes of one task are a trial (`Trials`).

    >>> env = make("holdfast/TMaze-v0", 2, seed=0, env_kwargs={"length": 5})
    >>> env.reset()[0].shape
    torch.Size([2, 4])
    """
    if vectorization not in get_args(Vectorization):
        raise ValueError(f'vectorization is {vectorization!r}; expected "sync", "async" or "workers"')
    user_envs.check_num_envs(num_envs)
    mask = trials.around(observation_masks.wrapper(mask_velocity, mask_position, keep_obs), trial_episodes)
    source, kwargs = find(env) if isinstance(env, str) else env, dict(env_kwargs or {})
    if is_jax_env(source):
        from holdfast.envs.jax.suites import from_jax

        source = partial(from_jax, source)
    if isinstance(source, EnvSpec):
        with user_envs.constructor_errors(env, kwargs):
            made = _from_spec(source, num_envs, device, vectorization, mask, kwargs)
    elif user_envs.can_be_made_again(source):
        if isinstance(env, str) and env.startswith("envpool:") and vectorization == "async":
            from holdfast.envs import envpool

            kwargs.setdefault("batch_size", envpool.default_batch(num_envs))
        with user_envs.constructor_errors(env, kwargs):
            made = user_envs.from_callable(source, num_envs, device, vectorization, mask, kwargs)
    else:
        made = user_envs.from_object(source, num_envs, vectorization, mask, kwargs)
    if seed is not None:
        made.reset(seed=seed)
        made.action_space.seed(seed)
    return made


def _from_spec(
    spec: EnvSpec, num_envs: int, device: Any, vectorization: str, mask: Wrapper | None, kwargs: dict[str, Any]
) -> gym.vector.VectorEnv[Any, Any, Any]:
    ours = spec.id.startswith("holdfast/")
    if ours or spec.entry_point is None:
        observation_masks.require_single(mask)
        if ours:
            assert isinstance(spec.vector_entry_point, str)
            user_envs.check_arguments(gym.envs.registration.load_env_creator(spec.vector_entry_point), kwargs)
            kwargs["device"] = device
        return gym.make_vec(spec, num_envs, **kwargs)
    if spec.id.startswith("popgym-"):
        kwargs.setdefault("disable_env_checker", True)  # it warns about info dicts that some of them share
    if vectorization == "workers":
        return user_envs.vectorize([partial(gym.make, spec, **kwargs)] * num_envs, vectorization, mask)
    return gym.make_vec(
        spec,
        num_envs,
        vectorization_mode=vectorization,
        vector_kwargs={"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP},
        wrappers=user_envs.wrappers(mask),
        **kwargs,
    )


_IN_OTHER_PACKAGES = (
    ("ALE/", "ale-py", "ale_py"),
    ("MiniGrid-", "minigrid", "minigrid"),
    ("BabyAI-", "minigrid", "minigrid"),
)


def find(env_id: str) -> EnvSpec | Callable[..., Any]:
    """The gymnasium spec, class or function of an id that `make` accepts, or an error that names the most similar ids."""
    register_all()
    if env_id.partition(":")[0] in BRIDGES:
        with installed_only():
            return _find_bridged(env_id)
    user_envs.refuse_object_name(env_id)
    module_name, colon, name = env_id.rpartition(":")
    module = None
    if colon:
        keep_jax_from_preallocating()  # the module may use JAX as it is imported
        try:
            module = import_module(module_name)
        except ValueError as error:
            meant = get_close_matches(module_name, BRIDGES, 1, cutoff=0.75)
            raise UnknownEnvError(
                f"{env_id!r}: {error}{f'; did you mean {meant[0]}:{name}?' if meant else ''}"
            ) from error
        found = _attribute(module, name)
        if (callable(found) or is_jax_env(found)) and name not in gym.registry:
            return found
    try:
        return gym.spec(name)
    except gym.error.Error as unknown:
        if module is not None:
            raise UnknownEnvError(user_envs.what_a_module_offers(module, name)) from unknown
        if Path(f"{name}.py").exists():
            raise UnknownEnvError(f"{name} is a module; name the class in it: {name}:MyEnv") from unknown
        for prefix, distribution, package in _IN_OTHER_PACKAGES:
            if name.startswith(prefix):
                return _registered_by(package, name, distribution)
        module_name, _, inside = name.rpartition(".")
        if module_name and Path(f"{module_name.replace('.', '/')}.py").exists():
            raise UnknownEnvError(
                f"no environment {name!r}; a class in a module is named {module_name}:{inside}"
            ) from unknown
        known = [*gym.registry, *_popgym_names().values()]
        raise UnknownEnvError(f"no environment {env_id!r}{_nearest(name, known)}") from unknown


def _registered_by(package: str, env_id: str, distribution: str) -> EnvSpec:
    """The spec of an id that an installed package registers when it is imported."""
    try:
        with installed_only():
            import_module(package)
    except ValueError as error:
        raise UnknownEnvError(f"{env_id!r} is in another package: pip install {distribution} ({error})") from error
    try:
        return gym.spec(env_id)
    except gym.error.Error as unknown:
        raise UnknownEnvError(
            f"{package} has no environment {env_id!r}{_nearest(env_id, list(gym.registry))}"
        ) from unknown


def _find_bridged(env_id: str) -> EnvSpec | Callable[..., Any]:
    """What makes an environment of another package."""
    if env_id.startswith("popgym:"):
        return _popgym_spec(env_id)
    if env_id.startswith("pettingzoo:"):
        return _pettingzoo_maker(env_id)
    if env_id.startswith("envpool:"):
        from holdfast.envs import envpool

        return envpool.named(env_id)
    from holdfast.envs.jax import suites

    return suites.find(env_id)


def _pettingzoo_maker(env_id: str) -> Callable[..., Any]:
    from holdfast.envs.pettingzoo import from_pettingzoo, named

    make_game = named(env_id)

    def make_rows(num_envs: int, **kwargs: Any) -> Any:
        return from_pettingzoo(partial(make_game, **kwargs), num_envs)

    return make_rows


def _attribute(module: Any, path: str) -> Any:
    for part in path.split("."):
        module = getattr(module, part, None)
    return module


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
        with installed_only():
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
    return (
        f"; `holdfast envs` lists ours, {CATALOG[0].id} and {len(CATALOG) - 1} more, and a class of your own is named "
        "my_module:MyEnv, after its file"
    )


def _short_name(env_id: str) -> str:
    """Without namespace and version, in lower case."""
    return re.sub(r"^.*[/:]|-v\d+$", "", env_id).lower()
