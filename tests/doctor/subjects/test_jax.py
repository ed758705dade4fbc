"""JAX policies: plain functions, Flax and Equinox modules; values and gradients as JAX computes them."""

import time

import numpy as np
import pytest
import torch

from holdfast import doctor
from holdfast.doctor import subjects

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

from broken.base import HIDDEN  # noqa: E402
from doctor.subjects.jax_policies import Pair, clear, initial_state, params  # noqa: E402


def subject(kind=Pair, seed=0, **options):
    pair = kind()
    legs = {
        "unroll": pair.unroll,
        "step": pair.step,
        "initial_state": initial_state,
        "observation_space": (4,),
        **options,
    }
    return subjects.JAX(params(seed), **legs)


def errors(report):
    return [f.cause for f in report.findings if f.severity == "error"]


def test_a_healthy_pair_has_no_finding_and_takes_under_two_seconds_once_compiled():
    healthy = subject(seed=1)
    doctor.examine(healthy, seed=1)
    started = time.process_time()
    report = doctor.examine(healthy, seed=2)
    assert time.process_time() - started < 2.0
    assert report.findings == (), report.to_text()
    passed = {o.check for o in report.outcomes if o.status == "passed"}
    assert passed >= {"replay", "chunking", "gradient-flow", "gradient-isolation", "bounded-graph", "nan", "batch-size"}


@pytest.mark.parametrize("missing", ["step", "unroll"])
def test_one_of_the_two_functions_suffices(missing):
    assert doctor.examine(subject(seed=3, **{missing: None})).findings == ()


def test_without_any_function_it_says_what_to_pass():
    with pytest.raises(TypeError, match="needs unroll=, step= or both"):
        subject(unroll=None, step=None)


class DropsResetsInTraining(Pair):
    def training(self, state, done):
        return state


class KeepsCell(Pair):
    def acting(self, state, done):
        return clear(state[0], done), state[1]

    training = acting


class StopsGradients(Pair):
    def training(self, state, done):
        return jax.lax.stop_gradient(clear(state, done))


class LeaksGradients(Pair):
    def training(self, state, done):
        return jax.tree.map(lambda x: jnp.where(done[:, None], x - jax.lax.stop_gradient(x), x), state)


class MultipliesByZero(Pair):
    def acting(self, state, done):
        return jax.tree.map(lambda x: x * (1 - done[:, None]), state)


class Severed(Pair):
    def unroll(self, params, state, obs, dones):
        return jax.lax.stop_gradient(super().unroll(params, state, obs, dones))


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        (DropsResetsInTraining, "reset-dropped-in-training"),
        (KeepsCell, "partial-reset"),
        (StopsGradients, "over-detached"),
        (LeaksGradients, "gradient-crosses-reset"),
        (Severed, "gradients-severed"),
    ],
)
def test_a_mistake_is_named(kind, cause):
    report = doctor.examine(subject(kind, seed=4))
    assert errors(report)[0] == cause, report.to_text()


def test_a_fix_is_shown_in_the_words_of_jax():
    (found,) = doctor.examine(subject(MultipliesByZero)).findings
    assert found.cause == "nan-survives" and "jnp.where" in found.patch


def test_truncations_that_the_project_does_not_pass_on_are_found():
    report = doctor.examine(subject(done=lambda terminated, truncated: terminated))
    assert errors(report) == ["truncation-ignored"]


@jax.default_matmul_precision("highest")  # as examinations run; a GPU rounds to TF32 without it
def test_gradients_of_parameters_state_and_observations_are_those_of_jax():
    rng, pair, weights = np.random.default_rng(5), Pair(), params(5)
    obs = rng.normal(size=(3, 2, 4)).astype("float32")
    start = [rng.normal(size=(2, HIDDEN)).astype("float32") for _ in range(2)]
    dones = jnp.array([[False, False], [False, True], [False, False]])

    def score(weights, start, obs):
        _, outputs = pair.unroll(weights, tuple(start), obs, dones)
        return (outputs**2).sum()

    expected = jax.grad(score, argnums=(0, 1, 2))(weights, [jnp.array(x) for x in start], jnp.array(obs))
    mine = subject(seed=5)
    mine.begin(2)
    leaves = [torch.tensor(x, requires_grad=True) for x in (*start, obs)]
    flags = torch.from_numpy(np.array(dones))
    segment = doctor.RecordedSegment(
        leaves[2], None, flags, torch.zeros_like(flags), (tuple(leaves[:2]),), begins=False
    )
    (mine.replay(segment).output ** 2).sum().backward()
    found = [p.grad for p in mine.parameters] + [x.grad for x in leaves]
    for theirs, ours in zip(jax.tree.leaves(expected), found):
        np.testing.assert_allclose(ours.numpy(), np.asarray(theirs), rtol=1e-5, atol=1e-6)


def test_the_order_of_a_result_is_asked_for_when_shapes_do_not_tell():
    def unroll(params, state, obs, dones):
        return state, state

    with pytest.raises(doctor.CannotExamine, match="pass returns="):
        doctor.examine(subjects.JAX({}, unroll, initial_state=lambda n: jnp.zeros((n, 4)), observation_space=(4,)))


def test_observations_in_a_dict_and_half_precision():
    from gymnasium import spaces

    pair = Pair()

    def unroll(params, state, obs, dones):
        return pair.unroll(params, state, jnp.concatenate([obs["b"], obs["a"]], -1).astype(jnp.bfloat16), dones)

    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params(6))
    space = spaces.Dict({"b": spaces.Box(-1, 1, (3,)), "a": spaces.Box(-1, 1, (1,))})
    state = lambda n: jax.tree.map(lambda x: x.astype(jnp.bfloat16), initial_state(n))  # noqa: E731
    report = doctor.examine(subjects.JAX(half, unroll, initial_state=state, observation_space=space))
    assert report.ok, report.to_text()


# --- modules ---------------------------------------------------------------------------------------------
def test_flax_linen_in_the_form_of_purejaxrl():
    nn = pytest.importorskip("flax.linen")

    class Core(nn.Module):
        @nn.compact
        def __call__(self, h, x):
            x, done = x
            return nn.GRUCell(HIDDEN)(clear(h, done), x)

    class Policy(nn.Module):
        @nn.compact
        def __call__(self, h, x):
            obs, dones = x
            scan = nn.scan(Core, variable_broadcast="params", split_rngs={"params": False})
            h, y = scan()(h, (nn.Dense(HIDDEN)(obs), dones))
            return h, nn.Dense(3)(y), nn.Dense(1)(y)[..., 0]

    start = lambda n: jnp.zeros((n, HIDDEN))  # noqa: E731
    variables = Policy().init(jax.random.key(1), start(2), (jnp.zeros((1, 2, 4)), jnp.zeros((1, 2), bool)))
    linen = subjects.JAX.linen(Policy(), variables, initial_state=start, observation_space=(4,))
    report = doctor.examine(linen)
    assert report.findings == () and report.subject == "Policy", report.to_text()


def _nnx_policy(resets):
    nnx = pytest.importorskip("flax.nnx")

    class Policy(nnx.Module):
        def __init__(self, rngs):
            self.cell = nnx.GRUCell(4, HIDDEN, rngs=rngs)
            self.head = nnx.Linear(HIDDEN, 3, rngs=rngs)

        def __call__(self, h, obs, done):
            h, y = self.cell(clear(h, done) if resets else h, obs)
            return h, self.head(y)

    def step(policy, state, obs, done):
        return policy(state, obs, done)

    start = lambda n: jnp.zeros((n, HIDDEN))  # noqa: E731
    return subjects.JAX.nnx(Policy(nnx.Rngs(2)), step=step, initial_state=start, observation_space=(4,))


@pytest.mark.parametrize(("resets", "expected"), [(True, []), (False, ["never-resets"])])
def test_a_flax_nnx_module(resets, expected):
    report = doctor.examine(_nnx_policy(resets))
    assert errors(report) == expected, report.to_text()


@pytest.mark.parametrize(("resets", "expected"), [(True, []), (False, ["never-resets"])])
def test_an_equinox_module_that_works_on_one_environment(resets, expected):
    eqx = pytest.importorskip("equinox")

    class Policy(eqx.Module):
        cell: eqx.nn.LSTMCell
        head: eqx.nn.Linear

        def __call__(self, state, obs, done):
            state = jax.tree.map(lambda x: jnp.where(done & resets, 0.0, x), state)
            state = self.cell(obs, state)
            return self.head(state[0]), state

    keys = jax.random.split(jax.random.key(3), 2)
    policy = Policy(eqx.nn.LSTMCell(4, HIDDEN, key=keys[0]), eqx.nn.Linear(HIDDEN, 3, key=keys[1]))

    def step(policy, state, obs, done):
        return jax.vmap(policy)(state, obs, done)

    mine = subjects.JAX.equinox(policy, step=step, initial_state=initial_state, observation_space=(4,))
    assert errors(doctor.examine(mine)) == expected
