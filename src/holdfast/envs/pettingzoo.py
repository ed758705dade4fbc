"""PettingZoo's parallel games as a vector environment: a row per agent, one policy for all of them (parameter sharing).

    env = holdfast.envs.from_pettingzoo(lambda: multiwalker_v9.parallel_env(), num_envs=24)   # 3 agents: 8 games
    hf.Trainer(hf.TrainConfig(num_envs=24, ...), env=env).run()

Row g * A + a is agent a of game g, always. An agent that leaves ends its episode; its row is *absent* (`info["absent"]`)
until the agent comes back or the game starts again, which begins a new episode with fresh memory. Steps of absent rows are
dummy steps: they are in no loss and in no statistics. A game is reset in the step in which its last agent leaves. Nothing
here imports PettingZoo: whatever has its parallel interface works.
"""

from __future__ import annotations

import copy
import importlib.util
import pkgutil
import re
from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array

from holdfast.envs.numpy_view import readable_final_obs
from holdfast.named_objects import import_module
from holdfast.state import tree_map

PREFIX = "pettingzoo:"
MASK = "action_mask"  # in an agent's info, or next to "observation" in its observation


def named(env_id: str) -> Callable[..., Any]:
    """The function that makes a game: `pettingzoo:sisl.multiwalker_v9` is `pettingzoo.sisl.multiwalker_v9.parallel_env`."""
    module_name = env_id.removeprefix(PREFIX)
    try:
        module = import_module(f"pettingzoo.{module_name}")
    except ValueError as error:
        versions = _versions(module_name)
        hint = f"did you mean {PREFIX}{versions[-1]}?" if versions else _what_to_install(error.__cause__)
        raise ValueError(f"{env_id}: {error}; {hint}") from error
    if not hasattr(module, "parallel_env"):
        versions = _versions(module_name)
        raise ValueError(
            f"{env_id}: pettingzoo.{module_name} has no parallel_env; "
            + (f"did you mean {PREFIX}{versions[-1]}?" if versions else "its agents do not act at the same time")
        )
    return module.parallel_env


def _versions(module_name: str) -> list[str]:
    """Games of the same name and other versions: sisl.multiwalker_v9 for sisl.multiwalker."""
    family, _, game = module_name.rpartition(".")
    spec = (
        importlib.util.find_spec(f"pettingzoo.{family}") if family and importlib.util.find_spec("pettingzoo") else None
    )
    names = [] if spec is None else [one.name for one in pkgutil.iter_modules(spec.submodule_search_locations)]
    stem = re.sub(r"_v\d+$", "", game)
    return [
        f"{family}.{name}" for name in sorted(names) if re.fullmatch(rf"{re.escape(stem)}_v\d+", name) and name != game
    ]


def _what_to_install(error: BaseException | None) -> str:
    missing = str(getattr(error, "name", None) or "pettingzoo").partition(".")[0]
    if missing != "pettingzoo":
        return f"this game needs {missing}; PettingZoo's documentation says which of its extras installs it"
    if importlib.util.find_spec("pettingzoo") is None:
        return "install PettingZoo: pip install 'holdfast[pettingzoo]'"
    return "this version of PettingZoo has no such game"


def from_pettingzoo(make_game: Callable[[], Any], num_envs: int) -> PettingZooRows:
    """A vector environment of `num_envs` rows, rounded up to whole games."""
    first = make_game()
    agents = getattr(first, "possible_agents", None)
    if not agents:
        raise TypeError(
            f"{type(first).__name__} is not a PettingZoo parallel environment with possible_agents; make it with "
            "parallel_env(...), or convert it with pettingzoo.utils.aec_to_parallel (written in JAX, it needs reset(self, key))"
        )
    return PettingZooRows([first, *(make_game() for _ in range(-(-num_envs // len(agents)) - 1))])


class PettingZooRows(VectorEnv[Any, Any, Any]):
    """Games of one kind, a row per possible agent. All agents must have the same spaces."""

    has_absent_rows = True
    """`info["absent"]` [B] of every reset and step says which rows have no agent now."""

    def __init__(self, games: Iterable[Any]) -> None:
        self.games = list(games)
        self._name = type(self.games[0]).__name__
        self.agents = list(self.games[0].possible_agents)
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.num_envs = len(self.games) * len(self.agents)
        seen, self.single_action_space = self._shared_space("observation_space"), self._shared_space("action_space")
        self._mask_in_obs = isinstance(seen, gym.spaces.Dict) and set(seen) == {"observation", MASK}
        self.single_observation_space = seen["observation"] if self._mask_in_obs else seen
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._nothing = _some_element(self.single_observation_space)
        self._last: list[Any] = [self._nothing] * self.num_envs  # of each row
        self._masks: list[Any] = [None] * self.num_envs
        self._present = np.zeros(self.num_envs, bool)

    def _shared_space(self, name: str) -> Any:
        first, *others = self.agents
        space = getattr(self.games[0], name)(first)
        for agent in others:
            if getattr(self.games[0], name)(agent) != space:
                raise ValueError(
                    f"one policy for all agents needs one {name}, but {first} has {space} and {agent} has "
                    f"{getattr(self.games[0], name)(agent)}; pad them, e.g. with SuperSuit, or train each kind by itself"
                )
        return space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        for number, game in enumerate(self.games):
            self._begin(number, game.reset(seed=None if seed is None else seed + number, options=options))
        return self._observations(self._last), self._info()

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        rewards = np.zeros(self.num_envs)
        terminated, truncated = np.zeros(self.num_envs, bool), np.zeros(self.num_envs, bool)
        final = list(self._last)
        for number, game in enumerate(self.games):
            acting = {agent: self._row(number, agent) for agent in game.agents}
            result = game.step({agent: tree_map(itemgetter(row), actions) for agent, row in acting.items()})
            seen, gained, ended, cut, infos = self._five_dicts(result)
            for agent, row in acting.items():
                if agent in seen and agent not in gained:
                    raise ValueError(f"{self._name}.step gave agent {agent!r} an observation, but no reward")
                rewards[row] = gained.get(agent, 0.0)
                terminated[row] = ended.get(agent, False)
                # An agent that is gone without a word did not end its episode by itself.
                truncated[row] = cut.get(agent, False) or (agent not in game.agents and not terminated[row])
            self._see(number, seen, infos)
            for row in acting.values():
                final[row] = self._last[row]
            done = terminated | truncated
            staying = [agent for agent in game.agents if agent in seen and not done[self._row(number, agent)]]
            if staying:
                self._keep(number, staying)
            else:
                for row in acting.values():
                    final[row] = copy.deepcopy(final[row])  # a game may write its next observation into the same array
                self._begin(number, game.reset())
        info = self._info()
        if (terminated | truncated).any():
            ended = terminated | truncated
            info |= {"final_obs": readable_final_obs(self._observations(final), ended), "_final_obs": ended}
        return self._observations(self._last), rewards, terminated, truncated, info

    def close_extras(self, **options: Any) -> None:
        for game in self.games:
            game.close()

    # --- inside ------------------------------------------------------------------------------------------------------

    def _row(self, game: int, agent: Any) -> int:
        if agent not in self.agents:
            raise ValueError(f"{self._name} has an agent {agent!r} that possible_agents does not name: {self.agents}")
        return game * len(self.agents) + self.agents.index(agent)

    def _five_dicts(self, result: Any) -> Any:
        if (
            not isinstance(result, (tuple, list))
            or len(result) != 5
            or not all(isinstance(part, dict) for part in result)
        ):
            raise ValueError(
                f"{self._name}.step did not return five dicts by agent: observations, rewards, terminated, truncated, infos"
            )
        return result

    def _begin(self, number: int, result: tuple[dict[Any, Any], dict[Any, Any]]) -> None:
        self._see(number, *result)
        self._keep(number, [agent for agent in self.games[number].agents if agent in result[0]])

    def _see(self, number: int, seen: dict[Any, Any], infos: dict[Any, Any]) -> None:
        for agent, obs in seen.items():
            row = self._row(number, agent)
            self._last[row] = obs["observation"] if self._mask_in_obs else obs
            shape = self.single_observation_space.shape
            if shape is not None and np.shape(self._last[row]) != shape:
                raise ValueError(
                    f"{self._name}: agent {agent!r} sees shape {np.shape(self._last[row])}, but its observation space has {shape}"
                )
            self._masks[row] = obs[MASK] if self._mask_in_obs else infos.get(agent, {}).get(MASK)

    def _keep(self, number: int, agents: Iterable[Any]) -> None:
        """These agents of a game are present, the others are not."""
        present = {self._row(number, agent) for agent in agents}
        for row in range(number * len(self.agents), (number + 1) * len(self.agents)):
            self._present[row] = row in present
            if row not in present:
                self._last[row], self._masks[row] = self._nothing, None

    def _observations(self, rows: list[Any]) -> Any:
        space = self.single_observation_space
        out: Any = create_empty_array(space, self.num_envs)
        return concatenate(space, rows, out)

    def _info(self) -> dict[str, Any]:
        info: dict[str, Any] = {"absent": ~self._present}
        if any(mask is not None for mask in self._masks):
            masks = np.empty(self.num_envs, object)
            for row, mask in enumerate(self._masks):
                masks[row] = mask
            info[MASK] = masks
        return info


def _some_element(space: gym.Space[Any]) -> Any:
    """What an absent agent sees: zeros if the space has them."""
    zeros = create_empty_array(space, n=1, fn=np.zeros)
    first = next(iter(gym.vector.utils.iterate(batch_space(space, 1), zeros)))
    return first if space.contains(first) else copy.deepcopy(space).sample()
