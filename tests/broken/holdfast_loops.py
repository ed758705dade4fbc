"""Loops around a healthy Holdfast policy. `Loop` is right; each subclass passes one wrong thing to the policy.

A loop is a driver of the conformance suite. The doctor examines it through `LoopSubject`; the replay check sees the
segments that it stores (`Loop.store`).
"""

from __future__ import annotations

from typing import Any

import torch

import holdfast as hf
from broken.base import Broken, early_by_one, first_line, late_by_one, size
from broken.holdfast_policies import sized_policy
from conformance.driver import Acted, Evaluated, PolicyDriver, either
from conformance.policies import actor_critic
from holdfast import state as state_ops
from holdfast.doctor import Replay, Subject, SubjectStep


class Loop(PolicyDriver):
    """What it passes to each leg. Flags are those of the conformance suite, each [B] or [T, B], or None."""

    def rollout_resets(self, terminated, truncated):
        return either(terminated, truncated)

    def training_resets(self, terminated, truncated):
        return either(terminated, truncated)

    def training_start(self, state):
        return state

    def act(self, obs, dones=None, truncateds=None, env_ids=None):
        return super().act(obs, self.rollout_resets(dones, truncateds), None, env_ids)

    def evaluate(self, obs, actions, state, dones=None, truncateds=None):
        resets = self.training_resets(dones, truncateds)
        return super().evaluate(obs, actions, self.training_start(state), resets)

    def store(self, segment: Any) -> None:
        """Leave in a segment what this loop would store, in place."""
        truncated = segment.resets & late_by_one(segment.truncated)  # [T, B]
        segment.resets = self.training_resets(segment.resets & ~truncated, truncated)
        segment.start_state = self.training_start(segment.start_state)
        segment.chunk_states = [self.training_start(state) for state in segment.chunk_states]


# --- what training receives ---------------------------------------------------------------------------------------


class TrainsFromZeros(Loop):
    """Training starts each segment from an empty memory."""

    def training_start(self, state):
        return state_ops.tree_map(torch.zeros_like, state)


class TrainsFromAnotherState(Loop):
    """Training starts from a state that the rollout never had."""

    def training_start(self, state):
        return state_ops.tree_map(lambda leaf: leaf + 0.5, state)


class TrainsWithoutResets(Loop):
    """No flags are stored, so training runs through episode ends."""

    def training_resets(self, terminated, truncated):
        resets = either(terminated, truncated)
        return None if resets is None else torch.zeros_like(resets)


class TrainsLateByOne(Loop):
    """Each stored flag belongs to the step before."""

    def training_resets(self, terminated, truncated):
        resets = either(terminated, truncated)
        return None if resets is None else late_by_one(resets)


class TrainsEarlyByOne(Loop):
    """Each stored flag belongs to the step after."""

    def training_resets(self, terminated, truncated):
        resets = either(terminated, truncated)
        return None if resets is None else early_by_one(resets)


class ForgetsTruncationInTraining(Loop):
    """Only terminations are stored."""

    def training_resets(self, terminated, truncated):
        return terminated


class ForgetsTruncation(ForgetsTruncationInTraining):
    """Only terminations reset, in both legs, so the replay law alone cannot see it."""

    def rollout_resets(self, terminated, truncated):
        return terminated


class MixesTimeAndBatch(Loop):
    """Training reads rows of the batch as time steps."""

    def evaluate(self, obs, actions, state, dones=None, truncateds=None):
        T, B = obs.shape[:2]
        swapped = obs.transpose(0, 1).reshape(T, B, *obs.shape[2:])
        return super().evaluate(swapped, actions, state, dones, truncateds)


class CutsGradientsEachStep(Loop):
    """Training detaches the state between the steps of a segment."""

    def evaluate(self, obs, actions, state, dones=None, truncateds=None):
        resets, parts = either(dones, truncateds), []
        for t in range(len(obs)):
            reset = None if resets is None else resets[t : t + 1]
            ev = self.policy.evaluate(obs[t : t + 1], actions[t : t + 1], state, reset, return_state=True)
            state = state_ops.detach(ev.state)
            parts.append(ev[:3])
        return Evaluated(*(torch.cat(column) for column in zip(*parts)))


class KeepsTheGraph(Loop):
    """Training writes its last state into the memory, graph and all."""

    def evaluate(self, obs, actions, state, dones=None, truncateds=None):
        ev = self.policy.evaluate(obs, actions, state, either(dones, truncateds), return_state=True)
        self.memory.rows.state = ev.state
        return Evaluated(*ev[:3])


# --- what the rollout receives ------------------------------------------------------------------------------------


class ResetsWhenFlagsAreMissing(Loop):
    """Without flags, every step is the first of an episode."""

    def act(self, obs, dones=None, truncateds=None, env_ids=None):
        missing = torch.ones(len(obs), dtype=torch.bool) if dones is None and truncateds is None else dones
        return super().act(obs, missing, truncateds, env_ids)


class IgnoresIds(Loop):
    """Rows are found by their place in the batch."""

    def act(self, obs, dones=None, truncateds=None, env_ids=None):
        return super().act(obs, dones, truncateds, None if env_ids is None else range(len(obs)))


class FlagsAsIndex(Loop):
    """0/1 flags are used as row numbers: environments 0 and 1 are cleared whenever some episode ends."""

    def rollout_resets(self, terminated, truncated):
        resets = either(terminated, truncated)
        if resets is None:
            return None
        wrong = torch.zeros_like(resets)
        wrong[resets.long()] = bool(resets.any())
        return wrong


class MultipliesByZero(Loop):
    """The rollout resets with h * (1 - done), which keeps NaN."""

    def act(self, obs, dones=None, truncateds=None, env_ids=None):
        resets = either(dones, truncateds)
        if resets is not None:
            ids, keep = range(len(obs)) if env_ids is None else env_ids, (~resets).float().view(-1, 1, 1)
            self.memory.write(state_ops.tree_map(lambda leaf: leaf * keep, self.memory.read(ids)), ids)
        return super().act(obs, None, None, env_ids)


# --- memory around the steps --------------------------------------------------------------------------------------


class SharesMemoryBetweenAgents(Loop):
    """A second agent uses the memory of the first."""

    def agent(self):
        return self


class ResetDoesNothing(Loop):
    """Reset calls leave the memory as it was."""

    def reset_memory(self):
        pass

    def reset_env_memory(self, env_id):
        pass


class SavesNoMemory(Loop):
    """A checkpoint holds an empty memory."""

    def get_memory(self):
        return hf.Memory(self.policy.core).state_dict()


class SavesAReference(Loop):
    """A checkpoint is the live memory and changes with it."""

    def get_memory(self):
        return self.memory

    def set_memory(self, saved):
        self.memory.load_state_dict(saved.state_dict())


class LoopSubject(Subject):
    """A loop as the doctor examines it."""

    takes_env_ids = True
    flags_optional = True
    makes_own_state = True

    def __init__(self, loop: Any) -> None:
        super().__init__(loop.obs_shape, name=type(loop).__name__)
        self.loop = loop
        self.rows = 0

    def modules(self):
        return [self.loop.module]

    def begin(self, num_envs):
        self.rows = num_envs
        self.loop.policy.set_memory(hf.Memory(self.loop.policy.core))
        self.loop.memory = self.loop.policy.memory

    def step(self, obs, terminated, truncated, env_ids):
        step: Acted = self.loop.act(obs, terminated, truncated, env_ids)
        return SubjectStep(step.value.unsqueeze(-1), step.action, step.log_prob)

    def mark(self):
        return self.loop.memory.read(range(self.rows))

    def state(self):
        return self.mark()

    def replay(self, segment):
        ev = self.loop.evaluate(segment.obs, segment.actions, segment.start, segment.terminated, segment.truncated)
        return Replay(ev.value.unsqueeze(-1), ev.log_prob)

    def poison(self, row):
        nan = state_ops.tree_map(lambda leaf: torch.full_like(leaf, float("nan")), self.loop.memory.read([row]))
        self.loop.memory.write(nan, [row])

    def second_agent(self):
        return LoopSubject(self.loop.agent())

    def reset_memory(self):
        self.loop.reset_memory()

    def save(self):
        return self.loop.get_memory()

    def load(self, checkpoint):
        self.loop.set_memory(checkpoint)


def driver_of(kind):
    """A loop of this kind around a small LSTM policy."""
    healthy = actor_critic("lstm", "zero")
    return kind(healthy.policy, healthy.reset, healthy.obs_shape)


def _subject(kind):
    return LoopSubject(kind(sized_policy(hf.ActorCritic), obs_shape=(size.obs,)))


def _healthy():
    return _subject(Loop)


def _broken(kind, case, doctor, *conformance, replay_check=None, severity="error"):
    return Broken(
        name=f"loop-{kind.__name__}",
        case=case,
        does=first_line(kind),
        doctor=doctor,
        subject=lambda: _subject(kind),
        healthy=_healthy,
        severity=severity,
        driver=lambda: driver_of(kind),
        conformance=conformance,
        replay_check=replay_check,
    )


BROKEN = [
    _broken(
        TrainsFromZeros, 1, "starts-from-zeros",
        "test_training_repeats_the_rollout_in_two_segments_with_any_boundaries",
        "test_any_chunking_from_a_nonzero_state_gives_the_same_outputs",
        replay_check="the stored start state is not the one the rollout had (it is all zeros)",
    ),
    _broken(
        TrainsFromAnotherState, 1, "wrong-start-state",
        "test_training_repeats_the_rollout_in_two_segments_with_any_boundaries",
        replay_check="the gap vanishes from a zero start state",
    ),
    _broken(
        TrainsWithoutResets, 1, "reset-dropped-in-training",
        "test_training_repeats_the_rollout_in_two_segments_with_any_boundaries",
        "test_three_and_more_episodes_in_a_row_equal_the_episodes_run_alone",
        "test_no_value_and_no_gradient_crosses_a_reset",
        replay_check="some are missing",
    ),
    _broken(
        TrainsLateByOne, 26, "late-by-one",
        "test_boundaries_at_the_first_and_last_step_of_a_segment_replay",
        "test_flags_one_step_early_or_one_step_late_do_not_replay",
        replay_check="late by one",
    ),
    _broken(
        TrainsEarlyByOne, 26, "early-by-one",
        "test_boundaries_at_the_first_and_last_step_of_a_segment_replay",
        "test_flags_one_step_early_or_one_step_late_do_not_replay",
        replay_check="early by one",
    ),
    _broken(
        ForgetsTruncationInTraining, 3, "truncation-ignored",
        "test_a_truncation_resets_in_both_legs_as_a_termination_does",
        replay_check="some are missing",
    ),
    _broken(
        ForgetsTruncation, 3, "truncation-ignored",
        "test_a_truncation_resets_in_both_legs_as_a_termination_does",
    ),
    _broken(
        MixesTimeAndBatch, 15, "layout-swapped",
        "test_a_row_depends_only_on_its_environment_and_its_past",
    ),
    _broken(
        CutsGradientsEachStep, 12, "over-detached",
        "test_gradients_reach_every_step_inside_an_episode_and_no_other_environment",
    ),
    _broken(
        KeepsTheGraph, 11, "training-moves-memory",
        "test_what_is_carried_holds_no_graph_and_a_segment_can_be_trained_on_many_times",
        "test_training_neither_reads_nor_writes_memory",
    ),
    _broken(
        ResetsWhenFlagsAreMissing, 4, "missing-flags-reset",
        "test_missing_flags_mean_no_reset_and_the_state_evolves",
    ),
    _broken(
        IgnoresIds, 8, "wrong-environment",
        "test_permuted_partial_and_interleaved_ids_give_each_environment_its_solo_run",
        "test_an_unknown_id_is_fresh_and_never_somebody_elses",
    ),
    _broken(
        FlagsAsIndex, 8, "index-not-mask",
        "test_flags_are_a_mask_and_never_an_index",
    ),
    _broken(
        MultipliesByZero, 7, "nan-survives",
        "test_a_reset_clears_nan_and_inf_and_touches_no_other_environment",
        severity="warning",
    ),
    _broken(
        SharesMemoryBetweenAgents, 13, "shared-between-agents",
        "test_interleaved_agents_on_one_module_equal_separate_ones",
    ),
    _broken(
        ResetDoesNothing, 25, "reset-does-nothing",
        "test_after_reset_memory_the_next_step_is_a_first_step",
        "test_after_reset_env_memory_that_environment_alone_is_fresh",
    ),
    _broken(
        SavesNoMemory, 10, "memory-lost-on-resume",
        "test_memory_saved_in_mid_episode_continues_bit_exact_and_is_a_copy",
    ),
    _broken(
        SavesAReference, 10, None,  # the doctor copies what it saves
        "test_memory_saved_in_mid_episode_continues_bit_exact_and_is_a_copy",
    ),
]  # fmt: skip
