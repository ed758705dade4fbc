import sys

import gymnasium as gym
import numpy as np
import pytest


class Gridless(gym.Env):
    """By default ten steps of reward 1; draws a gray square."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012
    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self, render_mode=None, steps=10, reward=1.0):
        self.render_mode, self.steps, self.reward = render_mode, steps, reward

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.zeros(2, np.float32), self.reward, self.t == self.steps, False, {}

    def render(self):
        return np.full((8, 8, 3), 20 * self.t, np.uint8)


for name in ("TenSteps-v0", "OtherTenSteps-v0"):
    if name not in gym.registry:
        gym.register(name, Gridless)


def test_eval_reports_mean_error_and_lengths_and_is_repeatable(run, train, folder, capsys):
    train("--quiet", "--run-dir", "run")
    capsys.readouterr()
    reports = []
    for _ in range(2):
        assert run("eval", "run", "--episodes", 6, "--deterministic") == 0
        reports.append(capsys.readouterr().out)
    assert reports[0] == reports[1]
    assert "length  51.0 (mean), 51 to 51" in reports[0]
    assert "6 episodes, most likely actions, seed 0" in reports[0]
    (checkpoint,) = (folder / "run/checkpoints").glob("*.pt")
    assert run("eval", checkpoint, "--episodes", 1) == 0


def test_video_draws_episodes_of_an_environment_that_renders(run, train, folder, capsys):
    from PIL import Image

    train("--quiet", "--run-dir", "run", "--env", "TenSteps-v0")
    assert run("eval", "run", "--episodes", 2, "--video", "films") == 0
    assert "films/episode_2.gif" in capsys.readouterr().out
    with Image.open(folder / "films/episode_1.gif") as film:
        assert film.n_frames == 10


def test_a_renderer_that_needs_a_display_ends_in_one_line_that_says_what_to_set(
    run, train, folder, capsys, monkeypatch
):
    def fail(self):
        raise RuntimeError("an OpenGL platform library has not been loaded\nthis is line 2 of 40")

    monkeypatch.setattr(Gridless, "render", fail)
    monkeypatch.setitem(sys.modules, "mujoco", sys)
    train("--quiet", "--run-dir", "run", "--env", "TenSteps-v0")
    capsys.readouterr()
    assert run("eval", "run", "--episodes", 1, "--video", "films") == 2
    said = capsys.readouterr().err.strip()
    assert said.count("\n") == 0 and "Gridless.render() failed: RuntimeError: an OpenGL platform" in said
    assert said.endswith("; without a display, set MUJOCO_GL=egl (or osmesa)")


def test_video_of_an_environment_that_does_not_render_is_a_mistake(run, train, folder, capsys):
    train("--quiet", "--run-dir", "run")
    assert run("eval", "run", "--episodes", 1, "--video", "films") == 2
    assert "has nothing to render" in capsys.readouterr().err


def test_eval_plays_with_other_arguments_of_the_environment(run, train, folder, capsys):
    train("--quiet", "--run-dir", "run", "--env", "TenSteps-v0", "--env-args", "steps=4", "reward=0.5")
    for flags, played, steps, mean_return in (
        ("", "TenSteps-v0", 4, "2.000"),
        ("--env TenSteps-v0", "TenSteps-v0", 4, "2.000"),
        ("--env-args steps=6", "TenSteps-v0 steps=6", 6, "3.000"),  # the run's reward stays
        ("--env OtherTenSteps-v0", "OtherTenSteps-v0", 10, "10.000"),  # nothing of the run's
        ("--env OtherTenSteps-v0 --env-args steps=7", "OtherTenSteps-v0 steps=7", 7, "7.000"),
    ):
        capsys.readouterr()
        assert run("eval", "run", "--episodes", 2, *flags.split()) == 0
        report = capsys.readouterr().out
        assert f": {played}, lstm, " in report
        assert f"return  {mean_return} ± " in report and f"length  {steps}.0 (mean)" in report


@pytest.mark.parametrize(
    ("env_args", "message"),
    [
        ("length", "--env-args 'length': expected name=value, such as length=40"),
        ("size=4", "there is no argument 'size'; it takes length"),
        ("length=abc", "length is 'abc', expected a value of type int"),
    ],
)
def test_eval_refuses_arguments_of_the_environment_as_train_does(run, train, folder, capsys, env_args, message):
    train("--quiet", "--run-dir", "run", "--env", "holdfast/TMaze-v0")
    said = []
    for command in (["train", "--env", "holdfast/TMaze-v0"], ["eval", "run"]):
        capsys.readouterr()
        assert run(*command, "--env-args", env_args) == 2
        said.append(capsys.readouterr().err.strip().partition(": ")[2])
    assert said[0] == said[1] and message in said[0]


def test_one_episode_is_reported_in_the_singular_and_without_a_standard_error(run, train, folder, capsys):
    train("--run-dir", "run", "--env", "TenSteps-v0", "--final-eval-episodes", 1)
    assert " over 1 fresh episode, " in capsys.readouterr().out
    assert run("eval", "run", "--episodes", 1) == 0
    out = capsys.readouterr().out
    assert "return  10.000 (mean), 10.000 to 10.000\n" in out and "\n1 episode, sampled actions" in out
