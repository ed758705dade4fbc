"""The suite fails where it should: each of these policies does one thing wrong, as real projects did."""

from __future__ import annotations

import pytest
import torch
from gymnasium import spaces

import holdfast as hf
from conformance import test_isolation as isolation
from conformance import test_lifecycle as lifecycle
from conformance import test_precision as precision
from conformance import test_replay as replay
from conformance.driver import Evaluated, PolicyDriver, either
from conformance.policies import ACTIONS, actor_critic, loud
from holdfast import state as state_ops


def memoryless():
    torch.manual_seed(0)
    policy = hf.ActorCritic(spaces.Box(-10, 10, (3,)), spaces.Discrete(ACTIONS), core=None, encoder_sizes=(6,))
    return PolicyDriver(loud(policy))


class TrainsFromZeros(PolicyDriver):
    def evaluate(self, obs, actions, state, dones=None, truncateds=None):
        return super().evaluate(obs, actions, None, dones, truncateds)


class TrainsWithoutResets(PolicyDriver):
    def evaluate(self, obs, actions, state, dones=None, truncateds=None):
        return super().evaluate(obs, actions, state)


class ForgetsTruncation(PolicyDriver):
    """In both legs, so the replay law alone cannot see it."""

    def act(self, obs, dones=None, truncateds=None, env_ids=None):
        return super().act(obs, dones, None, env_ids)

    def evaluate(self, obs, actions, state, dones=None, truncateds=None):
        return super().evaluate(obs, actions, state, dones)


class ForgetsTruncationInTraining(PolicyDriver):
    def evaluate(self, obs, actions, state, dones=None, truncateds=None):
        return super().evaluate(obs, actions, state, dones)


class ResetsWhenFlagsAreMissing(PolicyDriver):
    def act(self, obs, dones=None, truncateds=None, env_ids=None):
        missing = torch.ones(len(obs), dtype=torch.bool) if dones is None and truncateds is None else dones
        return super().act(obs, missing, truncateds, env_ids)


class LateByOne(PolicyDriver):
    def evaluate(self, obs, actions, state, dones=None, truncateds=None):
        resets = either(dones, truncateds)
        late = None if resets is None else torch.cat([torch.zeros_like(resets[:1]), resets[:-1]])
        return super().evaluate(obs, actions, state, late)


class IgnoresIds(PolicyDriver):
    """Rows are found by their place in the batch."""

    def act(self, obs, dones=None, truncateds=None, env_ids=None):
        return super().act(obs, dones, truncateds, None if env_ids is None else range(len(obs)))


class FlagsAsIndex(PolicyDriver):
    def act(self, obs, dones=None, truncateds=None, env_ids=None):
        resets = either(dones, truncateds)
        if resets is not None:
            wrong = torch.zeros_like(resets)
            wrong[resets.long()] = bool(resets.any())
            resets = wrong
        return super().act(obs, resets, None, env_ids)


class MultipliesByZero(PolicyDriver):
    """h * (1 - done)."""

    def act(self, obs, dones=None, truncateds=None, env_ids=None):
        resets = either(dones, truncateds)
        if resets is not None and self.memory.num_envs == len(obs):
            keep = (~resets).float().view(-1, 1, 1)
            self.memory.write(state_ops.tree_map(lambda leaf: leaf * keep, self.memory.read()))
        return super().act(obs, None, None, env_ids)


class CutsGradientsEachStep(PolicyDriver):
    def evaluate(self, obs, actions, state, dones=None, truncateds=None):
        resets, parts = either(dones, truncateds), []
        for t in range(len(obs)):
            reset = None if resets is None else resets[t : t + 1]
            ev = self.policy.evaluate(obs[t : t + 1], actions[t : t + 1], state, reset, return_state=True)
            state = state_ops.detach(ev.state)
            parts.append(ev[:3])
        return Evaluated(*(torch.cat(column) for column in zip(*parts)))


class SharesMemoryBetweenAgents(PolicyDriver):
    def agent(self):
        return self


class ResetDoesNothing(PolicyDriver):
    def reset_memory(self):
        pass

    def reset_env_memory(self, env_id):
        pass


class SavesNoMemory(PolicyDriver):
    def get_memory(self):
        return hf.Memory(self.policy.core).state_dict()


class SavesAReference(PolicyDriver):
    def get_memory(self):
        return self.memory

    def set_memory(self, saved):
        self.memory.load_state_dict(saved.state_dict())


class MixesTimeAndBatch(PolicyDriver):
    def evaluate(self, obs, actions, state, dones=None, truncateds=None):
        T, B = obs.shape[:2]
        swapped = obs.transpose(0, 1).reshape(T, B, *obs.shape[2:])
        return super().evaluate(swapped, actions, state, dones, truncateds)


class KeepsTheGraph(PolicyDriver):
    """The carried state is the one of the last training pass, graph and all."""

    def evaluate(self, obs, actions, state, dones=None, truncateds=None):
        ev = self.policy.evaluate(obs, actions, state, either(dones, truncateds), return_state=True)
        self.memory._state = ev.state
        return Evaluated(*ev[:3])


class MovesStatisticsDuringTheRollout(PolicyDriver):
    def act(self, obs, dones=None, truncateds=None, env_ids=None):
        with torch.no_grad():
            self.policy.trunk[0].bias += 0.01
        return super().act(obs, dones, truncateds, env_ids)


class HalfPrecisionInOneLeg(PolicyDriver):
    def act(self, obs, dones=None, truncateds=None, env_ids=None):
        with torch.autocast("cpu", torch.bfloat16):
            return super().act(obs, dones, truncateds, env_ids)


class ClampsInOneLeg(PolicyDriver):
    def evaluate(self, obs, actions, state, dones=None, truncateds=None):
        return super().evaluate(obs.clamp(-1, 1), actions, state, dones, truncateds)


def broken(kind):
    def make():
        driver = actor_critic("lstm", "zero")
        return kind(driver.policy, driver.reset, driver.obs_shape)

    return make


CASES = [
    (memoryless, replay.test_missing_flags_mean_no_reset_and_the_state_evolves),
    (memoryless, replay.test_flags_one_step_early_or_one_step_late_do_not_replay),
    (memoryless, replay.test_the_start_state_is_the_one_before_the_reset_and_the_reset_still_happens),
    (memoryless, replay.test_a_start_state_from_one_step_later_does_not_replay),
    (memoryless, isolation.test_gradients_reach_every_step_inside_an_episode_and_no_other_environment),
    (memoryless, isolation.test_a_row_depends_only_on_its_environment_and_its_past),
    (memoryless, isolation.test_an_unknown_id_is_fresh_and_never_somebody_elses),
    (memoryless, isolation.test_flags_are_a_mask_and_never_an_index),
    (memoryless, lifecycle.test_after_reset_memory_the_next_step_is_a_first_step),
    (broken(TrainsFromZeros), replay.test_training_repeats_the_rollout_in_two_segments_with_any_boundaries),
    (broken(TrainsFromZeros), replay.test_any_chunking_from_a_nonzero_state_gives_the_same_outputs),
    (broken(TrainsWithoutResets), replay.test_training_repeats_the_rollout_in_two_segments_with_any_boundaries),
    (broken(TrainsWithoutResets), replay.test_three_and_more_episodes_in_a_row_equal_the_episodes_run_alone),
    (broken(TrainsWithoutResets), isolation.test_no_value_and_no_gradient_crosses_a_reset),
    (broken(ForgetsTruncation), replay.test_a_truncation_resets_in_both_legs_as_a_termination_does),
    (broken(ForgetsTruncationInTraining), replay.test_a_truncation_resets_in_both_legs_as_a_termination_does),
    (broken(ResetsWhenFlagsAreMissing), replay.test_missing_flags_mean_no_reset_and_the_state_evolves),
    (broken(LateByOne), replay.test_boundaries_at_the_first_and_last_step_of_a_segment_replay),
    (broken(LateByOne), replay.test_flags_one_step_early_or_one_step_late_do_not_replay),
    (broken(IgnoresIds), isolation.test_permuted_partial_and_interleaved_ids_give_each_environment_its_solo_run),
    (broken(IgnoresIds), isolation.test_an_unknown_id_is_fresh_and_never_somebody_elses),
    (broken(FlagsAsIndex), isolation.test_flags_are_a_mask_and_never_an_index),
    (broken(MultipliesByZero), isolation.test_a_reset_clears_nan_and_inf_and_touches_no_other_environment),
    (
        broken(CutsGradientsEachStep),
        isolation.test_gradients_reach_every_step_inside_an_episode_and_no_other_environment,
    ),
    (broken(SharesMemoryBetweenAgents), isolation.test_interleaved_agents_on_one_module_equal_separate_ones),
    (broken(ResetDoesNothing), lifecycle.test_after_reset_memory_the_next_step_is_a_first_step),
    (broken(ResetDoesNothing), lifecycle.test_after_reset_env_memory_that_environment_alone_is_fresh),
    (broken(SavesNoMemory), lifecycle.test_memory_saved_in_mid_episode_continues_bit_exact_and_is_a_copy),
    (broken(SavesAReference), lifecycle.test_memory_saved_in_mid_episode_continues_bit_exact_and_is_a_copy),
    (broken(MixesTimeAndBatch), isolation.test_a_row_depends_only_on_its_environment_and_its_past),
    (broken(KeepsTheGraph), lifecycle.test_what_is_carried_holds_no_graph_and_a_segment_can_be_trained_on_many_times),
    (broken(KeepsTheGraph), lifecycle.test_training_neither_reads_nor_writes_memory),
    (broken(MovesStatisticsDuringTheRollout), replay.test_boundaries_at_the_first_and_last_step_of_a_segment_replay),
    (broken(HalfPrecisionInOneLeg), replay.test_boundaries_at_the_first_and_last_step_of_a_segment_replay),
    (broken(ClampsInOneLeg), precision.test_autocast_in_both_legs_replays_within_the_laws_tolerance),
]


POISON = {isolation.test_a_reset_clears_nan_and_inf_and_touches_no_other_environment: {"poison": float("nan")}}


@pytest.mark.parametrize(
    ("make_broken", "test"), CASES, ids=[f"{test.__name__}-{i}" for i, (_, test) in enumerate(CASES)]
)
def test_a_broken_policy_fails(make_broken, test):
    with pytest.raises(AssertionError):
        test(make=make_broken, **POISON.get(test, {}))


def test_the_same_policy_unbroken_passes():
    for test in {test for _, test in CASES}:
        test(make=broken(PolicyDriver), **POISON.get(test, {}))
