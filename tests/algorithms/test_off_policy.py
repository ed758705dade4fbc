"""What SAC and R2D2 share: every core, reset mode, space and environment that PPO takes; what they cannot do is said before a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import holdfast as hf
from holdfast.algorithms.off_policy import mean_over, target_copy
from holdfast.cli.commands import main
from holdfast.cli.sweep import SweepFlags, _start
from holdfast.runs.log import read_progress
from holdfast.state import tree_map
from holdfast.training.replay_check import ReplayError

BOX, CHOICES = spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(3, start=4)
SMALL: dict[str, Any] = dict(
    hidden_size=8, head_sizes=(8,), num_envs=2, num_steps=8, total_steps=64, batch_size=4, train_length=8, burn_in=0,
    warmup_steps=0, update_ratio=0.25, buffer_size=4000, device="cpu", threads=1, tensorboard=False, quiet=True,
    final_eval_episodes=2, replay_check_every=1,
)  # fmt: skip
CONFIGS = {"sac": hf.SACConfig, "r2d2": hf.R2D2Config}


class Drawn(gymnasium.Env[Any, Any]):
    """Shows and takes anything; an episode is truncated after 5 steps."""

    def __init__(self, action_space: Any, observation_space: Any = None) -> None:
        self.action_space = action_space
        self.observation_space = observation_space or spaces.Box(-1, 1, (3,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.t = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        self.t += 1
        return self.observation_space.sample(), float(np.sum(action)), False, self.t == 5, {}


def config(folder: Path, algorithm: str, **settings: Any) -> Any:
    return CONFIGS[algorithm](**{**SMALL, "run_dir": str(folder / "run"), **settings})


def trained(folder: Path, algorithm: str, env: Any, **settings: Any) -> hf.Trainer:
    """A short run, which learned and in which every replay agreed."""
    trainer = hf.Trainer(config(folder, algorithm, **settings), env=env)
    trainer.run()
    rows = read_progress(folder / "run")
    gaps = [float(row["memory/replay_gap"]) for row in rows]
    checked = [gap for gap in gaps if gap == gap]  # not where an environment gave NaN
    assert checked and max(checked) < 1e-5
    assert float(rows[-1]["train/gradient_steps"]) > 0 and not any(float(row["train/skipped_steps"]) for row in rows)
    return trainer


EACH = pytest.mark.parametrize(("algorithm", "actions"), [("sac", BOX), ("sac", CHOICES), ("r2d2", CHOICES)])


# --- memories ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("core", ["window", "mlstm", "ffm", "none"])
@pytest.mark.parametrize(("algorithm", "actions"), [("sac", BOX), ("r2d2", CHOICES)])
def test_every_family_of_memory_learns_from_the_buffer(tmp_path: Path, algorithm: str, actions: Any, core: str):
    trained(tmp_path, algorithm, lambda: Drawn(actions), core=core, memory_span=4 if core == "window" else None)


def test_a_window_is_not_stored_and_gets_the_burn_in_that_fills_it(tmp_path: Path):
    trainer = trained(tmp_path, "sac", lambda: Drawn(BOX), core="window", memory_span=4, num_layers=2)
    assert trainer.config.burn_in == 2 * 3 == trainer.algorithm.buffer.context
    assert trainer.algorithm.buffer.starts.state_bytes() == 0
    assert "burn_in of 6" in trainer.parts.chosen
    batch = trainer.algorithm.buffer.sample(3, 8, 6)
    policy, buffered = trainer.policy, batch.start_state
    rows, state = trainer.algorithm.after_burn_in(batch, policy, buffered)
    noisy = tree_map(lambda x: torch.full_like(x, 3) if x.is_floating_point() else x + 3, buffered)
    _, other = trainer.algorithm.after_burn_in(batch, policy, noisy)
    first, second = (policy.features(rows.obs, s, rows.resets)[0] for s in (state, other))
    assert torch.allclose(first, second, atol=1e-5), "whatever it began with, the window is full of what was played"


def test_a_window_of_your_own_policy_says_which_burn_in_it_needs(tmp_path: Path):
    policy = lambda observation_space, action_space: hf.QNetwork(  # noqa: E731
        observation_space, action_space, hf.WindowAttention(8, 8, window=7), encoder_sizes=(8,)
    )
    with pytest.raises(ValueError, match=r"holds the last 6 steps.*burn_in=2 must be at least 6"):
        hf.Trainer(config(tmp_path, "r2d2", burn_in=2), env=lambda: Drawn(CHOICES), policy=policy)


@pytest.mark.parametrize(
    ("core", "context"),
    [
        (hf.WindowAttention(8, 8, window=5), 4),
        (hf.Block(hf.WindowAttention(8, 8, window=5)), 4),
        (hf.Stack([hf.WindowAttention(8, 8, window=5), hf.WindowAttention(8, 8, window=3)]), 6),
        (hf.Parallel(a=hf.WindowAttention(8, 8, window=5), b=hf.WindowAttention(8, 8, window=3)), 4),
        (hf.Parallel(a=hf.WindowAttention(8, 8, window=5), b=hf.GRU(8, 8)), None),
        (hf.GRU(8, 8), None),
    ],
)
def test_a_core_knows_after_how_many_steps_its_state_follows_from_its_inputs(core: hf.Core, context: int | None):
    assert core.context() == context
    if context is None:
        return
    x, junk = torch.randn(context, 2, 8), core.initial_state(2)
    _, junk = core(torch.randn(9, 2, 8), junk)
    after, fresh = core(x, junk)[1], core(x, None)[1]
    probe = torch.randn(1, 2, 8)
    assert torch.allclose(core(probe, after)[0], core(probe, fresh)[0], atol=1e-5)


@pytest.mark.parametrize("reset", ["never", "detach"])
@pytest.mark.parametrize("algorithm", ["sac", "r2d2"])
def test_memory_that_goes_on_over_episodes_needs_an_environment_that_plays_final_observations(
    tmp_path: Path, algorithm: str, reset: str
):
    def env(mode: AutoresetMode) -> Any:
        return SyncVectorEnv([lambda: Drawn(CHOICES)] * 2, autoreset_mode=mode)

    trained(tmp_path, algorithm, env(AutoresetMode.NEXT_STEP), reset=reset)
    for mode in (AutoresetMode.SAME_STEP, AutoresetMode.DISABLED):
        with pytest.raises(ValueError, match=f"reset mode '{reset}' with a buffer of sequences needs .* NEXT_STEP"):
            hf.Trainer(config(tmp_path / "other", algorithm, reset=reset), env=env(mode))
    assert not (tmp_path / "other").exists()


def test_states_are_kept_at_least_once_per_training_sequence(tmp_path: Path, recwarn: Any):
    trainer = trained(tmp_path, "sac", lambda: Drawn(BOX), num_steps=12, train_length=5)
    assert trainer.collector.bptt == 4
    assert not [w for w in recwarn if "never reach the rows between" in str(w.message)]


def test_staleness_is_that_of_stored_starts_and_what_burn_in_leaves_of_it(tmp_path: Path):
    """Nothing is stale until weights move; then a stored start differs from what an episode played again up to there gives."""
    trainer = hf.Trainer(
        config(tmp_path, "r2d2", burn_in=3, warmup_steps=999, normalize_obs=False, batch_size=32, total_steps=320),
        env=lambda: Drawn(CHOICES),
    )
    trainer.run()
    algorithm, segment = trainer.algorithm, None
    assert max(algorithm.staleness(segment).values()) < 1e-5
    drawn = algorithm.buffer.generator.get_state()
    with torch.no_grad():
        for p in algorithm.policy.core.parameters():
            p.mul_(1.5)
    found = algorithm.staleness(segment)
    stale, left = found["memory/staleness"], found["memory/staleness_after_burn_in"]
    assert torch.equal(algorithm.buffer.generator.get_state(), drawn), "looking changes nothing"
    # Episodes have 5 steps: of 3 rows of burn-in, most hold a reset, after which nothing of a stored state is left.
    assert 0.01 < left < 0.7 * stale
    batch = algorithm.buffer.sample(4, 8, 3)
    obs, resets = algorithm.buffer.before(batch.index, 12)
    for column, number in enumerate(batch.index.tolist()):
        row = int(algorithm.buffer.starts.rows[number // 2, number % 2])
        slots = torch.arange(max(row - 12, 0), row) + number % 2 * algorithm.buffer.stream_rows
        held = len(slots)
        assert not resets[: 12 - held, column].any()
        assert torch.equal(obs["obs"][12 - held :, column], algorithm.buffer.rows["obs"]["obs"][slots])
        assert torch.equal(resets[12 - held :, column], algorithm.buffer.rows["flags"][slots] & 1 != 0)


# --- spaces -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-1, 2, (2, 3), np.float32),
        spaces.Box(-1, 2, (), np.float32),
        spaces.Box(-1, 2, (2,), np.float64),
        spaces.Box(-1, 2, (2,), np.int32),
        spaces.Box(1e6, 1e6 + 2, (2,), np.float64),
        spaces.Box(-1e6, 1e6, (2,), np.float32),
    ],
    ids=["2x3", "no dimension", "float64", "int32", "far from 0", "wide"],
)
def test_sac_takes_every_box_with_bounds(tmp_path: Path, space: Any):
    trainer = trained(tmp_path, "sac", lambda: Drawn(space))
    batch = trainer.algorithm.buffer.sample(4, 8)
    read = trainer.policy.encoder.parts[1](batch.obs["prev_action"].flatten(0, 1))[~batch.resets.flatten()]
    played = (batch.actions[:-1] - space.low.mean()) / (space.high.mean() - space.low.mean()) * 2 - 1
    goes_on = ~batch.resets[1:]
    following = trainer.policy.encoder.parts[1](batch.obs["prev_action"][1:].flatten(0, 1)).view(*goes_on.shape, -1)
    assert bool((read.abs() <= 1 + 1e-5).all())
    assert torch.allclose(
        following[goes_on], played.reshape(*goes_on.shape, -1)[goes_on].to(following.dtype), atol=1e-4
    )


IMAGE = spaces.Box(0, 255, (3, 9, 9), np.uint8)


@EACH
def test_images_stay_uint8_in_the_buffer_beside_other_parts(tmp_path: Path, algorithm: str, actions: Any):
    space = spaces.Dict({"camera": IMAGE, "speed": spaces.Box(-1, 1, (2,), np.float32), "card": spaces.Discrete(5)})
    trainer = trained(tmp_path, algorithm, lambda: Drawn(actions, space))
    assert trainer.algorithm.buffer.rows["obs"]["obs"]["camera"].dtype == torch.uint8


@pytest.mark.parametrize(("critic_core", "actions"), [("separate", BOX), ("none", CHOICES)])
def test_a_critic_may_see_more_than_the_actor_also_with_previous_actions(
    tmp_path: Path, critic_core: str, actions: Any
):
    pytest.importorskip("onnxruntime")
    space = spaces.Dict({"camera": spaces.Box(-1, 1, (2,), np.float32), "secret": spaces.Box(-1, 1, (4,), np.float32)})
    trainer = trained(
        tmp_path,
        "sac",
        lambda: Drawn(actions, space),
        critic_core=critic_core,
        actor_obs=("camera",),
        critic_obs=("secret",),
    )
    policy = hf.load(tmp_path / "run")
    assert trainer.policy.critic_encoder.keys == ["obs", "prev_action"]
    assert trainer.policy.critic_encoder.parts[0].keys == ["secret"]
    hf.export_policy(policy, tmp_path / "policy.onnx")
    runners = [hf.Runner(policy), hf.Runner(tmp_path / "policy.onnx")]
    for step in range(4):
        seen = {"camera": np.full((2, 2), 0.1 * step, np.float32)}
        first, second = (runner.act(seen, resets=np.full(2, step == 0)).action for runner in runners)
        assert np.allclose(first, second, atol=1e-5)
    previous = np.full((2, *actions.shape), 4 if actions is CHOICES else 0)
    action, _ = policy.predict({"obs": {**seen, "secret": np.zeros((2, 4), np.float32)}, "prev_action": previous})
    assert action.shape == (2, *actions.shape)


@pytest.mark.parametrize("algorithm", ["pqn", "r2d2"])
def test_settings_of_a_critic_are_refused_where_there_is_none(tmp_path: Path, algorithm: str):
    base = dict(algorithm=algorithm, env="CartPole-v1", run_dir=str(tmp_path / "run"), device="cpu")
    with pytest.raises(ValueError, match=f"critic_core='none' is about a critic, and {algorithm} has none"):
        hf.Trainer(hf.RunConfig.from_dict({**base, "critic_core": "none"}))


# --- environments -----------------------------------------------------------------------------------------------------


@EACH
@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)
def test_episodes_of_one_step_in_every_autoreset_mode(tmp_path: Path, algorithm: str, actions: Any, mode: Any):
    class Short(Drawn):
        def step(self, action: Any) -> Any:
            obs, reward, _, _, info = super().step(action)
            return obs, reward, self.t % 2 == 0, True, info

    trained(tmp_path, algorithm, SyncVectorEnv([lambda: Short(actions)] * 2, autoreset_mode=mode))


@EACH
def test_rewards_that_are_not_finite_leave_out_their_episode_and_nothing_else(
    tmp_path: Path, algorithm: str, actions: Any
):
    class Broken(Drawn):
        steps = 0

        def step(self, action: Any) -> Any:
            Broken.steps += 1
            obs, reward, *rest = super().step(action)
            return obs, np.nan if Broken.steps % 29 == 0 else reward, *rest

    trainer = trained(tmp_path, algorithm, lambda: Broken(actions))
    assert all(p.isfinite().all() for p in trainer.policy.parameters())
    rows = trainer.algorithm.buffer.rows
    assert bool(rows["rewards"].isfinite().all()) and int((rows["flags"] & 8 == 0).sum()) > 0


@EACH
def test_one_environment_and_environments_that_fail(tmp_path: Path, algorithm: str, actions: Any):
    class Failing(Drawn):
        made = 0

        def __init__(self, *spaces: Any) -> None:
            super().__init__(*spaces)
            Failing.made += 1

        def step(self, action: Any) -> Any:
            if Failing.made == 1 and self.t == 3:
                raise RuntimeError("the motor is hot")
            return super().step(action)

    trainer = trained(tmp_path, algorithm, lambda: Failing(actions), num_envs=1)
    assert trainer.env_failures.count == 1 and Failing.made > 1


@EACH
def test_a_buffer_too_small_for_its_environments_is_refused(tmp_path: Path, algorithm: str, actions: Any):
    with pytest.raises(ValueError, match=r"buffer_size=100 is too small: num_envs=6 .* need at least 108"):
        config(tmp_path, algorithm, num_envs=6, buffer_size=100)
    with pytest.raises(ValueError, match=r"buffer_size=60 is too small: num_envs=4 .* need at least 72"):
        hf.Trainer(config(tmp_path, algorithm, num_envs=0, buffer_size=60), env=lambda: Drawn(actions))


# --- law 1 in every run -----------------------------------------------------------------------------------------------


class IgnoresResets:
    def features(self, obs: Any, state: Any, resets: Any = None) -> Any:
        return super().features(obs, state, None)  # type: ignore[misc]


class ResetsLate:
    def features(self, obs: Any, state: Any, resets: Any = None) -> Any:
        return super().features(obs, state, resets.roll(1, 0))  # type: ignore[misc]


class BeginsFromNothing:
    def features(self, obs: Any, state: Any, resets: Any = None) -> Any:
        return super().features(obs, self.initial_state(resets.shape[1]), resets)  # type: ignore[attr-defined,misc]


class TakesTheStatesOfOthers:
    def features(self, obs: Any, state: Any, resets: Any = None) -> Any:
        return super().features(obs, tree_map(lambda x: x.roll(1, 0), state), resets)  # type: ignore[misc]


@EACH
@pytest.mark.parametrize("fault", [IgnoresResets, ResetsLate, BeginsFromNothing, TakesTheStatesOfOthers])
def test_a_policy_whose_training_leg_does_something_else_is_stopped_in_its_first_rollouts(
    tmp_path: Path, algorithm: str, actions: Any, fault: type
):
    """With 128 units and a fresh head, whose outputs are near 0."""
    base = hf.QNetwork if algorithm == "r2d2" else hf.SoftActorCritic
    broken = type("Broken", (fault, base), {})
    for seed in range(1, 4):
        folder = tmp_path / str(seed)
        trainer = hf.Trainer(
            config(folder, algorithm, seed=seed, warmup_steps=999, num_steps=7),
            env=lambda: Drawn(actions),
            policy=lambda observation_space, action_space: broken(observation_space, action_space, "gru", 128),
        )
        with pytest.raises(ReplayError, match="training does not replay the rollout"):
            trainer.run()


# --- around a run -----------------------------------------------------------------------------------------------------


class AllRewards(hf.Callback):
    def on_rollout_end(self, trainer: Any, segment: Any) -> None:
        segment.rewards = torch.full_like(segment.rewards, 7.0)


@pytest.mark.parametrize(("algorithm", "env"), [("sac", "Pendulum-v1"), ("r2d2", "CartPole-v1")])
def test_a_run_is_shared_evaluated_and_examined_and_learns_what_a_callback_made_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], algorithm: str, env: str
):
    trainer = hf.Trainer(
        config(tmp_path, algorithm, env=env, warmup_steps=999, total_steps=16), callbacks=[AllRewards()]
    )
    trainer.run()
    rows = trainer.algorithm.buffer.rows
    assert set(rows["rewards"][rows["flags"] & 8 != 0].tolist()) == {7.0}
    policy = hf.load(tmp_path / "run")
    assert not hf.doctor.examine(policy).findings
    hf.save_pretrained(policy, tmp_path / "shared")
    assert f'| algorithm | "{algorithm}" |' in (tmp_path / "shared" / "README.md").read_text()
    for flags, said in (([], "most likely actions"), (["--no-deterministic"], "sampled actions")):
        assert main(["eval", str(tmp_path / "run"), "--episodes", "1", *flags]) == 0
        assert f"1 episode, {said}" in capsys.readouterr().out


def test_a_sweep_of_a_named_algorithm_does_not_speak_of_another_one_s_preset():
    assert _start(SweepFlags(), ["--env", "Pendulum-v1"]) == "the preset pendulum"
    assert _start(SweepFlags(), ["--env", "Pendulum-v1", "--algorithm", "sac"]) == "the default"


# --- of your own ------------------------------------------------------------------------------------------------------


class Imitation(hf.OffPolicy):
    """Makes the actions that were played likelier: an algorithm outside of the package in a few lines."""

    name = "imitation"
    terms = ("loss",)

    @classmethod
    def make_policy(cls, config: Any, observation_space: Any, action_space: Any) -> Any:
        return hf.ActorCritic(observation_space, action_space, config.core, config.hidden_size)

    def make_target(self) -> torch.nn.Module:
        return target_copy(self.policy)

    def learn(self, batch: Any) -> dict[str, torch.Tensor]:
        rows, start = self.after_burn_in(batch, self.policy, batch.start_state)
        log_prob = self.policy.evaluate(rows.obs, rows.actions, start, rows.resets).log_prob
        loss = -mean_over(rows.valid, log_prob)
        return {"loss": loss.detach(), **self.step(loss)}


@pytest.mark.parametrize("actions", [CHOICES, spaces.Discrete(2)], ids=["numbered from 4", "two"])
def test_an_algorithm_outside_of_the_package_learns_from_the_buffer(tmp_path: Path, actions: Any):
    settings = {**SMALL, "run_dir": str(tmp_path / "run"), "burn_in": 2, "learning_rate": 0.02, "update_ratio": 1.0}
    trainer = hf.Trainer(hf.OffPolicyConfig(**settings), env=lambda: Drawn(actions), algorithm=Imitation)
    trainer.run()
    rows = read_progress(tmp_path / "run")
    assert float(rows[-1]["train/loss"]) < float(rows[1]["train/loss"])
    resumed = hf.Trainer.resume(tmp_path / "run", total_steps=96, env=lambda: Drawn(actions), algorithm=Imitation)
    assert resumed.run().steps == 96 and resumed.algorithm.gradient_steps > trainer.algorithm.gradient_steps


class Own(hf.RecurrentPolicy):
    """With a distribution of torch, as a stranger writes it."""

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        super().__init__(core=hf.GRU(3, 8))
        self.discrete = isinstance(action_space, spaces.Discrete)
        self.head, self.critic = torch.nn.Linear(8, 2), torch.nn.Linear(10, 2)

    def encode(self, obs: torch.Tensor) -> torch.Tensor:
        return obs

    def decode(self, features: torch.Tensor) -> Any:
        out = self.head(features)
        if self.discrete:
            return torch.distributions.Categorical(logits=out), None
        return torch.distributions.Independent(torch.distributions.Normal(out, 0.5), 1), None

    def q(self, features: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        return self.critic(torch.cat([features, actions], 1)).T


class OwnQ(Own):
    def decode(self, features: torch.Tensor, action_mask: Any = None) -> Any:
        return hf.heads.Greedy(self.head(features), action_mask), None


def test_policies_of_your_own_may_use_distributions_of_torch_and_are_told_what_is_needed(tmp_path: Path):
    two = spaces.Discrete(2)
    hf.Trainer(config(tmp_path / "sac", "sac"), env=lambda: Drawn(BOX), policy=Own).run()
    hf.Trainer(config(tmp_path / "q", "r2d2"), env=lambda: Drawn(two), policy=OwnQ).run()
    with pytest.raises(TypeError, match=r"SAC needs gradients through actions.* not a Categorical"):
        hf.Trainer(config(tmp_path / "d", "sac"), env=lambda: Drawn(two), policy=Own).run()
    with pytest.raises(
        TypeError, match=r"R2D2 needs values of actions: let decode return hf.heads.Greedy\(q\), not a Categorical"
    ):
        hf.Trainer(config(tmp_path / "c", "r2d2"), env=lambda: Drawn(two), policy=Own).run()
