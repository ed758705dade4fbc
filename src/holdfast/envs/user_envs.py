"""Environments of your own for `make`: a class, a function, one environment, or a vector environment.

Also the errors about them: a constructor that raises, an argument of the wrong type, a name that a module does not have.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import multiprocessing
import signal
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from functools import partial
from numbers import Integral
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np

from holdfast.config.imports import JAX_SUITES
from holdfast.envs.jax.protocol import is_jax_env
from holdfast.envs.observation_masks import Wrapper, require_single
from holdfast.envs.workers import WorkersVectorEnv, draw_other_numbers, global_entropy
from holdfast.named_objects import OWN_ENV, name_of

VECTOR_ENV = ("num_envs", "single_observation_space", "single_action_space", "reset", "step")
NO_REWARD = "step() returned None as the reward"


# --- what a run records -----------------------------------------------------------------------------------------------


def can_be_made_again(env: Any) -> bool:
    """Whether more copies of `env` can be made: an id, a class or a function, and not an environment itself, unless it is
    written in JAX and so made of functions."""
    if isinstance(env, (str, type)) or is_jax_env(env):
        return True
    return callable(env) and not is_env(env) and not is_vector_env(env)


def recorded_name(env: Any) -> str:
    """What a run's config says about an environment that was passed to it: an id where there is one."""
    if isinstance(env, str):
        return env
    if can_be_made_again(env):
        with contextlib.suppress(ValueError, AttributeError):
            name = name_of(env)
            if not name.startswith("__main__:"):  # another program has another main module
                return name
        return OWN_ENV + getattr(env, "__name__", type(env).__name__).strip("<>")
    spec = getattr(env, "spec", None)
    return OWN_ENV + (spec.id if spec is not None else type(getattr(env, "unwrapped", env)).__name__)


def steps_all_at_once(env_id: str) -> bool:
    """Whether an id names an environment whose copies step together: one of ours in torch, or one in JAX."""
    return env_id.startswith("holdfast/") or env_id.partition(":")[0] in JAX_SUITES


def is_object_name(env_id: str) -> bool:
    """Whether a recorded name stands for an environment that only the program that made it has."""
    return env_id.startswith(OWN_ENV)


def refuse_object_name(env_id: str) -> None:
    """Raise ValueError if nothing can be made from a recorded name."""
    if is_object_name(env_id):
        raise ValueError(
            f"this run was trained on an environment that Trainer(env=...) was given ({env_id.removeprefix(OWN_ENV)}) and "
            "that cannot be made from its name: pass it again with env=, or name it with --env module:Name"
        )


def is_vector_env(env: Any) -> bool:
    """Whether this is a vector environment, of whatever class."""
    return not isinstance(env, type) and all(hasattr(env, name) for name in VECTOR_ENV)


def is_env(env: Any) -> bool:
    """Whether this is one gymnasium environment."""
    return isinstance(env, gym.Env)


# --- vector environments ----------------------------------------------------------------------------------------------


def from_callable(
    make_env: Callable[..., Any],
    num_envs: int,
    device: Any,
    vectorization: str,
    mask: Wrapper | None,
    kwargs: dict[str, Any],
) -> gym.vector.VectorEnv[Any, Any, Any]:
    """From a class, or a function that makes one environment; with a parameter `num_envs`, from a vector environment's."""
    parameters = _parameters(make_env)
    check_arguments(make_env, kwargs)
    if isinstance(make_env, type) and callable(getattr(make_env, "observation_space", None)):  # a space per agent
        from holdfast.envs.pettingzoo import from_pettingzoo

        require_single(mask)
        return from_pettingzoo(partial(make_env, **kwargs), num_envs)
    if "num_envs" not in parameters:
        return vectorize([partial(make_env, **kwargs)] * num_envs, vectorization, mask)
    require_single(mask)
    if "device" in parameters:
        kwargs.setdefault("device", device)
    env = make_env(num_envs=num_envs, **kwargs)
    if not is_vector_env(env):
        raise TypeError(f"it takes num_envs, but it made a {type(env).__name__}, not a vector environment")
    return env


def from_object(
    env: Any, num_envs: int, vectorization: str, mask: Wrapper | None, kwargs: dict[str, Any]
) -> gym.vector.VectorEnv[Any, Any, Any]:
    """From one environment, which is row 0 and is copied for the others; a vector environment stays as it is."""
    unused = [name for name, value in {"env_kwargs": kwargs, "a mask or trials": mask}.items() if value]
    if unused and (is_env(env) or is_vector_env(env)):
        raise ValueError(
            f"{' and '.join(unused)} cannot change a {type(env).__name__} that is already made; leave it out"
        )
    if is_vector_env(env):
        return env
    if not is_env(env):
        lacking = next(name for name in VECTOR_ENV if not hasattr(env, name))
        raise TypeError(
            f"{type(env).__name__} is neither a gymnasium nor a vector environment (it has no {lacking}); expected an "
            "id, a class, a function, a gymnasium.Env or a gymnasium.vector.VectorEnv"
        )
    copies = [env]
    try:
        copies += [copy.deepcopy(env) for _ in range(num_envs - 1)]
    except Exception as error:  # the environment is the user's code
        raise ValueError(
            f"{type(env.unwrapped).__name__} cannot be copied for num_envs={num_envs} ({type(error).__name__}: {error}); "
            "pass a function that makes one, env=lambda: MyEnv(...), or set num_envs=1"
        ) from error
    return vectorize([partial(_same, one) for one in copies], vectorization, None)


def _same(env: Any) -> Any:
    return env


def vectorize(
    makers: list[Callable[[], Any]], vectorization: str, mask: Wrapper | None
) -> gym.vector.VectorEnv[Any, Any, Any]:
    """A vector environment of what `makers` make, each in the usual wrappers."""
    around = wrappers(mask)  # here and not in a worker, whose random numbers they decide

    def wrapped(make_one: Callable[[], Any]) -> Any:
        env = make_one()
        if not is_env(env):
            raise TypeError(
                f"what it made is a {type(env).__name__}, expected a gymnasium.Env (holdfast.envs.from_pettingzoo takes "
                "functions that make PettingZoo's parallel environments)"
            )
        for wrapper in around:
            env = wrapper(env)
        return env

    kinds = {"sync": gym.vector.SyncVectorEnv, "async": gym.vector.AsyncVectorEnv, "workers": WorkersVectorEnv}
    env_fns = [partial(wrapped, make_one) for make_one in makers]
    return kinds[vectorization](env_fns, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # some functions of C modules do not say
        return {"options": inspect.Parameter("options", inspect.Parameter.VAR_KEYWORD)}


# --- errors -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def constructor_errors(env: Any, kwargs: dict[str, Any]) -> Iterator[None]:
    """Errors in making an environment say which one, with which arguments, in one line."""
    given = dict(kwargs)
    try:
        yield
    except gym.error.Error:
        raise
    except Exception as error:  # a constructor is the user's code and may raise anything
        name = env if isinstance(env, str) else getattr(env, "__name__", type(env).__name__)
        if isinstance(error, ImportError):
            raise ImportError(f"{name}: {error}", name=error.name) from error
        arguments = ", ".join(f"{key}={value!r}" for key, value in given.items())
        text = " ".join(str(error).split())
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        hint = "; --env-args name=value gives it" if "required positional argument" in text else ""
        raise ValueError(f"{name}{f' with {arguments}' if arguments else ''}: {kind}{text}{hint}") from error


def check_num_envs(num_envs: Any) -> None:
    """Raise ValueError unless this is a number of environments."""
    if isinstance(num_envs, bool) or not isinstance(num_envs, Integral) or num_envs < 1:
        raise ValueError(f"num_envs must be an integer of at least 1, got {num_envs!r}")


def check_arguments(constructor: Callable[..., Any], kwargs: dict[str, Any]) -> None:
    """Raise ValueError for an argument that the constructor does not take, or whose type is not what it says."""
    parameters = _parameters(constructor)
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    known = [name for name in parameters if name not in ("num_envs", "device")]
    kinds: dict[Any, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,)}
    for name, value in kwargs.items():
        if name not in parameters:
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            raise ValueError(f"there is no argument {name!r}; {takes}")
        annotation = parameters[name].annotation
        wanted = getattr(annotation, "__name__", annotation)  # a class, or its name where annotations are texts
        allowed = kinds.get(wanted, (object,))
        if not isinstance(value, allowed) or (isinstance(value, bool) and wanted in ("int", "float")):
            raise ValueError(f"{name} is {value!r}, expected a value of type {wanted}")


def what_a_module_offers(module: ModuleType, wanted: str) -> str:
    """The message for a name that is not in a module: its environments, the most similar first."""
    ids = [
        spec.id
        for spec in gym.registry.values()
        if isinstance(spec.entry_point, str) and spec.entry_point.partition(":")[0] == module.__name__
    ]
    classes = [name for name, thing in vars(module).items() if isinstance(thing, type) and _is_env_class(thing, module)]
    offered = [*ids, *classes]
    similar = get_close_matches(wanted, offered, 1, cutoff=0.5) or offered[:3]
    hint = f"; did you mean {' or '.join(f'{module.__name__}:{name}' for name in similar)}?" if similar else ""
    return (
        f"no environment {wanted!r} in {module.__name__} ({getattr(module, '__file__', None)}): it is neither a gymnasium id "
        f"nor a class or function there{hint}"
    )


def _is_env_class(kind: type, module: ModuleType) -> bool:
    return issubclass(kind, (gym.Env, gym.vector.VectorEnv)) and kind.__module__ == module.__name__


# --- wrappers of each copy --------------------------------------------------------------------------------------------


def wrappers(mask: Wrapper | None) -> list[Any]:
    """What every copy of a gymnasium environment is wrapped in."""
    return [
        _require_spaces,
        *([mask] if mask is not None else []),
        _tuple_to_array,
        NoneRefused,
        partial(_prepare_worker, entropy=global_entropy()),
    ]


def _require_spaces(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    for name in ("observation_space", "action_space"):
        space = getattr(env, name, None)
        if not isinstance(space, gym.spaces.Space):
            has = f"has no {name}" if space is None else f"has a {type(space).__name__} as {name}"
            raise TypeError(
                f"{type(env.unwrapped).__name__} {has}; set it in __init__ to a space of gymnasium: "
                f"self.{name} = gymnasium.spaces.Box(...) or Discrete(...)"
            )
    return env


def _prepare_worker(env: gym.Env[Any, Any], entropy: int) -> gym.Env[Any, Any]:
    """For processes of environments. Ctrl-C reaches all processes, and only the one that trains should handle it."""
    if multiprocessing.current_process().name.startswith("Worker<"):  # as AsyncVectorEnv and WorkersVectorEnv name them
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        draw_other_numbers(entropy)
    return env


class NoneRefused(gym.Wrapper[Any, Any, Any, Any], gym.utils.RecordConstructorArgs):
    """Refuses None as a reward: gymnasium's vector environments take it for NaN, and a run would go on with that."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        gym.utils.RecordConstructorArgs.__init__(self)
        gym.Wrapper.__init__(self, env)

    def step(self, action: Any) -> Any:
        result = self.env.step(action)
        if isinstance(result, tuple) and len(result) == 5 and result[1] is None:
            raise TypeError(NO_REWARD)
        return result


class TupleAsMultiDiscrete(gym.ObservationWrapper[Any, Any, Any], gym.utils.RecordConstructorArgs):
    """Turns a tuple of small integers into one array, which a vector environment can stack and a policy can read."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        gym.utils.RecordConstructorArgs.__init__(self)
        gym.ObservationWrapper.__init__(self, env)
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
