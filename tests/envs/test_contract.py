"""`holdfast.envs.check` finds nothing in our environments, and each fault of broken ones, in the right words."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
import torch
from gymnasium import spaces

import holdfast.envs
from holdfast.envs import TorchVectorEnv, Transition, check

FOR_SHORT_EPISODES = {
    "TMaze": {"length": 3},  # short, so that random actions reach ends of both kinds
    "Labyrinth": {"maze_size": 6, "episode_length": 100, "num_mazes": 50},
}


def is_other_size(row):
    """Of a task, only one size is checked here. `tests/learning` checks all."""
    return not row.id.endswith(("Easy-v0", "PositionOnlyPendulumHard-v0", "TMaze-v0"))


@pytest.mark.parametrize("env_id", [row.id for row in holdfast.envs.list_envs() if not is_other_size(row)])
def test_nothing_is_found_in_ours(env_id):
    check(env_id, **next((kwargs for name, kwargs in FOR_SHORT_EPISODES.items() if name in env_id), {}))


# --- broken ones --------------------------------------------------------------------------------------------------------


class Walk(TorchVectorEnv):
    """A walker on a line looks for a place it is shown once: the end where it arrives, or after 12 steps."""

    def __init__(self, num_envs, device="cpu"):
        super().__init__(num_envs, spaces.Box(-20, 20, (2,), np.float32), spaces.Discrete(2), {}, device)
        self._moves = torch.tensor([-1.0, 1.0], device=self.device)
        self._count = 0

    def draw(self):
        return torch.rand(self.num_envs, 2, generator=self.generator, device=self.device)

    def begin(self, draws):
        state = {
            "place": (draws[:, 0] * 5).floor() - 2,
            "at": draws[:, 1].round(),
            "steps": torch.zeros_like(draws[:, 0]),
        }
        return state, torch.stack((state["at"], state["place"]), 1)

    def transition(self, state, actions, draws):
        at, steps = state["at"] + self._moves[actions], state["steps"] + 1
        terminated = at == state["place"]
        truncated = (steps >= 12) & ~terminated
        done = terminated | truncated
        new, first = self.begin(draws)
        later = {"place": state["place"], "at": at, "steps": steps}
        final_obs = torch.stack((at, torch.zeros_like(at)), 1)
        return Transition(
            state={name: torch.where(done, new[name], leaf) for name, leaf in later.items()},
            obs=torch.where(done.unsqueeze(1), first, final_obs),
            rewards=terminated.float() + state["place"] / 10,
            terminated=terminated,
            truncated=truncated,
            done=done,
            final_obs=final_obs,
        )


class InPlace(Walk):
    def transition(self, state, actions, draws):
        out = super().transition(state, actions, draws)
        state["steps"] += 0
        return out


class GlobalTorch(Walk):
    def draw(self):
        return torch.rand(self.num_envs, 2, device=self.device)


class GlobalNumpy(Walk):
    def transition(self, state, actions, draws):
        out = super().transition(state, actions, draws)
        return out._replace(rewards=out.rewards + np.random.rand())


class GlobalPython(Walk):
    def begin(self, draws):
        state, obs = super().begin(draws)
        return state, obs + random.random() / 100


class OwnGenerator(Walk):
    def __init__(self, num_envs):
        super().__init__(num_envs)
        self._own = np.random.default_rng(0)

    def draw(self):
        return torch.from_numpy(self._own.random((self.num_envs, 2), np.float32))


class LateDraw(Walk):
    def transition(self, state, actions, draws):
        return super().transition(state, actions, self.draw())


class Leaks(Walk):
    def transition(self, state, actions, draws):
        out = super().transition(state, actions, draws)
        return out._replace(rewards=out.rewards - out.rewards.mean())


class ResetsAll(Walk):
    """All episodes begin again when one has ended."""

    def transition(self, state, actions, draws):
        out = super().transition(state, actions, draws)
        new, _ = self.begin(draws)
        return out._replace(state={n: torch.where(out.done[:1], new[n], leaf) for n, leaf in out.state.items()})


class ForgetsAutoreset(Walk):
    def transition(self, state, actions, draws):
        out = super().transition(state, actions, draws)
        later = {"place": state["place"], "at": out.final_obs[:, 0].clone(), "steps": state["steps"] + 1}
        return out._replace(state=later, obs=out.final_obs)


class ForgetsTheSteps(Walk):
    def transition(self, state, actions, draws):
        out = super().transition(state, actions, draws)
        return out._replace(state={**out.state, "steps": state["steps"] + 1})


class FinalIsFirst(Walk):
    def transition(self, state, actions, draws):
        out = super().transition(state, actions, draws)
        return out._replace(final_obs=out.obs)


class FinalIsZero(Walk):
    def transition(self, state, actions, draws):
        out = super().transition(state, actions, draws)
        return out._replace(final_obs=torch.where(out.done.unsqueeze(1), out.final_obs, 0.0))


class Float64(Walk):
    def transition(self, state, actions, draws):
        out = super().transition(state, actions, draws)
        return out._replace(rewards=out.rewards.double())


class WrongShape(Walk):
    def transition(self, state, actions, draws):
        out = super().transition(state, actions, draws)
        return out._replace(rewards=out.rewards.unsqueeze(1))


class Squeezed(Walk):
    """Right with many rows, wrong with one."""

    def transition(self, state, actions, draws):
        out = super().transition(state, actions, draws)
        return out._replace(rewards=out.rewards.squeeze())


class Item(Walk):
    def transition(self, state, actions, draws):
        out = super().transition(state, actions, draws)
        return out._replace(rewards=out.rewards + 0 * state["at"].sum().item())


class Branch(Walk):
    def transition(self, state, actions, draws):
        out = super().transition(state, actions, draws)
        return out._replace(rewards=out.rewards + 1) if out.done.any() and self.num_envs == 0 else out


class Mask(Walk):
    def transition(self, state, actions, draws):
        out = super().transition(state, actions, draws)
        rewards = out.rewards.clone()
        rewards[out.done] = draws[out.done, 0]
        return out._replace(rewards=rewards)


class OnTheCPU(Walk):
    def transition(self, state, actions, draws):
        out = super().transition(state, actions, draws)
        return out._replace(rewards=out.rewards + torch.zeros(self.num_envs))


class NotSaved(Walk):
    """Part of the episode is on the object and not in the state."""

    def transition(self, state, actions, draws):
        out = super().transition(state, actions, draws)
        self._count = self._count + 1
        return out._replace(rewards=out.rewards + self._count)


class HidesAList(Walk):
    """The same, where no attribute is assigned."""

    def __init__(self, num_envs, device="cpu"):
        super().__init__(num_envs, device)
        self._seen = []

    def transition(self, state, actions, draws):
        out = super().transition(state, actions, draws)
        self._seen.append(actions)
        return out._replace(rewards=out.rewards + len(self._seen))


class SavesTooLittle(Walk):
    def state_as_tensors(self, state):
        return {**state, "place": torch.zeros_like(state["place"])}


class SavesAnObject(Walk):
    def __init__(self, num_envs, device="cpu"):
        super().__init__(num_envs, device)
        self.settings = {"shape": spaces.Discrete(2)}


class IgnoresSeeds(Walk):
    def reset(self, *, seed=None, options=None):
        return super().reset(options=options)


class OneSeed(Walk):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=5, options=options)


class NaNReward(Walk):
    def transition(self, state, actions, draws):
        out = super().transition(state, actions, draws)
        return out._replace(rewards=out.rewards / out.rewards)


class OutOfSpace(Walk):
    def begin(self, draws):
        state, obs = super().begin(draws)
        return state, obs + 40

    def transition(self, state, actions, draws):
        out = super().transition(state, actions, draws)
        final_obs = out.final_obs + 40
        return out._replace(obs=torch.where(out.done.unsqueeze(1), out.obs, final_obs), final_obs=final_obs)


class SharesMemory(Walk):
    def transition(self, state, actions, draws):
        out = super().transition(state, actions, draws)
        return out._replace(rewards=out.state["at"])


class NeverTruncates(Walk):
    can_truncate = False


class NeverEnds(Walk):
    def transition(self, state, actions, draws):
        out = super().transition({**state, "steps": state["steps"] * 0, "place": state["place"] + 99}, actions, draws)
        return out._replace(state={**out.state, "place": state["place"], "at": state["at"]}, rewards=state["at"] * 0)


class DoneIsTerminated(Walk):
    def transition(self, state, actions, draws):
        out = super().transition(state, actions, draws)
        return out._replace(truncated=out.truncated ^ out.truncated)


class OtherState(Walk):
    def transition(self, state, actions, draws):
        out = super().transition(state, actions, draws)
        return out._replace(state={**out.state, "steps": out.state["steps"].long()})


class RowsLast(Walk):
    def draw(self):
        return super().draw().t()


class Prints(Walk):
    def transition(self, state, actions, draws):
        print(end="")
        return super().transition(state, actions, draws)


class PlainTuple(Walk):
    def transition(self, state, actions, draws):
        return tuple(super().transition(state, actions, draws))


ONE_FAULT = {
    Prints: r"transition\(\) cannot be compiled as one graph: \w+: ",
    PlainTuple: "returned a tuple, expected a holdfast.envs.Transition",
    InPlace: r"transition\(\) writes into state.steps; return a new tensor",
    GlobalTorch: r"draw\(\) uses torch's global generator; .* generator=self.generator",
    GlobalNumpy: r"transition\(\) uses numpy's global generator; draw in draw\(\)",
    GlobalPython: r"begin\(\) uses Python's global generator",
    OwnGenerator: r"reset\(seed=1\) gives other obs the second time; use self.generator in draw",
    LateDraw: r"transition\(\) uses the environment's generator; draw in draw\(\)",
    Leaks: "rewards of an environment depends on other environments",
    ResetsAll: "state.place of an environment depends on other environments",
    ForgetsAutoreset: r"where an episode ended, obs differs from that of begin\(\) with the same draws",
    ForgetsTheSteps: r"after an end, .* differs from the episode of begin\(\) with the same draws",
    FinalIsFirst: "final_obs is the first observation of the next one",
    FinalIsZero: "final_obs differs from obs in environments whose episode goes on",
    Float64: r"rewards of transition\(\) is torch.float64 \(1,\) on cpu, expected torch.float32 \(1,\) on cpu",
    WrongShape: r"rewards of transition\(\) is torch.float32 \(1, 1\) on cpu, expected torch.float32 \(1,\) on cpu",
    Squeezed: r"rewards of transition\(\) is torch.float32 \(\) on cpu, expected torch.float32 \(1,\) on cpu",
    Item: r"transition\(\): item waits for the device \(test_contract.py, line \d+\)",
    Branch: r"transition\(\): __bool__ waits for the device \(test_contract.py, line \d+\)",
    Mask: r"transition\(\): indexing by a mask waits for the device; torch.where does not",
    OnTheCPU: r"zeros makes a tensor on the CPU; pass device=self.device \(test_contract.py, line \d+\)",
    NotSaved: r"transition\(\) changes self._count; put what changes into the state",
    HidesAList: "transition.. gives other rewards for the same state, actions and draws",
    SavesTooLittle: "after saving and restoring, the environment goes on with other obs",
    SavesAnObject: r"state_dict\(\) cannot be saved and loaded: UnpicklingError",
    IgnoresSeeds: r"reset\(seed=1\) gives other obs the second time",
    OneSeed: r"reset\(seed=2\) gives the same episodes as reset\(seed=1\)",
    NaNReward: r"transition\(\) gives the reward nan",
    OutOfSpace: r"obs of begin\(\) goes from .* to 4\d, outside of Box\(-20.0, 20.0, \(2,\), float32\)",
    SharesMemory: r"transition\(\) returns a tensor that shares memory with state.at; clone it",
    NeverTruncates: "an episode was truncated, but the class says can_truncate = False",
    NeverEnds: "no episode ended in 5000 steps",
    DoneIsTerminated: r"done is not terminated \| truncated",
    OtherState: r"state\['steps'\] of transition\(\) is torch.int64 .* expected torch.float32",
    RowsLast: r"draw\(\) is torch.float32 \(2, 1\) on cpu, expected torch.float32 \(1, 1\) on cpu",
}


def faults_of(env, **kwargs):
    with pytest.raises(AssertionError) as raised:
        check(env, **kwargs)
    title, *faults = str(raised.value).split("\n- ")
    assert title.endswith(" breaks what holdfast.envs.TorchVectorEnv promises:")
    return faults


@pytest.mark.parametrize("env", ONE_FAULT)
def test_a_fault_is_found_in_one_line_of_the_right_words(env):
    faults = faults_of(env)
    assert re.search(ONE_FAULT[env], faults[0])
    assert len(faults) == 1 and "\n" not in faults[0]


def test_independent_faults_are_reported_together():
    class Several(InPlace, Leaks, NeverTruncates):
        pass

    words = ("writes into state.steps", "depends on other environments", "can_truncate = False")
    faults = faults_of(Several)
    assert len(faults) == 3 and all(any(word in fault for fault in faults) for word in words)


def test_a_correct_one_passes_by_class_by_name_and_from_a_function():
    check(Walk)
    check(lambda num_envs: Walk(num_envs))


class Masked(Walk):
    """Where the walker stands at 0 it may not go left. A step to the left there is NaN."""

    def action_masks(self):
        return torch.stack((self.state["at"] != 0, torch.ones(self.num_envs, dtype=torch.bool)), 1)

    def transition(self, state, actions, draws):
        out = super().transition(state, actions, draws)
        return out._replace(rewards=out.rewards.masked_fill((state["at"] == 0) & (actions == 0), torch.nan))


def test_masks_are_kept():
    check(Masked)
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(Masked, "action_masks")
        assert faults_of(Masked) == ["transition() gives the reward nan"]


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (lambda: Walk(3), r"check makes several environments; pass the class of this Walk"),
        (lambda: "CartPole-v1", r"check takes a TorchVectorEnv; SyncVectorEnv is not written in torch"),
    ],
)
def test_what_cannot_be_checked_is_refused(env, message):
    with pytest.raises(TypeError, match=message):
        check(env())
