import gymnasium as gym
import numpy as np


class Gridless(gym.Env):
    """Ten steps of reward 1; draws a gray square."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012
    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.zeros(2, np.float32), 1.0, self.t == 10, False, {}

    def render(self):
        return np.full((8, 8, 3), 20 * self.t, np.uint8)


if "TenSteps-v0" not in gym.registry:
    gym.register("TenSteps-v0", Gridless)


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


def test_video_of_an_environment_that_does_not_render_is_a_mistake(run, train, folder, capsys):
    train("--quiet", "--run-dir", "run")
    assert run("eval", "run", "--episodes", 1, "--video", "films") == 2
    assert "has nothing to render" in capsys.readouterr().err
