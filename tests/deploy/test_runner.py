"""`hf.Runner` keeps the memory of any number of environments, whatever the policy is stored in."""

import sys
import threading
import warnings

import numpy as np
import pytest
import torch
from gymnasium import spaces

import holdfast as hf
from accumulator import DTYPES, Accumulator, dtypes
from holdfast.deploy.exported_signature import sample_observations
from holdfast.state import tree_map

BOX = spaces.Box(-1, 1, (3,))
NESTED = spaces.Dict(position=BOX, card=spaces.Discrete(4))


def make_policy(action_space=None, obs=BOX, core="lstm", **options):
    torch.manual_seed(2)
    policy = hf.ActorCritic(obs, action_space or spaces.Discrete(4), core, 8, **options)
    with torch.no_grad():
        for p in policy.parameters():
            p.normal_(0, 0.8 if p.dim() > 1 else 0.1)
    return policy


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """One policy with a learned start, as itself and in both formats."""
    policy, folder = make_policy(reset="learned"), tmp_path_factory.mktemp("exported")
    files = {suffix: hf.export_policy(policy, folder / f"policy.{suffix}").path for suffix in ("onnx", "pt2")}
    return {"policy": policy, **files}


@pytest.fixture(params=["policy", "onnx", "pt2"])
def source(request, sources):
    return sources[request.param]


CLIPPED = spaces.Box(np.array([-0.1, -np.inf]), np.array([0.1, np.inf]), dtype=np.float64)


@pytest.fixture(scope="module")
def nested(tmp_path_factory):
    """A policy with observations in parts and Box actions, as itself and exported."""
    policy = make_policy(CLIPPED, NESTED, "gru")
    return {False: policy, True: hf.export_policy(policy, tmp_path_factory.mktemp("nested") / "policy.pt2").path}


def observations(count, seed=0):
    return np.random.default_rng(seed).normal(size=(count, 3)).astype(np.float32)


def test_a_runner_acts_as_the_policy_does(source, sources):
    runner, policy, memory = hf.Runner(source), sources["policy"], hf.Memory(sources["policy"].core)
    random = np.random.default_rng(1)
    for t in range(50):
        obs, resets = observations(5, t), random.random(5) < 0.2
        step, want = runner.act(obs, resets), policy.act(obs, resets, memory=memory, deterministic=True)
        np.testing.assert_array_equal(step.action, want.action)
        np.testing.assert_allclose(step.value, want.value, atol=1e-5)
    assert runner.num_envs == 5 and policy.memory.num_envs == 0  # the policy's own memory is left alone


def test_each_environment_is_what_it_would_be_alone(source):
    """Environments come and go in any order, in batches and one by one; each trace equals its solo run."""
    runner, random = hf.Runner(source), np.random.default_rng(3)
    solo = {env: hf.Runner(source) for env in range(6)}
    for t in range(60):
        ids = random.permutation(6)[: random.integers(1, 7)]
        obs, resets = observations(len(ids), t), random.random(len(ids)) < 0.2
        if len(ids) == 1:
            values = [runner.act(obs[0], resets[0], env_ids=int(ids[0])).value]
        else:
            values = runner.act(obs, resets, env_ids=ids.tolist()).value
        alone = [solo[env].act(obs[i], bool(resets[i])).value for i, env in enumerate(ids)]
        np.testing.assert_allclose(values, alone, atol=1e-5)
    assert runner.num_envs == 6


def test_one_observation_without_a_batch_dimension_is_a_batch_of_one(source):
    alone, batch = hf.Runner(source), hf.Runner(source)
    for t in range(20):
        obs, reset = observations(1, t), t % 7 == 0
        one, want = alone.act(obs[0], reset), batch.act(obs, np.array([reset]))
        assert one.action.shape == () and one.action.dtype == np.int64 and one.value.shape == ()
        np.testing.assert_allclose(one.value, want.value[0], atol=1e-6)
    # The same memory, in either form.
    np.testing.assert_allclose(alone.act(obs).value, batch.act(obs[0]).value, atol=1e-6)


def test_no_flags_mean_no_reset_and_memory_matters(source):
    runner, none = hf.Runner(source), hf.Runner(source)
    obs = observations(3)
    first = runner.act(obs).value
    none.act(obs)
    assert np.abs(runner.act(obs, np.zeros(3, bool)).value - first).min() > 1e-3
    np.testing.assert_allclose(runner.act(obs, np.ones(3, bool)).value, first, atol=1e-6)


def test_after_reset_the_next_step_is_a_first_step(source):
    runner, obs = hf.Runner(source), observations(3)
    first = runner.act(obs).value
    second = runner.act(obs).value
    runner.reset([1])
    third = runner.act(obs).value
    assert abs(third[1] - first[1]) < 1e-6 and abs(third[0] - first[0]) > 1e-4
    runner.reset()
    np.testing.assert_allclose(runner.act(obs).value, first, atol=1e-6)
    np.testing.assert_allclose(runner.act(obs).value, second, atol=1e-6)
    alone = hf.Runner(source)
    start = alone.act(obs[0]).value
    alone.act(obs[0])
    alone.reset()
    assert alone.act(obs[0]).value == start


def test_memory_goes_on_in_another_runner_and_is_a_copy(source):
    first, second, obs = hf.Runner(source), hf.Runner(source), observations(2)
    first.act(obs)
    saved = first.state_dict()
    want = first.act(obs).value
    second.load_state_dict(saved)
    np.testing.assert_array_equal(second.act(obs).value, want)
    alone = hf.Runner(source)
    alone.act(obs[0])
    second.load_state_dict(alone.state_dict())  # also while an environment acts alone
    assert second.num_envs == 1
    assert second.act(obs[0]).value == alone.act(obs[0]).value


def test_fewer_environments_than_known_are_refused_and_forgotten_ones_are_gone(source):
    runner, obs = hf.Runner(source), observations(4)
    first = runner.act(obs).value
    with pytest.raises(ValueError, match=r"got 2 rows, but this memory knows 4 environments.*env_ids="):
        runner.act(obs[:2])
    with pytest.raises(ValueError, match=r"got one observation.* knows other .*\(4 in total\): pass env_ids=ID"):
        runner.act(obs[0])
    runner.forget()
    np.testing.assert_allclose(runner.act(obs[:2]).value, first[:2], atol=1e-6)
    alone = hf.Runner(source)
    alone.act(obs[0], env_ids=1)
    with pytest.raises(ValueError, match=r"got one observation.* knows other .*\(1 in total\)"):
        alone.act(obs[0])


def test_an_error_leaves_memory_as_it_was(source):
    runner, other = hf.Runner(source), hf.Runner(source)
    for r in (runner, other):
        r.act(observations(3))
    for resets in (np.zeros(2, bool), np.zeros(3)):
        with pytest.raises((TypeError, ValueError), match="resets has"):
            runner.act(observations(3, 1), resets)
    np.testing.assert_array_equal(runner.act(observations(3, 1)).value, other.act(observations(3, 1)).value)
    fresh = hf.Runner(source)
    with pytest.raises(ValueError, match="got one observation with 2 resets"):
        fresh.act(observations(1)[0], np.zeros(2, bool))
    assert fresh.num_envs == 0


def test_tensors_in_tensors_out(source):
    step = hf.Runner(source).act(torch.as_tensor(observations(2)), torch.zeros(2, dtype=torch.bool))
    assert all(isinstance(part, torch.Tensor) for part in step)
    np.testing.assert_allclose(step.value, hf.Runner(source).act(observations(2)).value, atol=1e-6)


def test_sampled_actions_follow_the_policys_probabilities(source, sources):
    torch.manual_seed(0)
    obs = observations(1).repeat(4000, 0)
    actions = hf.Runner(source).act(obs, deterministic=False).action
    policy = sources["policy"]
    features, _ = policy.core(policy.encode(torch.as_tensor(obs[:1])))
    probabilities = policy.decode(features)[0].log_probs.exp().detach().numpy()[0]
    np.testing.assert_allclose(np.bincount(actions, minlength=4) / 4000, probabilities, atol=0.04)


@pytest.mark.parametrize("exported", [False, True])
def test_a_box_is_clipped_as_the_environment_gets_it_and_the_raw_action_is_there(exported, nested):
    runner, obs, space = hf.Runner(nested[exported]), sample_observations(NESTED, 30), CLIPPED
    for deterministic in (True, False):
        step = runner.act(obs, deterministic=deterministic)
        assert step.action.dtype == np.float64 and np.abs(step.raw_action[:, 0]).max() > 0.1
        np.testing.assert_array_equal(step.action, np.clip(step.raw_action, space.low, space.high))
        assert all(space.contains(action) for action in step.action)
    one = runner.act(tree_map(lambda part: part[0], obs), env_ids=0)
    assert one.action.shape == (2,)


def test_a_policy_without_spaces_takes_batches_and_single_ones_if_told_its_space():
    class Own(hf.RecurrentPolicy):
        def __init__(self):
            super().__init__(core=hf.GRU(3, 4))

        def encode(self, obs):
            return obs

        def decode(self, features):
            return torch.distributions.Categorical(logits=features), features.sum(-1)

    policy = Own()
    assert hf.Runner(policy).act(observations(2)).action.shape == (2,)
    assert hf.Runner(policy, observation_space=BOX).act(observations(2)[0]).action.shape == ()


# --- bad input ------------------------------------------------------------------------------------------------------


def test_observations_of_another_shape_or_kind_are_refused(source):
    runner = hf.Runner(source)
    with pytest.raises(ValueError, match=r"shape \(2, 4\) for obs, expected \(3,\), or \('B', 3\)"):
        runner.act(np.zeros((2, 4), np.float32))
    with pytest.raises(ValueError, match=r"got one observation with env_ids=\[0, 1\]"):
        runner.act(np.zeros(3, np.float32), env_ids=[0, 1])
    with pytest.raises(ValueError, match="got 2 observations with 3 env_ids"):
        runner.act(np.zeros((2, 3), np.float32), env_ids=[0, 1, 2])


def test_parts_of_an_observation_that_are_missing_or_differ_are_named(nested):
    for exported in (False, True):
        runner = hf.Runner(nested[exported])
        with pytest.raises(ValueError, match=r"no part 'card': got keys \['position'\]"):
            runner.act({"position": np.zeros((2, 3), np.float32)})
        with pytest.raises(ValueError, match="differ in batch size"):
            runner.act({"position": np.zeros((2, 3), np.float32), "card": np.zeros(3, np.int64)})
    with pytest.raises(TypeError, match=r"obs_card has dtype float64, expected int64; convert it with \.astype"):
        runner.act({"position": np.zeros((2, 3)), "card": np.zeros(2)})


def test_what_is_no_policy_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"a run folder, a checkpoint, an \.onnx or \.pt2 file, or a policy; got a"):
        hf.Runner(torch.nn.Linear(2, 2))
    with pytest.raises(FileNotFoundError, match=r"policy\.onnx: there is no such file; `holdfast export RUN"):
        hf.Runner(tmp_path / "policy.onnx")
    for suffix in ("onnx", "pt2"):
        (tmp_path / f"bad.{suffix}").write_bytes(b"no such thing")
        with pytest.raises(ValueError, match=rf"bad\.{suffix}: .* cannot read it"):
            hf.Runner(tmp_path / f"bad.{suffix}")
    with pytest.raises(ValueError, match="runs on the CPU"):
        hf.Runner(tmp_path / "policy.onnx", device="cuda")


def test_a_pt2_of_somebody_else_is_refused(tmp_path):
    program = torch.export.export(torch.nn.Linear(2, 2), (torch.zeros(1, 2),))
    torch.export.save(program, tmp_path / "theirs.pt2")
    with pytest.raises(ValueError, match="`holdfast export` did not write this file"):
        hf.Runner(tmp_path / "theirs.pt2")


def test_a_memory_of_another_core_or_of_nothing_is_refused(source):
    runner, other = hf.Runner(source), hf.Runner(make_policy(core="gru"))
    other.act(observations(2))
    with pytest.raises(ValueError, match="this memory is of another core"):
        runner.load_state_dict(other.state_dict())


def test_a_state_of_another_batch_size_and_a_state_for_a_model_without_memory_are_refused():
    remembers, forgets = make_policy(core="gru"), make_policy(core=None)
    _, state = remembers.predict(observations(3))
    with pytest.raises(ValueError, match=r"with a batch of 2: state\['h'\]: shape \(3, 1, 8\), expected \(2, 1, 8\)"):
        remembers.predict(observations(2), state)
    with pytest.raises(ValueError, match=r"got a state, but this ActorCritic has no memory .*pass state=None"):
        forgets.predict(observations(3), state)
    _, nothing = forgets.predict(observations(3))
    forgets.predict(observations(3), nothing)  # what it returned itself is no state
    runner, obs = hf.Runner(forgets), observations(3)
    np.testing.assert_array_equal(runner.act(obs).value, runner.act(obs).value)


def test_leaves_of_several_dtypes_go_through_every_format(tmp_path):
    """300 steps, more than bfloat16 can count; the policy in bfloat16, and exported from it in float32."""
    policy = make_policy(core=Accumulator(8), encoder_sizes=(8,))
    half = make_policy(core=Accumulator(8), encoder_sizes=(8,)).bfloat16()
    files = [hf.export_policy(policy, tmp_path / f"policy.{suffix}").path for suffix in ("onnx", "pt2")]
    runners = [hf.Runner(source) for source in (policy, half, *files)]
    assert [(p.name, p.dtype) for p in runners[2]._model.signature.states] == [
        ("state_sum", "float32"),
        ("state_age", "int32"),
        ("state_last", "float32"),
    ]
    for t in range(300):
        obs, resets = observations(3, t), np.array([t == 7, False, False])
        steps = [runner.act(obs, resets) for runner in runners]
        for step in steps[2:]:
            np.testing.assert_allclose(step.value, steps[0].value, atol=1e-4)
    for runner in runners:
        saved = runner.state_dict()
        other = hf.Runner(runner._model.policy if hasattr(runner._model, "policy") else runner._model.file)
        other.load_state_dict(saved)
        ages = {name: leaf for name, leaf in other.memory.read().items() if name.endswith("age")}
        assert [leaf.tolist() for leaf in ages.values()] == [[293, 300, 300]]
    assert dtypes(runners[1].memory.read()) == {**DTYPES, "last": torch.bfloat16}
    runners[0].act(observations(1)[0], env_ids=1)
    assert runners[0].num_envs == 3 and runners[0].memory.read()["age"].tolist() == [293, 301, 300]


# --- many users ------------------------------------------------------------------------------------------------------


def test_ids_are_anything_that_can_be_a_key(source):
    runner, numbered, obs = hf.Runner(source), hf.Runner(source), observations(4)
    names = ["alice", ("room", 3), 10**12, frozenset({1})]
    for t in range(4):
        few = [t % 4, (t + 2) % 4]
        step = runner.act(obs[few], env_ids=[names[i] for i in few])
        want = numbered.act(obs[few], env_ids=few)
        np.testing.assert_allclose(step.value, want.value, atol=1e-6)
        one, same = runner.act(obs[1], env_ids=names[1]), numbered.act(obs[1], env_ids=1)
        assert abs(one.value - same.value) < 1e-6
    assert runner.num_envs == 4 and runner.memory.num_rows == 4
    saved, again = runner.state_dict(), hf.Runner(source)
    again.load_state_dict(saved)
    want = numbered.act(obs, env_ids=range(4)).value
    np.testing.assert_allclose(again.act(obs, env_ids=names).value, want, atol=1e-6)
    runner.reset(["alice"])
    runner.forget(("room", 3))
    assert runner.num_envs == 3
    fresh = hf.Runner(source).act(obs).value
    np.testing.assert_allclose(runner.act(obs[:2], env_ids=names[:2]).value, fresh[:2], atol=1e-6)


def test_negative_integers_are_ids_like_any_others(source):
    runner, numbered, obs = hf.Runner(source), hf.Runner(source), observations(3)
    ids = [-1, 0, -(2**70)]
    for t in range(4):
        few = [t % 3, (t + 1) % 3]
        got = runner.act(obs[few], env_ids=[ids[i] for i in few])
        np.testing.assert_allclose(got.value, numbered.act(obs[few], env_ids=few).value, atol=1e-6)
    assert abs(runner.act(obs[0], env_ids=np.int64(-1)).value - numbered.act(obs[0], env_ids=0).value) < 1e-6
    again = hf.Runner(source)
    again.load_state_dict(runner.state_dict())
    want = numbered.act(obs, env_ids=range(3)).value
    np.testing.assert_allclose(runner.act(obs, env_ids=ids).value, want, atol=1e-6)
    np.testing.assert_allclose(again.act(obs, env_ids=ids).value, want, atol=1e-6)
    runner.reset(slice(-5, None))  # -1 and 0
    runner.forget(-(2**70))
    np.testing.assert_allclose(runner.act(obs, env_ids=ids).value, hf.Runner(source).act(obs).value, atol=1e-6)


def test_a_message_about_other_environments_names_an_id_that_the_user_passed(sources):
    runner, obs = hf.Runner(sources["policy"]), observations(2)
    runner.act(obs, env_ids=[0, "alice"])
    with pytest.raises(ValueError, match=r"knows 2 environments \(among them 'alice'\): pass env_ids=, or forget\(\)"):
        runner.act(obs)
    runner.forget("alice")
    runner.act(obs[:1], env_ids=[-3])
    with pytest.raises(ValueError, match=r"knows 2 environments \(among them -3\)"):
        runner.act(obs)


def test_a_saved_memory_whose_names_are_not_of_its_ids_is_refused_whole(sources):
    runner, obs = hf.Runner(sources["policy"]), observations(2)
    runner.act(obs, env_ids=["alice", "bob"])
    saved = runner.state_dict()
    want = runner.act(obs, env_ids=["alice", "bob"]).value
    runner.load_state_dict(saved)
    with pytest.raises(ValueError, match="this memory is damaged: 'names'"):
        runner.load_state_dict({**saved, "names": {0: "alice"}})
    np.testing.assert_array_equal(runner.act(obs, env_ids=["alice", "bob"]).value, want)


def test_a_warning_about_an_environment_points_to_the_callers_line(sources):
    runner, obs = hf.Runner(sources["policy"], on_nonfinite="skip"), np.full((2, 3), np.nan, np.float32)
    with pytest.warns(UserWarning, match="of environment") as said:
        runner.act(obs)
        runner.act(obs[0], env_ids="x")
    assert [each.filename for each in said] == [__file__] * 3


def test_a_tuple_that_is_no_known_id_names_several_environments(sources):
    runner, obs = hf.Runner(sources["policy"]), observations(2)
    first = runner.act(obs, env_ids=("alice", "bob")).value
    runner.act(obs, env_ids=("alice", "bob"))
    runner.reset(("alice", "bob"))
    np.testing.assert_allclose(runner.act(obs, env_ids=("alice", "bob")).value, first, atol=1e-6)
    runner.act(obs[0], env_ids=("room", 3))
    runner.forget(("room", 3))
    assert runner.num_envs == 2
    runner.forget(("alice", "bob"))
    assert runner.num_envs == 0


def test_a_slice_of_everything_is_all_known_environments(sources):
    runner, obs = hf.Runner(sources["policy"]), observations(3)
    ids = [7, "alice", 4]
    first = runner.act(obs, env_ids=ids).value
    second = runner.act(obs, env_ids=ids).value
    runner.reset(slice(5, None))  # 7 alone
    third = runner.act(obs, env_ids=ids).value
    assert abs(third[0] - first[0]) < 1e-6 and np.abs(third[1:] - second[1:]).min() > 1e-6
    runner.reset(slice(None))
    assert runner.num_envs == 3
    order = [2, 0, 1]  # numbers ascending, then names
    np.testing.assert_allclose(runner.act(obs[order], env_ids=slice(None)).value, first[order], atol=1e-6)
    runner.forget(slice(None))
    runner.reset(slice(None))
    runner.reset(slice(3, None))
    assert runner.num_envs == 0


def test_a_restored_runner_forgets_the_same_environment_as_the_original(source):
    obs = observations(1)
    first, second = hf.Runner(source, max_envs=3), hf.Runner(source, max_envs=3)
    for env_id in (2, 0, 1, 2):  # 0 is the one that acted longest ago
        first.act(obs, env_ids=[env_id])
    second.load_state_dict(first.state_dict())
    for runner in (first, second):
        runner.act(obs, env_ids=[5])
        assert runner.memory.env_ids == [1, 2, 5]


@pytest.mark.parametrize("ids", [[3, 0, 1, 2], ["d", "a", "b", "c"]], ids=str)
def test_a_runner_restores_no_more_environments_than_it_may_remember(sources, ids):
    large, small, obs = hf.Runner(sources["policy"]), hf.Runner(sources["policy"], max_envs=2), observations(1)
    for env_id in ids:
        large.act(obs, env_ids=[env_id])
    small.load_state_dict(large.state_dict())
    assert small.num_envs == 2
    want = large.act(obs.repeat(2, 0), env_ids=ids[2:]).value
    np.testing.assert_allclose(small.act(obs.repeat(2, 0), env_ids=ids[2:]).value, want, atol=1e-6)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (["a", "a"], "a more than once"),
        ("ab", "expected one id per environment"),
        ([[1], [2]], "can be keys of a dict"),
        ([True, False], "can be keys"),
        (np.array([True, False]), "a mask is not a list of ids"),
        (["a"], "got 2 observations with 1 env_ids"),
    ],
    ids=str,
)
def test_ids_that_are_none_are_refused_and_change_nothing(sources, ids, words):
    runner = hf.Runner(sources["policy"])
    with pytest.raises((TypeError, ValueError), match=words):
        runner.act(observations(2), env_ids=ids)
    assert runner.num_envs == 0
    for bad in ([1], {}, True):
        with pytest.raises(ValueError, match="got one observation with"):
            runner.act(observations(1)[0], env_ids=bad)


@pytest.mark.parametrize("single", [True, False])
def test_of_too_many_environments_the_least_recently_used_are_forgotten(sources, single):
    runner, reference, obs = hf.Runner(sources["policy"], max_envs=3), hf.Runner(sources["policy"]), observations(1)

    def act(r, name):
        return (r.act(obs[0], env_ids=name).value if single else r.act(obs, env_ids=[name]).value[0]).item()

    for name in ("a", "b", "c", "a", "d"):  # b is the one that acted longest ago
        assert act(runner, name) == act(reference, name)
    assert runner.num_envs == 3
    assert act(runner, "a") == act(reference, "a") and act(runner, "c") == act(reference, "c")
    assert act(runner, "b") == act(hf.Runner(sources["policy"]), "new"), "b starts from a fresh state"
    assert runner.num_envs == 3 and runner.memory.num_rows == 3
    with pytest.raises(ValueError, match=r"got 4 environments at once, more than max_envs=3"):
        runner.act(observations(4), env_ids=list("abcd"))
    with pytest.raises(ValueError, match="max_envs is 0"):
        hf.Runner(sources["policy"], max_envs=0)


@pytest.mark.parametrize("kind", ["policy", "onnx"])
def test_a_thousand_clients_in_threads_get_what_each_would_get_alone(sources, kind):
    clients, steps, workers = 1000, 3, 8
    obs = np.random.default_rng(0).normal(size=(steps, clients, 3)).astype(np.float32)
    resets = np.random.default_rng(1).random((steps, clients)) < 0.2
    alone = hf.Runner(sources[kind])
    want = np.stack([alone.act(o, r).value for o, r in zip(obs, resets)])
    shared, got, failed = hf.Runner(sources[kind]), np.zeros((steps, clients)), []

    def serve(worker):
        try:
            for t in range(steps):
                for client in range(worker, clients, workers):
                    got[t, client] = shared.act(obs[t, client], resets[t, client], env_ids=f"user {client}").value
                if worker == 0:
                    shared.reset(["nobody"])
                    saved = shared.state_dict()
                    assert saved["num_rows"] == len(saved["leaves"][0]) == len(saved["names"])
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=serve, args=(worker,)) for worker in range(workers)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not failed and shared.num_envs == clients
    np.testing.assert_allclose(got, want, atol=1e-5)


# --- NaN and infinity ------------------------------------------------------------------------------------------------

BAD = pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])


@BAD
def test_an_observation_that_is_not_finite_is_refused_and_memory_is_as_it_was(source, bad):
    runner, other, obs = hf.Runner(source), hf.Runner(source), observations(3)
    for r in (runner, other):
        r.act(obs)
    spoiled = obs.copy()
    spoiled[1, 2] = bad
    with pytest.raises(FloatingPointError, match=r"observation of environment 1 holds NaN or infinity.*on_nonfinite"):
        runner.act(spoiled)
    with pytest.raises(FloatingPointError, match="environment 'x'"):
        runner.act(spoiled[1], env_ids="x")
    np.testing.assert_array_equal(runner.act(obs).value, other.act(obs).value)


@BAD
@pytest.mark.parametrize("single", [True, False])
def test_skipping_keeps_the_last_good_state_and_resetting_starts_afresh(source, bad, single):
    obs = observations(2)
    spoiled = obs.copy()
    spoiled[1, 0] = bad

    def act(runner, row, resets=(False, False)):
        if not single:
            return runner.act(row, np.array(resets)).value
        return np.array([runner.act(row[i], resets[i], env_ids=i).value for i in range(2)])

    skip, reset, clean = (hf.Runner(source, on_nonfinite=how) for how in ("skip", "reset", "raise"))
    for runner in (skip, reset, clean):
        act(runner, obs)
    with pytest.warns(UserWarning, match="environment 1 holds NaN or infinity: its memory stays as it was"):
        skipped = act(skip, spoiled)
    with pytest.warns(UserWarning, match="environment 1 holds NaN or infinity: its memory starts afresh"):
        afresh = act(reset, spoiled)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        act(hf.Runner(source), obs)
        zeroed = np.where(np.isfinite(spoiled), spoiled, 0).astype(np.float32)
        np.testing.assert_allclose(skipped, clean_value(source, obs, zeroed), atol=1e-5)
        np.testing.assert_allclose(afresh[1], hf.Runner(source).act(zeroed).value[1], atol=1e-5)
        after = hf.Runner(source)
        after.act(obs)
        want = after.act(obs).value[1]  # as if the bad step had not been
        np.testing.assert_allclose(act(skip, obs)[1], want, atol=1e-5)
        assert np.isfinite(act(skip, spoiled)).all()
        started = act(skip, spoiled, (False, True))  # a first observation that is bad: the episode begins all the same
        assert np.isfinite(started).all()
        np.testing.assert_allclose(act(skip, obs)[1], hf.Runner(source).act(obs).value[1], atol=1e-5)


def clean_value(source, before, now):
    runner = hf.Runner(source)
    runner.act(before)
    return runner.act(now).value


def test_infinity_is_noticed_under_a_normalizer_that_would_clip_it():
    policy = make_policy(normalize_obs=True)
    policy.update_normalizer(torch.randn(50, 3))
    with pytest.raises(FloatingPointError, match="observation of environment 0"):
        hf.Runner(policy).act(np.array([[np.inf, 0, 0]], np.float32))


def test_weights_that_are_not_finite_are_noticed():
    policy = make_policy()
    with torch.no_grad():
        policy.core.weight_ih_l0[0, 0] = np.nan
    with pytest.raises(FloatingPointError, match="new state of environment 0"):
        hf.Runner(policy).act(observations(2))
    gaussian = make_policy(CLIPPED)
    with torch.no_grad():
        gaussian.actor.bias[0] = np.nan
    with pytest.raises(FloatingPointError, match="the policy's action"):
        hf.Runner(gaussian, on_nonfinite="skip").act(observations(2))
    with pytest.raises(ValueError, match="on_nonfinite is 'ignore', expected one of raise, skip, reset"):
        hf.Runner(policy, on_nonfinite="ignore")


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize(
    "space", [spaces.Discrete(4), spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(3)], ids=lambda space: str(space)
)
def test_discrete_actions_that_come_from_nan_are_refused(space, deterministic, bad):
    policy = make_policy(space)
    with torch.no_grad():
        policy.actor.bias[0] = bad
    for how in ("raise", "skip", "reset"):
        with pytest.raises(FloatingPointError, match="the policy's action holds NaN or infinity; look at its weights"):
            hf.Runner(policy, on_nonfinite=how).act(observations(2), deterministic=deterministic)


@pytest.mark.parametrize("kind", ["onnx", "pt2"])
def test_a_file_whose_logits_are_nan_is_refused_when_it_acts(sources, kind, monkeypatch):
    runner = hf.Runner(sources[kind])
    run = runner._model._run
    monkeypatch.setattr(
        runner._model, "_run", lambda feed: {**run(feed), "logits": np.full((2, 4), np.nan, np.float32)}
    )
    with pytest.raises(FloatingPointError, match="the policy's action holds NaN"):
        runner.act(observations(2))


def test_a_mask_may_forbid_actions_without_being_taken_for_a_bad_policy():
    mask = np.array([[True, False, False, False]])
    assert hf.Runner(make_policy()).act(observations(1), action_mask=mask).action == [0]


@pytest.mark.parametrize("core", ["lstm", "gru", "lru", "window", None], ids=str)
@pytest.mark.parametrize("single", [True, False])
def test_resetting_works_without_flags_of_the_caller(core, single):
    policy, obs = make_policy(core=core), observations(1)
    spoiled = obs.copy()
    spoiled[0, 1] = np.nan

    def act(runner, row):
        return runner.act(row[0], env_ids=0).value.item() if single else runner.act(row).value.item()

    runner = hf.Runner(policy, on_nonfinite="reset")
    act(runner, obs)
    with pytest.warns(UserWarning, match="its memory starts afresh"):
        afresh = act(runner, spoiled)
    assert abs(afresh - act(hf.Runner(policy), np.nan_to_num(spoiled))) < 1e-5


# --- previous action and reward --------------------------------------------------------------------------------------


INPUTS = {"obs": BOX, "prev_action": spaces.Discrete(3, start=1), "prev_reward": spaces.Box(-np.inf, np.inf, ())}


def policy_that_sees(names):
    return make_policy(INPUTS["prev_action"], spaces.Dict({name: INPUTS[name] for name in names}))


@pytest.fixture(scope="module")
def fed(tmp_path_factory):
    """Policies that see what they did and what that paid, by what they see; one of them exported."""
    policies = {
        names: policy_that_sees(names) for names in (tuple(INPUTS), ("obs", "prev_action"), ("obs", "prev_reward"))
    }
    return policies, hf.export_policy(policies[tuple(INPUTS)], tmp_path_factory.mktemp("fed") / "policy.pt2").path


@pytest.mark.parametrize("names", [tuple(INPUTS), ("obs", "prev_action"), ("obs", "prev_reward"), "exported"], ids=str)
@pytest.mark.parametrize("single", [True, False])
def test_a_runner_feeds_back_the_previous_action_and_reward(fed, names, single):
    policies, file = fed
    source = file if names == "exported" else policies[names]
    names = tuple(INPUTS) if names == "exported" else names
    runner, policy = hf.Runner(source), policies[names]
    memory, random = hf.Memory(policy.core), np.random.default_rng(0)
    action, rewards, resets = np.ones(2, np.int64), np.zeros(2, np.float32), np.ones(2, bool)
    for t in range(12):
        obs = observations(2, t)
        # What training gives: zero at a fresh start, for the action its space's first.
        parts = {"obs": obs, "prev_action": np.where(resets, 1, action), "prev_reward": np.where(resets, 0, rewards)}
        seen = {name: np.asarray(parts[name], INPUTS[name].dtype) for name in names}
        want = policy.act(seen, resets, memory=memory, deterministic=True)
        if single:
            step = [runner.act(obs[i], resets[i], env_ids=i, rewards=rewards[i]) for i in range(2)]
            got, value = np.array([s.action for s in step]), np.array([s.value for s in step])
        else:
            (got, value, _) = runner.act(obs, resets, rewards=rewards)
        np.testing.assert_array_equal(got, want.action)
        np.testing.assert_allclose(value, want.value, atol=1e-5)
        action, rewards, resets = got, random.normal(size=2).astype(np.float32), random.random(2) < 0.3
    given = hf.Runner(source)  # a caller who passes all parts is believed
    np.testing.assert_allclose(
        given.act(seen, np.ones(2, bool)).value, policy.act(seen, memory=hf.Memory(policy.core)).value, atol=1e-5
    )


@pytest.mark.parametrize("exported", [False, True])
def test_a_memory_that_crosses_episodes_takes_what_is_fed_back_with_it(exported, tmp_path):
    policy = make_policy(INPUTS["prev_action"], spaces.Dict(INPUTS), reset="never")
    runner = hf.Runner(hf.export_policy(policy, tmp_path / "policy.pt2").path if exported else policy)
    memory, random = hf.Memory(policy.core), np.random.default_rng(0)
    action, rewards, resets = np.ones(2, np.int64), None, np.ones(2, bool)
    for t in range(8):
        paid = np.zeros(2, np.float32) if rewards is None else rewards
        seen = {"obs": observations(2, t), "prev_action": action, "prev_reward": paid}
        want = policy.act(seen, resets, memory=memory, deterministic=True)
        got = runner.act(seen["obs"], resets, rewards=rewards)
        np.testing.assert_array_equal(got.action, want.action)
        np.testing.assert_allclose(got.value, want.value, atol=1e-5)
        action, rewards, resets = got.action, random.normal(size=2).astype(np.float32), random.random(2) < 0.5
    runner.reset()  # a new trial
    assert runner.memory.read()["prev_action"].tolist() == [1, 1]


@pytest.mark.parametrize("exported", [False, True])
@pytest.mark.parametrize("how", ["skip", "reset"])
@pytest.mark.parametrize("single", [True, False])
@pytest.mark.filterwarnings("ignore:the observation of environment")
def test_the_action_of_a_step_with_a_bad_observation_is_remembered(fed, exported, how, single):
    """Each previous action is kept, whatever the observation was: the environment was given it."""
    source = fed[1] if exported else fed[0][tuple(INPUTS)]
    runner, one = hf.Runner(source, on_nonfinite=how), np.ones(1, np.float32)
    seen = set()
    for t in range(8):
        obs = observations(1, t)
        if t % 2:
            obs[0, 1] = np.nan
        if single:
            chosen = runner.act(obs[0], t == 0, rewards=one[0]).action
        else:
            chosen = runner.act(obs, np.array([t == 0]), rewards=one).action[0]
        runner.num_envs  # noqa: B018 - writes the state of an environment that acts alone
        assert runner.memory.read()["prev_action"].tolist() == [chosen]
        seen.add(int(chosen))
    assert len(seen) > 1


def test_a_missing_reward_is_asked_for_where_the_policy_sees_it(fed):
    policies, obs = fed[0], observations(2)
    runner = hf.Runner(policies["obs", "prev_reward"])
    runner.act(obs, np.ones(2, bool))
    with pytest.raises(ValueError, match=r"sees its previous reward: pass rewards="):
        runner.act(obs)
    with pytest.raises(ValueError, match=r"rewards have shape \(3,\), expected \(2,\)"):
        runner.act(obs, rewards=np.zeros(3))
    unpaid = hf.Runner(policies["obs", "prev_action"])
    unpaid.act(obs)
    unpaid.act(obs)


def test_images_that_were_scaled_by_hand_are_refused():
    policy = hf.ActorCritic(spaces.Box(0, 255, (8, 8, 3), np.uint8), spaces.Discrete(2), "gru", 8)
    pixels = np.full((8, 8, 3), 200, np.uint8)
    hf.Runner(policy).act(pixels, True)
    with pytest.raises(
        TypeError, match=r"obs has dtype torch.float32, expected uint8 as in training, pixels from 0 to 255"
    ):
        hf.Runner(policy).act(pixels / np.float32(255), True)
