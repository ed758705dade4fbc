"""`JaxVectorEnv`: episodes worked out by hand, restarts only where an episode ended, seeds, saving, and memory shared with torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch

import holdfast as hf
from holdfast.envs import from_jax, make

jax = pytest.importorskip("jax")
jnp = jax.numpy
from holdfast.envs.jax import tensors  # noqa: E402

made = {"worlds": 0}


class Corridor:
    """Cells 0 to `length`; action 1 goes on, 0 stays. The end at `length` is a termination, step `limit` a truncation.

    Observation: the cell, and a random number that is drawn once per episode. It is a leaf of the state itself.
    """

    def __init__(self, length: int = 3, limit: int = 5, count: bool = False) -> None:
        self.length, self.limit, self.count = length, limit, count

    def reset(self, key):
        if self.count:
            jax.debug.callback(lambda _: made.update(worlds=made["worlds"] + 1), key)
        obs = jnp.array([0.0, 0.0]).at[1].set(jax.random.uniform(key))
        return obs, {"obs": obs, "t": jnp.zeros((), jnp.uint32), "key": jax.random.key(1), "half": jnp.bfloat16(0)}

    def step(self, key, state, action):
        obs, t = state["obs"].at[0].add(action), state["t"] + 1
        ended = obs[0] == self.length
        new = {**state, "obs": obs, "t": t, "key": jax.random.split(state["key"])[0], "half": state["half"] + 0.5}
        return obs, new, obs[0], ended, (t == self.limit) & ~ended

    def observation_space(self):
        return gym.spaces.Box(0.0, 10.0, (2,))

    def action_space(self):
        return gym.spaces.Discrete(2)


class Masked(Corridor):
    """An observation with levels, and a mask: at cell 1 nobody may stay."""

    def reset(self, key):
        obs, state = super().reset(key)
        return {"where": {"cell": obs[0].astype(int)}, "draw": (obs[1:],)}, state

    def step(self, key, state, action):
        obs, *rest = super().step(key, state, action)
        return {"where": {"cell": obs[0].astype(int)}, "draw": (obs[1:],)}, *rest

    def observation_space(self):
        cell = gym.spaces.Dict({"cell": gym.spaces.Discrete(4)})
        return gym.spaces.Dict({"where": cell, "draw": gym.spaces.Tuple([gym.spaces.Box(0.0, 1.0, (1,))])})

    def action_mask(self, state):
        return jnp.array([state["obs"][0] != 1, True])


def play(env, steps: int, seed: int = 0):
    """Everything that `steps` random steps return."""
    actions = torch.randint(2, (steps, env.num_envs), generator=torch.Generator().manual_seed(seed))
    return [env.step(row) for row in actions]


def assert_equal(a, b):
    for (obs, reward, ended, cut, info), other in zip(a, b):
        pairs = zip((obs, reward, ended, cut, info["final_obs"]), (*other[:4], other[4]["final_obs"]))
        assert all(torch.equal(x, y) for x, y in pairs)


def test_episodes_end_and_start_as_worked_out_by_hand():
    env = from_jax(Corridor(length=3, limit=5), 2)
    first, _ = env.reset(seed=3)
    results = [env.step(torch.tensor([1, 0])) for _ in range(6)]
    cells = [obs[:, 0].tolist() for obs, *_ in results]
    assert cells == [[1, 0], [2, 0], [0, 0], [1, 0], [2, 0], [0, 0]]  # row 0 ends in every third step
    assert [r.tolist() for _, r, *_ in results] == [[1, 0], [2, 0], [3, 0], [1, 0], [2, 0], [3, 0]]
    assert [e[0].item() for _, _, e, _, _ in results] == [False, False, True] * 2
    assert [t[1].item() for _, _, _, t, _ in results] == [False] * 4 + [True, False]
    assert results[2][4]["final_obs"][:, 0].tolist() == [3, 0]
    assert results[2][4]["_final_obs"].tolist() == [True, False]
    draws = torch.stack([first[:, 1], *(obs[:, 1] for obs, *_ in results)])
    assert [len(draws[:, row].unique()) for row in range(2)] == [3, 2], "a new draw for a new episode only"
    assert results[4][4]["final_obs"][1, 1] == draws[0, 1] != draws[5, 1]


def test_a_world_is_made_for_rows_whose_episode_ended_and_for_no_other():
    env = from_jax(Corridor(limit=4, count=True), 16, resets_at_once=1)
    env.reset(seed=0)
    jax.effects_barrier()
    made["worlds"] = 0
    ended = sum(int((e | t).sum()) for _, _, e, t, _ in play(env, 20))
    jax.effects_barrier()
    assert made["worlds"] == ended > 20


class Spectrum(Corridor):
    """A world that takes an operation to make which no step needs."""

    def reset(self, key):
        obs, state = super().reset(key)
        return obs.at[1].set(jnp.abs(jnp.fft.fft(obs.repeat(4)))[0]), state


def test_what_makes_worlds_is_compiled_once_and_not_inside_the_step_too():
    env = from_jax(Spectrum(), 4)
    env.reset(seed=0)
    programs = env._programs._asdict()
    assert [name for name, program in programs.items() if "fft" in program.as_text()] == ["make_worlds"]
    play(env, 10)
    env.load_state_dict(env.state_dict())
    env.reset()
    assert all(program is programs[name] for name, program in env._programs._asdict().items())


class Deaf(Corridor):
    """Its step does not look at the action."""

    def step(self, key, state, action):
        return super().step(key, state, 1)


def test_a_step_takes_actions_that_its_world_ignores_since_through_them_it_waits_for_torch():
    env = from_jax(Deaf(), 7)
    env.reset(seed=0)
    taken = env._programs.step.as_text().partition("entry_computation_layout={(")[2].partition(")->")[0]
    assert taken.count("s32[7]") == 1


def test_how_many_worlds_are_made_at_once_changes_nothing():
    runs = []
    for at_once in (1, 3, 10):
        env = from_jax(Corridor(), 10, resets_at_once=at_once)
        env.reset(seed=11)
        runs.append(play(env, 25))
    for run in runs[1:]:
        assert_equal(runs[0], run)


def test_no_two_episodes_have_the_same_world():
    env = from_jax(Corridor(limit=2), 50)
    draws = [env.reset(seed=5)[0][:, 1]]
    for obs, _, ended, cut, _ in play(env, 12):
        draws.append(obs[:, 1][ended | cut])
    assert len(torch.cat(draws).unique()) == len(torch.cat(draws)) > 300


def test_a_seed_repeats_everything_and_another_seed_does_not():
    env = from_jax(Corridor(), 6)
    first = env.reset(seed=1)[0].clone(), play(env, 10)
    again = env.reset(seed=1)[0].clone(), play(env, 10)
    assert torch.equal(first[0], again[0])
    assert_equal(first[1], again[1])
    assert not torch.equal(env.reset(seed=2)[0], first[0])


def test_a_saved_environment_goes_on_exactly_in_another_one():
    env = from_jax(Corridor(), 5)
    env.reset(seed=4)
    play(env, 7)
    saved = env.state_dict()
    kept = {name: leaf.clone() for name, leaf in saved["state"].items()}
    rest = play(env, 12, seed=1)
    assert all(torch.equal(saved["state"][name], leaf) for name, leaf in kept.items()), "the copy does not change"
    assert all(type(leaf) is torch.Tensor for leaf in saved["state"].values())
    other = from_jax(Corridor(), 5)
    other.load_state_dict(saved)
    assert_equal(rest, play(other, 12, seed=1))
    assert all(torch.equal(saved["state"][name], leaf) for name, leaf in kept.items()), "loading takes a copy"
    with pytest.raises(ValueError, match="num_envs = 5"):
        from_jax(Corridor(), 6).load_state_dict(saved)
    with pytest.raises(ValueError, match="saved 'obs'"):
        other.load_state_dict({**saved, "state": {**saved["state"], "obs": torch.zeros(5, 3)}})


def test_rows_that_move_to_other_ranks_go_on_and_each_rank_makes_worlds_of_its_own():
    whole = from_jax(Corridor(), 6)
    whole.reset(seed=4)
    play(whole, 7)
    saved, halves = whole.state_dict(), [from_jax(Corridor(), 3) for _ in range(2)]
    for part, half in enumerate(halves):
        half.load_state_dict(half.regroup([saved], 3 * part, part, seed=50 + part))
        rows = half.state_dict()["state"]
        assert all(torch.equal(rows[name], leaf[3 * part :][:3]) for name, leaf in saved["state"].items())
    draws = [obs[ended | cut, 1] for env in (whole, *halves) for obs, _, ended, cut, _ in play(env, 12)]
    assert len(torch.cat(draws).unique()) == len(torch.cat(draws)) > 12


def test_what_was_handed_out_never_changes():
    env = from_jax(Corridor(), 64)
    seen = [env.reset(seed=0)[0]]
    copies = [seen[0].clone()]
    for obs, _, _, _, info in play(env, 30):
        seen += [obs, info["final_obs"]]
        copies += [obs.clone(), info["final_obs"].clone()]
    assert all(torch.equal(a, b) for a, b in zip(seen, copies))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.float32])
def test_arrays_cross_without_a_copy(dtype):
    tensor = torch.ones(64, 3).to(dtype)
    array = tensors.to_jax(tensor)
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    assert tensors.to_torch(array).data_ptr() == tensor.data_ptr() and tensors.to_torch(array).dtype == dtype
    turned = torch.arange(6, dtype=torch.int32).reshape(2, 3).t()
    assert np.array_equal(np.asarray(tensors.to_jax(turned)), turned.numpy())


def test_observations_with_levels_become_a_dict_and_masks_reach_the_policy():
    env = from_jax(Masked(), 4)
    assert set(env.single_observation_space) == {"where.cell", "draw.0"}
    obs, _ = env.reset(seed=0)
    assert obs["where.cell"].tolist() == [0, 0, 0, 0] and obs["draw.0"].shape == (4, 1)
    env.step(torch.tensor([1, 0, 1, 0]))
    assert env.action_masks().tolist() == [[False, True], [True, True]] * 2
    policy = hf.ActorCritic(env.single_observation_space, env.single_action_space, core="gru", hidden_size=8)
    segment = next(hf.collect(env, policy, steps=20, seed=1))
    at_one = segment.obs["where.cell"] == 1
    assert at_one.any() and (segment.actions[at_one] == 1).all()


def test_a_segment_replays_and_truncations_bootstrap():
    env = from_jax(Corridor(), 8)
    policy = hf.ActorCritic(env.single_observation_space, env.single_action_space, core="lstm", hidden_size=16)
    collector = hf.collect(env, policy, steps=30, seed=2)
    for _ in range(2):
        segment = next(collector)
        assert segment.truncated.any() and segment.terminated.any()
        again = policy.evaluate(segment.obs, segment.actions, segment.start_state, segment.resets)
        assert (again.log_prob - segment.log_prob).abs().max() < 1e-5


# --- mistakes -------------------------------------------------------------------------------------------------------------


class Wrong(Corridor):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def step(self, key, state, action):
        obs, state, reward, ended, cut = super().step(key, state, action)
        if self.what == "tuple":
            return obs, state, reward, ended
        if self.what == "state":
            return obs, {**state, "obs": jnp.zeros(3)}, reward, ended, cut
        if self.what == "dtype":
            return obs, {**state, "t": state["t"] + 0.5}, reward, ended, cut
        if self.what == "tree":
            return obs, reward, ended, cut, {}
        return (obs[:1] if self.what == "obs" else obs), state, obs if self.what == "reward" else reward, ended, cut

    def observation_space(self):
        return gym.spaces.Box(0, 10, (2,), np.uint8) if self.what == "bytes" else super().observation_space()


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("tuple", "Wrong.step returned 4 values, expected observation, state, reward, terminated, truncated"),
        ("state", "another state than reset: obs"),
        ("tree", "another state than reset: the tree"),
        ("dtype", "the state's t as float32, but reset as uint32, which cannot hold it"),
        ("bytes", "the observation as float32, but its observation space is Box"),
        ("obs", r"observation of shape \(1,\), but its observation space has shape \(2,\)"),
        ("reward", r"reward of shape \(2,\), expected one number"),
    ],
)
def test_a_wrong_result_is_named_before_anything_is_compiled(what, said):
    with pytest.raises(ValueError, match=said):
        from_jax(Wrong(what), 2)


@pytest.mark.parametrize("at_once", [0, -3, 1.5, "abc"])
def test_a_wrong_number_of_worlds_at_once_is_refused(at_once):
    with pytest.raises(ValueError, match=r"resets_at_once is .*; expected an integer of at least 1"):
        from_jax(Corridor(), 2, resets_at_once=at_once)


def test_a_device_without_jax_is_refused_in_one_line():
    with pytest.raises(ValueError, match="--device cpu"):
        from_jax(Corridor(), 2, device="meta")


@pytest.mark.parametrize(("gigabytes", "warned"), [(1, 0), (60, 1)])
def test_memory_that_jax_took_before_is_said(gigabytes, warned, monkeypatch, recwarn):
    monkeypatch.setenv(tensors.PREALLOCATE, "false")
    stats = {"pool_bytes": gigabytes * 2**30, "bytes_limit": 80 * 2**30}
    gpu = SimpleNamespace(memory_stats=lambda: stats)
    tensors.require_device(SimpleNamespace(devices=lambda kind: [gpu]), torch.device("cuda"))
    assert len(recwarn) == warned
    if warned:
        assert "keeps 60 GiB" in str(recwarn[0].message)


def test_jax_does_not_take_the_gpus_memory_unless_the_user_says_so():
    program = "import os, holdfast.envs.jax.tensors as t; t.import_jax(); print(os.environ[t.PREALLOCATE])"
    for given, expected in ((None, "false"), ("true", "true")):
        env = {key: value for key, value in os.environ.items() if key != tensors.PREALLOCATE}
        if given:
            env[tensors.PREALLOCATE] = given
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env)
        assert done.stdout.strip() == expected, done.stderr


# --- training -------------------------------------------------------------------------------------------------------------

MODULE = """
import gymnasium as gym, jax, jax.numpy as jnp

class Recall:
    \"\"\"A sign (-1 or 1), `delay` steps without it, then one choice.\"\"\"
    def __init__(self, delay: int = 2):
        self.delay = delay
    def reset(self, key):
        sign = jax.random.choice(key, jnp.array([-1.0, 1.0]))
        return jnp.array([sign, 0.0]), (sign, jnp.zeros((), jnp.int32))
    def step(self, key, state, action):
        sign, t = state
        over = t == self.delay
        reward = jnp.where(over, jnp.where((action == 1) == (sign > 0), 1.0, -1.0), 0.0)
        return jnp.array([0.0, 1.0]), (sign, t + 1), reward, over, False
    def observation_space(self):
        return gym.spaces.Box(-1.0, 1.0, (2,))
    def action_space(self):
        return gym.spaces.Discrete(2)

recall = Recall()
"""
SETTINGS = dict(core="gru", hidden_size=16, num_envs=16, num_steps=16, epochs=2, minibatches=2, gamma=0.9,
                learning_rate=0.01, device="cpu", quiet=True, tensorboard=False, final_eval_episodes=64)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch, request):
    (tmp_path / f"{request.node.name}_worlds.py".replace("[", "_").replace("]", "")).write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return tmp_path


def name_of(folder: Path) -> str:
    return next(folder.glob("*_worlds.py")).stem


def test_a_killed_run_resumes_to_the_same_weights_as_one_that_never_stopped(folder: Path):
    settings = {**SETTINGS, "env": f"{name_of(folder)}:Recall", "total_steps": 256 * 12, "checkpoint_every": 3}
    program = f"""
import os, signal, holdfast as hf
class Kill(hf.Callback):
    def on_update_end(self, trainer, row):
        if trainer.update == 8:
            os.kill(os.getpid(), signal.SIGKILL)
hf.Trainer(hf.TrainConfig(**{ {**settings, "run_dir": "killed"}!r}), callbacks=[Kill()]).run()
"""
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert child.returncode == -signal.SIGKILL, child.stderr
    resumed = hf.Trainer.resume(folder / "killed", allow_imports=True)
    assert resumed.update == 6
    reached = resumed.run().mean_return
    whole = hf.Trainer(hf.TrainConfig(**settings, run_dir=str(folder / "whole")))
    assert reached == whole.run().mean_return
    assert all(torch.equal(a, b) for a, b in zip(resumed.policy.parameters(), whole.policy.parameters()))


@pytest.mark.parametrize("form", ["object", "class", "name of a class", "name of an object"])
def test_the_trainer_takes_every_form_of_an_environment_in_jax(folder: Path, form: str):
    module = __import__(name_of(folder))
    env = {"object": module.Recall(), "class": module.Recall}.get(form)
    name = f"{module.__name__}:{'recall' if form == 'name of an object' else 'Recall'}"
    config = hf.TrainConfig(
        **{**SETTINGS, "total_steps": 512}, run_dir=str(folder / "run"), **({} if env else {"env": name})
    )
    trainer = hf.Trainer(config, env=env)
    assert type(trainer.env).__name__ == "JaxVectorEnv" and trainer.run().steps == 512


def test_arguments_reach_the_class(folder: Path):
    env = make(f"{name_of(folder)}:Recall", 2, seed=0, env_kwargs={"delay": 4})
    ends = [env.step(torch.tensor([0, 0]))[2].tolist() for _ in range(5)]
    assert ends == [[False, False]] * 4 + [[True, True]]
