"""Our environment and POPGym's own, side by side: the same actions, the same random choices, the same results.

`play_both` steps them together and compares what they return. A `Feed` says how one side's random choices get into the
other: by default POPGym chooses (it shuffles, places, adds noise) and our `draw` is given what it chose.
"""

from __future__ import annotations

import os

import numpy as np
import torch

import holdfast.envs

LEVELS = ("Easy", "Medium", "Hard")
SKILLS = (0.0, 0.5, 0.95, 1.0)
"""How often each environment's player takes the action that its feed calls good; otherwise a random one."""
STEPS = 1000 * int(os.environ.get("HOLDFAST_AGREEMENT_ROUNDS", "1"))


class Feed:
    """How our environment gets POPGym's random choices, or the reverse."""

    we_choose = False
    """True: our environment draws, and `start_theirs` gives POPGym's the same episode."""
    ends = frozenset({"terminated"})
    """How episodes end."""
    rtol = 0.0
    """Of observations and rewards."""
    least_steps = 0
    """How long both must play until episodes have ended in every way."""

    def prepare(self, theirs):
        """Called once, before the first reset, with each of POPGym's environments."""

    def start_theirs(self, ours, row, theirs):
        """Make a POPGym environment, just reset, begin the episode that ours began in `row`."""

    def before(self, ours, theirs, actions):
        """Called before every step; `actions` [B, ...]."""

    def draws(self, ours, theirs, obs):
        """What our `draw` returns in the step or reset after which POPGym's environments show `obs`, a list."""
        raise NotImplementedError

    def good_action(self, theirs):
        return theirs.action_space.sample()


class Recorder:
    """A numpy generator that remembers what it was asked for. Uniform numbers are rounded to float32, as ours are."""

    def __init__(self, generator):
        self.generator, self.calls = generator, {}

    def __getattr__(self, name):
        method = getattr(self.generator, name)
        if not callable(method):
            return method

        def call(*args, **kwargs):
            result = method(*args, **kwargs)
            if name == "random":
                result = np.asarray(result, np.float32)[()]
            self.calls.setdefault(name, []).append(result)
            return result

        return call


def make_pair(name, level, seed=0):
    import popgym.envs

    ours = holdfast.envs.make(f"holdfast/{name}{level}-v0", len(SKILLS), seed=seed)
    return ours, [getattr(popgym.envs, name + level)() for _ in SKILLS]


def play_both(name, level, feed, steps=STEPS, seed=0):
    """Plays `steps` steps of four environments each, and checks that all results agree."""
    ours, theirs = make_pair(name, level, seed)
    ours.state = None
    rng = np.random.default_rng(seed)
    for row, env in enumerate(theirs):
        env.reset(seed=1000 * seed + row)
        env.action_space.seed(1000 * seed + row)
        feed.prepare(env)
    obs = [env.reset()[0] for env in theirs]
    ours_obs = _with_draws(ours, feed, theirs, obs, lambda: ours.reset()[0])
    for row, env in enumerate(theirs):
        feed.start_theirs(ours, row, env)
    _assert_same_obs(ours_obs, obs, [True] * len(theirs), feed.rtol)

    # Environment i waits for i steps once, so that episodes of fixed length do not end together.
    pauses = {(1 + i, i) for i in range(1, len(theirs))} | {(5 + 2 * i, i) for i in range(2, len(theirs))}
    seen = set()
    for t in range(steps):
        playing = [(t, row) not in pauses for row in range(len(theirs))]
        actions = [
            feed.good_action(env) if rng.random() < skill else env.action_space.sample()
            for env, skill in zip(theirs, SKILLS)
        ]
        feed.before(ours, theirs, actions)
        before = ours.state
        action_array = np.stack([np.asarray(action) for action in actions])
        if feed.we_choose:
            mine = ours.step(torch.as_tensor(action_array))
        expected = [_step_theirs(env, a) if on else None for env, a, on in zip(theirs, actions, playing)]
        if not feed.we_choose:
            next_obs = [obs[i] if e is None else e[0] for i, e in enumerate(expected)]
            mine = _with_draws(ours, feed, theirs, next_obs, lambda a=action_array: ours.step(torch.as_tensor(a)))
        obs = [obs[i] if e is None else e[0] for i, e in enumerate(expected)]
        _assert_same_step(mine, expected, playing, feed.rtol)
        ours.state = _rows_that_played(ours, before, ours.state, playing)
        for row, e in enumerate(expected):
            if e is not None and (e[2] or e[3]):
                feed.start_theirs(ours, row, theirs[row])
                seen |= {kind for kind, flag in (("terminated", e[2]), ("truncated", e[3])) if flag}
    assert seen == feed.ends, f"episodes ended {seen}"


def _with_draws(ours, feed, theirs, obs, call):
    if feed.we_choose:
        return call()
    draws = feed.draws(ours, theirs, obs)
    ours.draw = lambda: draws
    try:
        return call()
    finally:
        del ours.draw


def _step_theirs(env, action):
    """One step with SAME_STEP autoreset: obs, reward, terminated, truncated, final obs."""
    obs, reward, terminated, truncated, _ = env.step(action)
    final = obs
    if terminated or truncated:
        obs, _ = env.reset()
    return obs, reward, terminated, truncated, final


def _rows_that_played(env, before, after, playing):
    state = {}
    for name, leaf in after.items():
        dim = env.env_dims.get(name, 0)
        mask = torch.tensor(playing).view(*(1,) * dim, -1, *(1,) * (leaf.dim() - dim - 1))
        state[name] = torch.where(mask, leaf, before[name])
    return state


def _assert_same_step(mine, expected, playing, rtol):
    obs, rewards, terminated, truncated, info = mine
    _assert_same_obs(obs, [e and e[0] for e in expected], playing, rtol)
    _assert_same_obs(info["final_obs"], [e and e[4] for e in expected], playing, rtol)
    for row, e in enumerate(expected):
        if e is not None:
            assert abs(rewards[row].item() - np.float32(e[1])) <= rtol * abs(e[1])
            assert (terminated[row].item(), truncated[row].item()) == (e[2], e[3])
            assert info["_final_obs"][row].item() == (e[2] or e[3])


def _assert_same_obs(obs, expected, playing, rtol):
    for row in (row for row, on in enumerate(playing) if on):
        if isinstance(obs, tuple):
            assert tuple(part[row].item() for part in obs) == expected[row]
        elif obs.dim() == 1:
            assert obs[row].item() == expected[row]
        else:
            difference = np.abs(obs[row].numpy() - expected[row])
            assert (difference <= rtol * np.abs(expected[row])).all()
