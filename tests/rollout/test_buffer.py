"""`SequenceBuffer` against plain lists of rows: what it samples was played, bitwise, and nothing crosses an end or a write position."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import holdfast as hf
from counting_env import Sum
from failing_env import FailingEnv
from holdfast.rollout.buffer import check_reset_modes
from holdfast.rollout.env_failures import RebuildingEnv
from rollout.streams import Stream, check_sample, recorded, same, segment, stacked, state_before, streams

pytestmark = pytest.mark.filterwarnings("ignore:states were kept every")
MODES = [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED]
quick = settings(max_examples=25, phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck))


@st.composite
def played(draw: Any) -> dict[str, Any]:
    """A buffer's sizes, its environments, and the lengths of the segments that it is given."""
    count, length, burn_in = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(0, 3))
    need = burn_in + length + 1
    chunks = draw(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 9)), min_size=1, max_size=9))
    return dict(
        count=count, length=length, burn_in=burn_in,
        capacity=2 * need * count + draw(st.integers(0, 40)),
        segments=[(parts * size, parts) for parts, size in chunks],
        seed=draw(st.integers(0, 10**6)),
        obs=draw(st.sampled_from(("vector", "image", "dict"))), actions=draw(st.sampled_from(("discrete", "heads", "box"))),
        masked=draw(st.booleans()), adds=draw(st.booleans()), odd=draw(st.sampled_from((0.0, 0.1))),
        interrupted=draw(st.booleans()),
        mean_length=draw(st.sampled_from((1.0, 1.5, 4.0, 30.0))),
    )  # fmt: skip


def filled(what: dict[str, Any], **options: Any) -> tuple[hf.SequenceBuffer, list[Stream], list[tuple[int, int]]]:
    """A buffer with all segments; the environments; where states were kept, as (environment, row)."""
    kinds = {name: what[name] for name in ("obs", "actions", "masked", "adds", "odd", "mean_length")}
    envs, starts = streams(what["count"], what["seed"], **kinds), []
    buffer = hf.SequenceBuffer(what["capacity"], what["count"], seed=what["seed"], **options)
    for steps, chunks in what["segments"]:
        first = len(envs[0].played)
        if what["interrupted"] and first:
            for env in envs:
                env.interrupted = not (env.played[-1].truncated and not env.adds)
        buffer.add(segment(envs, steps, chunks))
        starts += [(env.number, env.at[first + t]) for t in range(0, steps, steps // chunks) for env in envs]
    return buffer, envs, starts


def held(starts: list[tuple[int, int]], envs: list[Stream], rows: int, need: int) -> set[tuple[int, int]]:
    """The starts whose sequences are held as a whole, if every stream keeps its last `rows` rows."""
    ends = [len(env.rows) for env in envs]
    return {(b, at) for b, at in starts if ends[b] - rows <= at <= ends[b] - need}


# --- what is sampled was played ---------------------------------------------------------------------------------------


@given(what=played())
@quick
def test_every_sequence_was_played_and_every_start_that_is_held_is_drawn(what: dict[str, Any]):
    buffer, envs, starts = filled(what)
    need, rows = what["burn_in"] + what["length"] + 1, what["capacity"] // what["count"]
    wanted = held(starts, envs, rows, need)
    assert len(buffer) == sum(min(len(env.rows), rows) for env in envs)
    assert buffer.ready(what["length"], what["burn_in"]) == bool(wanted)
    if not wanted:
        with pytest.raises(ValueError, match="nothing can be sampled yet"):
            buffer.sample(1, what["length"], what["burn_in"])
        return
    batch = buffer.sample(14 * len(wanted) + 20, what["length"], what["burn_in"])
    assert check_sample(batch, envs, what["length"], what["burn_in"]) == wanted


@given(what=played())
@quick
def test_it_holds_while_it_fills_and_wraps_around_and_shares_nothing_with_segments_and_samples(what: dict[str, Any]):
    kinds = {name: what[name] for name in ("obs", "actions", "masked", "adds", "odd", "mean_length")}
    envs = streams(what["count"], what["seed"], **kinds)
    buffer = hf.SequenceBuffer(what["capacity"], what["count"], seed=3)
    for steps, chunks in what["segments"]:
        new = segment(envs, steps, chunks)
        buffer.add(new)
        new.map_tensors(lambda x: x.fill_(True) if x.dtype == torch.bool else x.fill_(99))
        if buffer.ready(what["length"], what["burn_in"]):
            batch = buffer.sample(9, what["length"], what["burn_in"])
            check_sample(batch, envs, what["length"], what["burn_in"])
            batch.map_tensors(torch.Tensor.zero_)


@given(what=played(), prioritized=st.booleans())
@quick
def test_a_copy_of_its_state_goes_on_like_it(what: dict[str, Any], prioritized: bool):
    early = {**what, "segments": what["segments"][:-1] or what["segments"]}
    buffer, envs, _ = filled(early, prioritized=prioritized)
    other = hf.SequenceBuffer(what["capacity"], what["count"], seed=99, prioritized=prioritized)
    other.load_state_dict(buffer.state_dict())
    new = segment(envs, 6)
    for each in (buffer, other):
        each.add(new)
    if buffer.ready(what["length"], what["burn_in"]):
        ours, theirs = (each.sample(5, what["length"], what["burn_in"]) for each in (buffer, other))
        assert same(parts(ours), parts(theirs))
        assert check_sample(theirs, envs, what["length"], what["burn_in"])


def parts(batch: hf.Segment) -> list[Any]:
    steps = batch.map_steps(lambda x: x)
    return [steps[name] for name in sorted(steps)] + [batch.start_state, batch.index]


def test_streams_grow_at_their_own_pace():
    """Environment 0 is truncated in every step, so that its stream has two rows per step; environment 1 is never."""
    envs = [streams(2, 1, mean_length=1.0)[0], streams(2, 1, mean_length=10.0**9)[1]]
    envs[0].draw.choice = lambda options: "truncated"  # type: ignore[method-assign]
    buffer = hf.SequenceBuffer(41, 2)
    for _ in range(9):
        buffer.add(segment(envs, 5))
    assert buffer.written.tolist() == [len(env.rows) for env in envs] == [90, 45]
    drawn = check_sample(buffer.sample(200, 3), envs, 3)
    assert {at for b, at in drawn if b == 0} == {70, 80} and {at for b, at in drawn if b == 1} == {25, 30, 35, 40}


def test_an_episode_is_not_valid_from_its_first_row_that_is_not_finite():
    """By hand: three episodes of five steps; the second has a NaN in its third row, and in an observation."""
    env = Stream(0, draw=streams(1, 0)[0].draw, mean_length=10.0**9)
    buffer = hf.SequenceBuffer(60, 1)
    new = segment([env], 15)
    new.terminated[[4, 9, 14]], new.resets[[5, 10]] = True, True
    new.obs[7, 0, 2], new.rewards[2, 0] = math.nan, math.inf
    buffer.add(new)
    batch = buffer.sample(1, 14)
    good = [True, True] + 3 * [False] + [True] + 4 * [False] + 5 * [True]  # row 6: its successor is not known
    assert batch.valid.squeeze(1).tolist() == good
    assert batch.obs[7, 0].tolist() == [0.0, 7.0, 0.0] and float(batch.rewards[2]) == 0.0
    more = segment([env], 3)
    more.obs[1] = math.nan
    buffer.add(more.changed(resets=torch.zeros(3, 1, dtype=torch.bool)))
    still = segment([env], 3)
    still.resets[2] = True
    buffer.add(still)
    rows = buffer.rows["flags"][15:21] & 8 != 0
    assert rows.tolist() == [True, False, False, False, False, True], "also in the next segment, until a reset"


@pytest.mark.parametrize("terminated", [False, True])
def test_a_step_is_not_learned_from_if_the_observation_that_its_target_needs_is_not_finite(terminated: bool):
    env = Stream(0, draw=streams(1, 0)[0].draw, mean_length=10.0**9)
    buffer = hf.SequenceBuffer(60, 1)
    new = segment([env], 8)
    new.truncated[3], new.terminated[3], new.resets[4] = True, terminated, True
    new.final_obs = torch.zeros_like(new.obs)
    new.final_obs[3, 0, 2] = math.nan
    buffer.add(new)
    valid = [True, True, True, terminated, False, True, True, True]
    assert buffer.sample(1, 8).valid.squeeze(1).tolist() == [*valid, True]


def test_a_state_with_numbers_that_are_not_finite_is_kept_with_zeros_for_them():
    envs = streams(2, 0)
    buffer = hf.SequenceBuffer(60, 2)
    new = segment(envs, 9)
    new.start_state["h"][0, 1] = math.nan
    buffer.add(new)
    start = buffer.sample(40, 5).start_state["h"]
    assert bool(start.isfinite().all()) and {tuple(row) for row in start.tolist()} == {(0.0, 0.0), (1.0, 0.0)}


def test_rows_of_a_rebuilt_environment_are_not_valid_and_cross_nothing():
    envs = streams(2, 4, mean_length=10.0**9)
    buffer = hf.SequenceBuffer(100, 2)
    for _ in range(3):
        first, starts = len(envs[0].played), [stacked([state_before(env.number, len(env.rows)) for env in envs])]
        for t in range(7):
            for env in envs:
                env.fail() if t == 3 else env.step()
        buffer.add(recorded(envs, first, starts))
    batch = buffer.sample(60, 6)
    assert check_sample(batch, envs, 6) and not bool(batch.valid.all())


# --- rollouts of the collector ----------------------------------------------------------------------------------------


class Diary(gym.Env[Any, Any]):
    """Writes down its episodes. Every observation says which environment, episode and step it is of."""

    def __init__(self, number: int, kind: str, ends: tuple[str, ...], masked: bool = False) -> None:
        self.number, self.kind, self.ends = number, kind, ends
        self.diary: list[dict[str, Any]] = []
        self.observation_space = {
            "vector": spaces.Box(-np.inf, np.inf, (3,), np.float32),
            "image": spaces.Box(0, 255, (20, 20, 3), np.uint8),
            "dict": spaces.Dict({"id": spaces.MultiDiscrete([9, 99, 99]), "x": spaces.Box(-9, 9, (), np.float32)}),
        }[kind]
        self.action_space = spaces.MultiDiscrete([3, 2]) if kind == "dict" else spaces.Discrete(4)
        if kind == "vector":
            self.action_space = spaces.Box(-1, 1, (2,), np.float32)
        if masked:
            self.action_masks = self._mask

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.diary.append(dict(obs=[], actions=[], rewards=[], masks=[], end=""))
        return self._see(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        episode = self.diary[-1]
        episode["masks"].append(self._mask())
        episode["actions"].append(np.copy(action))
        episode["rewards"].append(float(np.float32(self.np_random.normal())))
        number = len(self.diary) - 1
        last = len(episode["actions"]) == 1 + (number + self.number) % 5  # from 1 to 5 steps
        episode["end"] = self.ends[number % len(self.ends)] if last else ""
        flags = [episode["end"] in (how, "both") for how in ("terminated", "truncated")]
        return self._see(), episode["rewards"][-1], flags[0], flags[1], {}

    def _mask(self) -> Any:
        step = len(self.diary[-1]["actions"])
        whole = self.kind == "dict"
        return np.array(
            [step % 3 != i for i in range(3)] + [True, True] if whole else [step % 4 != i for i in range(4)]
        )

    def _see(self) -> Any:
        episode = self.diary[-1]
        name = [self.number, len(self.diary) - 1, len(episode["obs"])]
        if self.kind == "vector":
            obs: Any = np.array(name, np.float32) + np.float32(0.125)
        elif self.kind == "image":
            obs = np.zeros((20, 20, 3), np.uint8)
            obs[3, 4] = name
        else:
            obs = {"id": np.array(name), "x": np.float32(0.5)}
        episode["obs"].append(obs)
        return obs


def place(obs: Any, kind: str, t: int, s: int) -> tuple[int, int, int]:
    found = obs["id"][t, s] if kind == "dict" else obs[t, s, 3, 4] if kind == "image" else obs[t, s]
    return tuple(int(x) for x in found)  # type: ignore[return-value]


def check_diary(batch: hf.Segment, envs: list[Diary], kind: str, plays_ends: bool) -> set[tuple[int, int, int]]:
    """Every row is a step of a diary, or the last observation of a truncated episode; rows follow one another as there."""
    seen = set()
    T = batch.num_steps
    for s in range(batch.num_envs):
        for t in range(T):
            b, number, step = place(batch.obs, kind, t, s)
            episode = envs[b].diary[number]
            steps = len(episode["actions"])
            is_final = step == steps and bool(episode["end"])
            shown = {"obs": episode["obs"][step]} if kind != "dict" else episode["obs"][step]
            mine = {"obs": batch.obs} if kind != "dict" else batch.obs
            assert all(np.array_equal(mine[name][t, s].numpy(), shown[name]) for name in shown)
            assert bool(batch.resets[t, s]) == (step == 0 and not is_final)
            if is_final:
                assert plays_ends or episode["end"] != "terminated"
                assert not (batch.valid[t, s] or batch.terminated[t, s] or batch.truncated[t, s])
                assert float(batch.rewards[t, s]) == 0
            else:
                action = batch.actions[t, s]
                action = action.clamp(-1, 1) if kind == "vector" else action
                assert np.array_equal(action.numpy(), episode["actions"][step])
                assert float(batch.rewards[t, s]) == episode["rewards"][step]
                for name, flags in (("terminated", batch.terminated), ("truncated", batch.truncated)):
                    assert bool(flags[t, s]) == (step + 1 == steps and episode["end"] in (name, "both"))
                if batch.action_mask is not None:
                    assert np.array_equal(batch.action_mask[t, s].numpy(), episode["masks"][step])
                assert bool(batch.valid[t, s]) or t + 1 == T, "every real step can be learned from"
                seen.add((b, number, step))
            if t + 1 < T:
                over = is_final or (step + 1 == steps and episode["end"] == "terminated" and not plays_ends)
                wanted = (b, number + 1, 0) if over else (b, number, step + 1)
                assert place(batch.obs, kind, t + 1, s) == wanted, (
                    "the successor of a row is the next one of its stream"
                )
    return seen


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize(("kind", "masked"), [("vector", False), ("image", True), ("dict", True), ("dict", False)])
def test_rollouts_in_every_autoreset_mode_and_kind_of_space(mode: AutoresetMode, kind: str, masked: bool):
    envs = [Diary(b, kind, ("terminated", "truncated", "both"), masked) for b in range(3)]
    vector = SyncVectorEnv([lambda env=env: env for env in envs], autoreset_mode=mode)
    policy = hf.ActorCritic(envs[0].observation_space, envs[0].action_space, "gru", hidden_size=8)
    collector = hf.Collector(vector, policy, steps=12, bptt=4, seed=1, records=("final_obs",))
    buffer = hf.SequenceBuffer(3 * 40, 3)
    seen = set()
    for _ in range(8):
        buffer.add(collector.rollout())
        if buffer.ready(9):
            batch = buffer.sample(12, 9)
            seen |= check_diary(batch, envs, kind, mode == AutoresetMode.NEXT_STEP)
            assert batch.obs["id"].dtype == torch.int64 if kind == "dict" else True
            assert batch.obs.dtype == torch.uint8 if kind == "image" else True
    assert len(seen) > 100


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_a_start_state_is_the_one_before_its_row_and_before_that_row_s_reset(mode: AutoresetMode):
    """The memory of this policy is the sum of what it saw, so a start says what came before; it is reset by `resets`."""
    envs = [Diary(b, "vector", ("truncated", "terminated")) for b in range(2)]
    vector = SyncVectorEnv([lambda env=env: env for env in envs], autoreset_mode=mode)
    policy = SumOfSteps()
    collector = hf.Collector(vector, policy, steps=6, bptt=2, seed=1, records=("final_obs",))
    buffer = hf.SequenceBuffer(400, 2)
    for _ in range(6):
        buffer.add(collector.rollout())
    batch = buffer.sample(300, 4)
    found = set()
    for s in range(300):
        b, number, step = place(batch.obs, "vector", 0, s)
        diary = envs[b].diary
        # Before a reset: what the episode before was left with. NEXT_STEP plays its last observation, whatever its end.
        at, count = (number, step) if step else (number - 1, None)
        before = [] if at < 0 else diary[at]["obs"][: count if count is not None else len(diary[at]["actions"])]
        if step == 0 and at >= 0 and mode == AutoresetMode.NEXT_STEP:
            before = diary[at]["obs"]
        wanted = sum(float(obs[2]) for obs in before)
        assert float(batch.start_state["sum"][s]) == wanted, (b, number, step)
        found.add(step)
    assert {0, 1, 2, 3} <= found
    played = policy.unroll(batch.obs, batch.start_state, batch.resets).value
    for s in range(300):
        for t in range(5):
            b, number, step = place(batch.obs, "vector", t, s)
            assert float(played[t, s].detach()) == sum(float(o[2]) for o in envs[b].diary[number]["obs"][: step + 1])


class SumOfSteps(hf.RecurrentPolicy):
    """Remembers the sum of the last numbers of its observations."""

    def __init__(self) -> None:
        super().__init__(core=Sum())
        self.slope = torch.nn.Parameter(torch.zeros(()))

    def encode(self, obs: torch.Tensor) -> torch.Tensor:
        return obs[:, 2:]

    def decode(self, features: torch.Tensor) -> Any:
        mean = torch.cat([features, features], 1) * self.slope
        return torch.distributions.Independent(torch.distributions.Normal(mean, torch.ones_like(mean)), 1), features[
            :, 0
        ]


@pytest.mark.parametrize("how", ["raise", "nan obs", "nan reward"])
def test_rollouts_of_environments_that_fail(tmp_path: Any, how: str):
    """Observations count 0, 1, ..., 5; the reward is the action. Failures: the step does not count; NaN: the rest does not."""
    make = lambda: SyncVectorEnv(  # noqa: E731
        [lambda: FailingEnv(str(tmp_path), how, at=4, times=2) for _ in range(2)],
        autoreset_mode=AutoresetMode.SAME_STEP,
    )
    env = RebuildingEnv(make, limit=5)
    policy = hf.ActorCritic(env.single_observation_space, env.single_action_space, "gru", hidden_size=4)
    collector = hf.Collector(env, policy, steps=10, seed=1, records=("final_obs",))
    buffer = hf.SequenceBuffer(200, 2)
    failed = 0
    for _ in range(5):
        rollout = collector.rollout()
        failed += 0 if rollout.failed is None else int(rollout.failed.sum())
        buffer.add(rollout)
    batch = buffer.sample(40, 8)
    valid, step = batch.valid[:-1], batch.obs[:-1].squeeze(-1)
    assert failed == (4 if how == "raise" else 0) and not bool(valid.all())
    assert all(bool(x.isfinite().all()) for x in (batch.obs, batch.rewards))
    assert torch.equal(batch.rewards[:-1][valid], batch.actions[:-1][valid].float())
    ends = batch.terminated[:-1]
    follows = torch.where(ends, 0.0, step + 1)
    assert torch.equal(batch.obs[1:].squeeze(-1)[valid], follows[valid]), "no row's successor is of another episode"


# --- windows, and how often states are kept ---------------------------------------------------------------------------


def test_a_window_keeps_no_states_and_needs_burn_in():
    envs = streams(2, 2)
    buffer = hf.SequenceBuffer(120, 2, context=4)
    for _ in range(5):
        buffer.add(segment(envs, 12, 3))
    with pytest.raises(ValueError, match="burn_in is 3, but this policy's window needs at least 4"):
        buffer.sample(3, 5, burn_in=3)
    batch = buffer.sample(50, 5, burn_in=4)
    assert len(check_sample(batch, envs, 5, 4, state=None)) > 5
    assert float(batch.start_state["h"].abs().max()) == 0 and batch.start_state["age"].dtype == torch.int32
    assert buffer.starts.state_bytes() == 0


def large_state(stream: int, row: int) -> dict[str, torch.Tensor]:
    return {"h": torch.cat([torch.tensor([float(stream), float(row)]), torch.zeros(98)])}


def test_large_states_are_kept_less_often_but_at_least_every_length_rows():
    """A row has 25 bytes (12 + 8 + 4 + 1), a state 400: as much as 16 rows. Chunks are of 4 steps."""
    for length, gap in ((9, 8), (16, 16), (30, 16), (3, 4)):
        envs = streams(1, 5, mean_length=10.0**9)
        buffer = hf.SequenceBuffer(600, 1)
        add = lambda: buffer.add(segment(envs, 8, 2, large_state))  # noqa: B023, E731
        for _ in range(10):
            add()
        assert [b - a for a, b in zip(buffer.starts.steps, list(buffer.starts.steps)[1:])] == [4] * 19, (
            "nothing sampled yet"
        )
        if length < 4:
            with pytest.warns(UserWarning, match="states were kept every 4 rows, so sequences of 3 never reach"):
                buffer.sample(1, length)
        else:
            buffer.sample(1, length)
        for _ in range(20):
            add()
        kept = [step for step in buffer.starts.steps if step >= 80]
        assert {b - a for a, b in itertools.pairwise(kept)} == {gap}
        check_sample(buffer.sample(30, length), envs, length, state=large_state)


def test_small_states_are_all_kept():
    envs = streams(1, 5)
    buffer = hf.SequenceBuffer(600, 1)
    for _ in range(20):
        buffer.add(segment(envs, 8, 2))
        buffer.sample(1, 5) if buffer.ready(5) else None
    assert list(buffer.starts.steps) == list(range(0, 160, 4))


def test_the_ring_of_starts_grows_in_order_also_when_it_begins_in_the_middle():
    envs = streams(1, 6, mean_length=10.0**9)
    buffer = hf.SequenceBuffer(300, 1)
    for steps, chunks in 77 * [(20, 1)] + 12 * [(20, 20)]:
        buffer.add(segment(envs, steps, chunks))
    assert len(buffer.starts.rows) > 64
    assert {at for _, at in check_sample(buffer.sample(5000, 4), envs, 4)} == {1480, 1500, 1520, *range(1540, 1776)}


def test_the_ring_of_starts_grows_with_short_chunks_and_does_not_grow_for_ever():
    envs = streams(1, 6, mean_length=10.0**9)
    buffer = hf.SequenceBuffer(300, 1)
    for _ in range(60):
        buffer.add(segment(envs, 20, 20))
        check_sample(buffer.sample(3, 4), envs, 4)
    assert len(buffer.starts.rows) == 512 and len(check_sample(buffer.sample(4000, 4), envs, 4)) == 296


# --- priorities -------------------------------------------------------------------------------------------------------


def prioritized(rows: int = 60) -> tuple[hf.SequenceBuffer, list[Stream]]:
    """Two environments, 10 starts each of which 9 can be drawn."""
    envs = streams(2, 7, mean_length=10.0**9)
    buffer = hf.SequenceBuffer(2 * rows, 2, seed=1, prioritized=True)
    for _ in range(5):
        buffer.add(segment(envs, 10, 2))
    return buffer, envs


def frequencies(buffer: hf.SequenceBuffer, count: int = 20_000) -> Counter[int]:
    return Counter(buffer.sample(count, 5).index.tolist())


def test_without_priorities_every_start_is_as_likely():
    envs = streams(2, 7, mean_length=10.0**9)
    buffer = hf.SequenceBuffer(120, 2, seed=1)
    for _ in range(5):
        buffer.add(segment(envs, 10, 2))
    found = frequencies(buffer)
    assert (
        len(found) == 18 and sum((n - 20_000 / 18) ** 2 / (20_000 / 18) for n in found.values()) < 40.8
    )  # chi2(17), 0.1%


def test_sequences_are_drawn_in_proportion_to_their_priorities():
    buffer, envs = prioritized()
    index = torch.tensor(sorted(frequencies(buffer)))
    wanted = torch.rand(len(index), dtype=torch.float64) ** 2
    wanted[4] = 0.0
    buffer.update_priorities(index, wanted)
    found = frequencies(buffer)
    expected = 20_000 * wanted / wanted.sum()
    assert found[int(index[4])] == 0
    others = [(found[int(i)], float(n)) for i, n in zip(index, expected) if n > 5]
    assert sum((got - n) ** 2 / n for got, n in others) < 42
    check_sample(buffer.sample(40, 5), envs, 5)


def test_an_index_names_its_sequence_also_after_the_ring_has_grown():
    buffer, envs = prioritized(rows=400)
    chosen = buffer.sample(1, 5)
    for _ in range(40):
        buffer.add(segment(envs, 5))
    buffer.update_priorities(torch.tensor(sorted(frequencies(buffer))), torch.full((len(frequencies(buffer)),), 1e-6))
    buffer.update_priorities(chosen.index, torch.tensor([1.0]))
    again = buffer.sample(50, 5)
    most = [s for s in range(50) if int(again.index[s]) == int(chosen.index[0])]
    assert len(most) > 45 and all(torch.equal(again.obs[:, s], chosen.obs[:, 0]) for s in most)


def test_an_index_names_its_sequence_also_after_the_ring_has_wrapped_around():
    buffer, envs = prioritized()
    for _ in range(100):
        buffer.add(segment(envs, 5))
    chosen = buffer.sample(1, 5)
    buffer.update_priorities(chosen.index, torch.tensor([500.0]))
    again = buffer.sample(50, 5)
    most = [s for s in range(50) if torch.equal(again.obs[:, s], chosen.obs[:, 0])]
    assert len(most) > 40 and int(chosen.index[0]) > 2 * len(buffer.starts.rows)
    check_sample(again, envs, 5)


def test_new_sequences_get_the_largest_priority_so_far():
    buffer, envs = prioritized()
    index = torch.tensor(sorted(frequencies(buffer)))
    buffer.update_priorities(index, torch.full((len(index),), 2.0))
    buffer.update_priorities(index[:1], torch.tensor([6.0]))
    buffer.update_priorities(index[:1], torch.tensor([0.5]))
    buffer.add(segment(envs, 6))
    found = frequencies(buffer)
    old = np.mean([found[i] for i in index[1:].tolist()])  # 2.0
    assert found[20] == pytest.approx(3 * old, rel=0.2) and found[21] == pytest.approx(3 * old, rel=0.2)
    assert found[18] == pytest.approx(0.5 * old, rel=0.3), "those that came before the largest have the one of then"


def test_priorities_of_sequences_that_are_gone_are_passed_over():
    young, _ = prioritized()
    young.update_priorities(torch.tensor([-1, -7, 20, 77, 10**12]), torch.full((5,), 1e6))
    assert float(young.starts.largest) == 1.0 and bool((young.starts.priorities == 1.0).all())
    buffer, envs = prioritized(rows=30)
    gone = buffer.sample(4, 5).index
    for _ in range(40):
        buffer.add(segment(envs, 5))
    before, largest = buffer.starts.priorities.clone(), float(buffer.starts.largest)
    buffer.update_priorities(gone, torch.full((4,), 1e6))
    buffer.update_priorities(torch.tensor([-1, -7, 10**12]), torch.full((3,), 1e6))
    assert torch.equal(before, buffer.starts.priorities) and float(buffer.starts.largest) == largest
    mixed = torch.cat([gone, buffer.sample(1, 5).index])
    buffer.update_priorities(mixed, torch.tensor([9.0, 9.0, 9.0, 9.0, 3.0]))
    assert float(buffer.starts.largest) == 3.0 and (buffer.starts.priorities == 3.0).sum() == 1


# --- what is refused --------------------------------------------------------------------------------------------------


def wrong(change: str) -> Any:
    """A buffer that holds something, and a call that it must refuse."""
    envs = streams(2, 3)
    buffer = hf.SequenceBuffer(100, 2)
    buffer.add(segment(envs, 10))
    new = segment(envs, 10)
    calls = {
        "another number of environments": lambda: buffer.add(segment(streams(3, 3), 10)),
        "no segment": lambda: buffer.add({"obs": new.obs}),
        "start states at odd places": lambda: buffer.add(new.changed(chunk_states=[new.start_state] * 3)),
        "another dtype": lambda: buffer.add(new.changed(obs=new.obs.double())),
        "another shape": lambda: buffer.add(new.changed(actions=torch.zeros(10, 2, 3, dtype=torch.long))),
        "a mask that came later": lambda: buffer.add(new.changed(action_mask=torch.ones(10, 2, 4).bool())),
        "states of another core": lambda: buffer.add(new.changed(chunk_states=[{"h": torch.zeros(2, 3)}])),
        "states of other environments": lambda: buffer.add(
            new.changed(chunk_states=[{name: x[:1] for name, x in new.start_state.items()}])
        ),
        "no state": lambda: buffer.add(new.changed(start_state=None, chunk_states=[])),
        "other final observations": lambda: buffer.add(new.changed(final_obs=torch.zeros(10, 2, 2))),
        "final observations in a dict": lambda: buffer.add(new.changed(final_obs={"x": new.obs})),
        "observations of fewer steps": lambda: buffer.add(new.changed(obs=new.obs[:5])),
        "burn_in": lambda: buffer.sample(1, 4, burn_in=-1),
        "half a burn_in": lambda: buffer.sample(1, 4, burn_in=0.5),
        "length": lambda: buffer.sample(1, 0),
        "no sequences": lambda: buffer.sample(0, 4),
        "too long": lambda: buffer.sample(1, 30),
        "priorities": lambda: buffer.update_priorities(torch.zeros(1).long(), torch.ones(1)),
    }
    return buffer, calls[change]


REFUSED = {
    "another number of environments": "this segment has 3 environments, the buffer 2",
    "no segment": "takes a Segment, got a dict",
    "start states at odd places": "10 steps and 3 start states, which must be equally far apart",
    "another dtype": r"rows differ from those of the first in obs: \[\(\(3,\), torch.float64\)\]",
    "another shape": "rows differ from those of the first in actions",
    "a mask that came later": "rows differ from those of the first in action_mask",
    "states of another core": "states differ from those of the first in age, h",
    "states of other environments": "a start state with 1 rows, expected 2",
    "no state": "no start state",
    "other final observations": r"final_obs of this segment is \[10, 2, 2\], expected \[10, 2, 3\]",
    "final observations in a dict": r"final_obs of this segment is x \[10, 2, 3\], expected \[10, 2, 3\]",
    "observations of fewer steps": r"obs.*\(5, 2, 3\)",
    "burn_in": "burn_in must be an integer of at least 0, got -1",
    "half a burn_in": "burn_in must be an integer of at least 0, got 0.5",
    "length": "length must be a positive integer, got 0",
    "no sequences": "sequences must be a positive integer, got 0",
    "too long": "a capacity of 100 is 50 rows per environment; sequences of 0 [+] 30 [+] 1 rows need at least 62, a capacity of 124",
    "priorities": "this buffer has no priorities; make it with prioritized=True",
}


@pytest.mark.parametrize("change", list(REFUSED))
def test_what_does_not_fit_is_refused_in_one_line_and_changes_nothing(change: str):
    buffer, call = wrong(change)
    before = buffer.state_dict()
    with pytest.raises((ValueError, TypeError), match=REFUSED[change]) as refused:
        call()
    assert "\n" not in str(refused.value)
    assert unchanged(before, buffer)


def unchanged(before: dict[str, Any], buffer: hf.SequenceBuffer) -> bool:
    after = buffer.state_dict()
    tensors = [name for name, value in before.items() if isinstance(value, (dict, torch.Tensor))]
    plain = before.keys() - set(tensors)
    return all(same(before[name], after[name]) for name in tensors) and all(before[n] == after[n] for n in plain)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(capacity=0, num_envs=1), "capacity must be a positive integer, got 0"),
        (dict(capacity=10, num_envs=-2), "num_envs must be a positive integer, got -2"),
        (dict(capacity=5, num_envs=3), "capacity 5 is too small for 3 environments; use at least 6"),
        (dict(capacity=9, num_envs=3, context=-1), "context must be an integer of at least 0, got -1"),
    ],
)
def test_sizes_that_are_none_are_refused(options: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        hf.SequenceBuffer(**options)


def test_nothing_can_be_sampled_of_an_empty_buffer():
    buffer = hf.SequenceBuffer(100, 2)
    assert not buffer.ready(5) and len(buffer) == 0
    with pytest.raises(ValueError, match="nothing can be sampled yet"):
        buffer.sample(1, 5)


@pytest.mark.parametrize(
    ("index", "priorities", "words"),
    [
        (torch.zeros(2).long(), torch.ones(3), r"index has shape \(2,\), priorities \(3,\); both are \[S\]"),
        (torch.zeros(2), torch.ones(2), "index has dtype torch.float32, expected torch.int64"),
        (torch.zeros(2).long(), torch.tensor([1.0, math.nan]), "priorities must be finite and at least 0"),
        (torch.zeros(2).long(), torch.tensor([1.0, -1.0]), "priorities must be finite and at least 0"),
    ],
)
def test_priorities_that_are_none_are_refused(index: torch.Tensor, priorities: torch.Tensor, words: str):
    buffer, _ = prioritized()
    with pytest.raises(ValueError, match=words):
        buffer.update_priorities(index, priorities)


@pytest.mark.parametrize("later", [False, True])
def test_a_truncated_episode_without_its_final_observation_is_refused(later: bool):
    envs = streams(1, 3, mean_length=10.0**9)
    buffer = hf.SequenceBuffer(100, 1)
    new, after = segment(envs, 5), segment(envs, 5)
    new.truncated[4 if later else 2] = True
    (after.resets if later else new.resets)[0 if later else 3] = True
    with pytest.raises(ValueError, match=r"final observation is missing; collect with records=\('final_obs',\)"):
        buffer.add(new)
        buffer.add(after)


@pytest.mark.parametrize(
    ("reset", "next_step", "fits"),
    [("never", False, False), ("detach", False, False), ("never", True, True), ("zero", False, True)],
)
def test_states_that_go_on_over_resets_need_rows_that_were_played(reset: str, next_step: bool, fits: bool):
    core = hf.Stack([hf.LSTM(3, 3), hf.GRU(3, 3, reset=reset)])
    if fits:
        check_reset_modes(core, next_step)
    else:
        with pytest.raises(ValueError, match=f"reset mode {reset!r} .* needs an environment with NEXT_STEP"):
            check_reset_modes(core, next_step)


def test_a_policy_without_memory_has_empty_states():
    envs = streams(1, 3)
    buffer = hf.SequenceBuffer(100, 1)
    buffer.add(segment(envs, 20, 2, lambda stream, row: {}))
    batch = buffer.sample(5, 4)
    assert check_sample(batch, envs, 4, state=None) and batch.start_state == {}


def test_masks_that_come_and_go_allow_everything_where_there_is_none():
    envs = streams(1, 3, masked=True)
    buffer = hf.SequenceBuffer(100, 1)
    buffer.add(segment(envs, 10))
    for env in envs:
        env.masked = False
    buffer.add(segment(envs, 10))
    assert bool(buffer.rows["action_mask"][len(envs[0].rows) - 5 : len(envs[0].rows)].all())
