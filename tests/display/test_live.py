import io
import math

import pytest
from rich.console import Console

from holdfast.algorithms.ppo import PPO
from holdfast.config import TrainConfig
from holdfast.display import dashboard, live
from holdfast.display.live import Display
from holdfast.runs.log import RunLog

NUM_UPDATES = 200


def config(tmp_path, **settings):
    return TrainConfig.preset("repeat-previous-easy", run_dir=str(tmp_path), **settings)


def row(update, **more):
    return {
        "update": update,
        "steps": update * 4096,
        "rollout/ep_rew_mean": update / NUM_UPDATES,
        "rollout/ep_len_mean": 51.0,
        "train/entropy": 1.25,
        "train/approx_kl": 0.004,
        "train/clip_fraction": 0.083,
        "memory/rms": 0.31,
        "memory/saturation": 0.02,
        "time/fps": 12345.6,
        "time/elapsed": update * 0.25,
        "time/env": 0.05,
        "time/policy": 0.05,
        "time/update": 0.10,
        **more,
    }


EVERY_METRIC = {
    f"train/{name}": 0.1 for name in ("policy_loss", "value_loss", "explained_variance", "grad_norm", "learning_rate")
} | {f"memory/{name}": 0.1 for name in ("max", "replay_gap", "staleness", "resets", "nan")}
"""The metrics that `row` leaves out: with them the tables have all their lines."""


def plain_console():
    return Console(file=io.StringIO(), force_terminal=False, width=200)


def live_console(width=100, height=40):
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=height, _environ={"TERM": "xterm"})


def picture(shown, width=100, height=40):
    console = Console(file=io.StringIO(), width=width, height=height)
    console.print(dashboard.render(shown.progress, width, height))
    return console.file.getvalue()


def test_without_a_terminal_a_run_is_at_most_about_forty_lines(tmp_path):
    console = plain_console()
    shown = Display(config(tmp_path), NUM_UPDATES, PPO.metrics, console=console)
    for update in range(1, NUM_UPDATES + 1):
        shown.update(row(update), [f"entropy fell to {1 / update:.3f}"])
    shown.note("checkpoint [saved]")
    shown.close()
    lines = console.file.getvalue().splitlines()
    assert len(lines) <= 40
    assert lines[0].startswith("update   1/200")
    assert lines[-2].startswith("update 200/200") and "return  1.000" in lines[-2]
    assert lines[-1] == "checkpoint [saved]"
    assert sum(line.startswith("warning:") for line in lines) == 1  # the same warning with other numbers
    assert not any("\x1b" in line for line in lines)


def test_a_short_run_prints_every_update(tmp_path):
    console = plain_console()
    shown = Display(config(tmp_path), 5, PPO.metrics, console=console)
    for update in range(1, 6):
        shown.update(row(update), [])
    assert len(console.file.getvalue().splitlines()) == 5


def test_a_note_stays_above_the_dashboard(tmp_path):
    console = live_console()
    shown = Display(config(tmp_path), NUM_UPDATES, PPO.metrics, console=console)
    engines = "rollout: step by step, because the environment is not ours; update: C, without autograd"
    shown.note(engines)
    shown.update(row(1), [])
    shown.note("cannot save; retrying")
    shown.close()
    text = console.file.getvalue()
    assert text.startswith(engines + "\n")
    assert text.index("cannot save; retrying") < text.rindex("RepeatPreviousEasy-v0")


def test_a_name_between_colons_does_not_become_a_picture(tmp_path, capsys):
    Display(config(tmp_path), NUM_UPDATES).note("my_envs:boom: made")
    assert capsys.readouterr().out == "my_envs:boom: made\n"


def test_quiet_prints_nothing(tmp_path, capsys):
    shown = Display(config(tmp_path, quiet=True), NUM_UPDATES)
    shown.update(row(1), ["a warning"])
    shown.note("a note")
    shown.close()
    assert capsys.readouterr() == ("", "")


def test_the_picture_shows_returns_speed_time_losses_and_memory(tmp_path):
    shown = Display(config(tmp_path), NUM_UPDATES, PPO.metrics, console=live_console())
    for update in range(1, 101):
        gap = 2.5e-7 if update == 1 else math.nan  # not checked in every update
        shown.update(row(update, **{"memory/replay_gap": gap}), ["saturation [30%] is high"] * (update == 3))
    shown.close()
    text = picture(shown)
    for part in (
        "RepeatPreviousEasy-v0 · lstm 64",
        "return 0.500",
        "solved",
        "chance",
        "50%",
        "12,346 steps/s",
        "100/200",
        "clipped",
        "8.3%",
        "replay gap",
        "2.5e-07",
        "saturated",
        "saturation [30%] is high",
    ):
        assert part in text, part
    # 0.05 + 0.05 + 0.10 seconds of 0.25 by the clock
    rest = next(line for line in text.splitlines() if line.startswith("│ rest"))
    assert rest.split()[3] == "20%"


@pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 24), (100, 18), (200, 60)])
def test_the_picture_fits_the_terminal(tmp_path, width, height):
    shown = Display(config(tmp_path), NUM_UPDATES, PPO.metrics, console=live_console(width, height))
    for update in range(1, 60):
        shown.update(row(update), [])
    lines = picture(shown, width, height).splitlines()
    assert len(lines) <= height
    assert max(len(line) for line in lines) <= width
    assert all(line[0] in "╭│╰" and line[-1] in "╮│╯" for line in lines)


def test_missing_and_nan_metrics_show_as_unknown(tmp_path):
    shown = Display(config(tmp_path), NUM_UPDATES, PPO.metrics, console=live_console())
    shown.update({"update": 1, "steps": 10, "rollout/ep_rew_mean": math.nan}, [])
    shown.close()
    assert "return -" in picture(shown)


def test_a_resumed_run_shows_the_curve_from_its_beginning(tmp_path):
    log = RunLog(tmp_path, tensorboard=False, wandb=False, config={})
    for update in range(1, 51):
        log.write(row(update), update * 4096)
    log.close()
    shown = Display(config(tmp_path), NUM_UPDATES, PPO.metrics, console=live_console())
    shown.update(row(51), [])
    shown.update(row(52), [])
    shown.close()
    assert [steps for steps, _ in shown.progress.curve] == [4096 * update for update in range(1, 53)]


def test_frames_are_limited_so_that_looking_costs_little(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: clock[0])
    frames = []
    monkeypatch.setattr(dashboard, "render", lambda *arguments: frames.append(1) or "picture")
    shown = Display(config(tmp_path), NUM_UPDATES, PPO.metrics, console=live_console())
    for update in range(1, 101):
        clock[0] += 0.02
        shown.update(row(update), [])
    shown.close()
    assert 4 <= len(frames) <= 7  # in 2 seconds


def test_a_long_run_keeps_a_bounded_curve(tmp_path, monkeypatch):
    monkeypatch.setattr(live, "MAX_POINTS", 100)
    shown = Display(config(tmp_path), 1000, console=plain_console())
    for update in range(1, 1001):
        shown.update(row(update), [])
    assert 50 <= len(shown.progress.curve) <= 100
    assert shown.progress.curve[-1][0] == 1000 * 4096
    assert len(shown.progress.history["train/entropy"]) <= 100


def test_remaining_time_follows_the_last_updates(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: clock[0])
    shown = Display(config(tmp_path), NUM_UPDATES, PPO.metrics, console=plain_console())
    for update in range(1, 101):
        clock[0] += 5.0 if update < 50 else 0.5
        shown.update(row(update), [])
    assert shown.progress.remaining == pytest.approx(100 * 0.5)


@pytest.mark.parametrize(("width", "height"), [(24, 8), (30, 10), (45, 14), (54, 18), (60, 24), (80, 24), (200, 60)])
def test_the_dashboard_fits_into_terminals_of_every_size(tmp_path, width, height):
    shown = Display(config(tmp_path), NUM_UPDATES, PPO.metrics, console=live_console(width, height))
    for update in (1, 120):
        shown.update(row(update), ["episodes are longer than the segments"] if height >= 24 else [])
    lines = picture(shown, width, height).splitlines()
    assert len(lines) < height
    assert {len(line) for line in lines} == {min(width, 118)}
    assert "return 0.600" in lines[1]
    assert "60%" in "".join(lines)
    assert ("entropy" in "".join(lines)) == (width >= 54)


LONG_WARNINGS = [
    "episodes are longer than the segments, so gradients do not reach their first steps; try --num-steps 512 or --bptt 512",
    "saturation of the memory is 0.71, and units that are saturated learn little; a lower learning rate may help",
    "the newest: the entropy fell to 0.01 before the return rose; try --entropy-coef 0.02",
]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    ("width", "height"), [(24, 8), (30, 10), (30, 12), (45, 14), (54, 18), (54, 20), (60, 24), (80, 24), (200, 60)]
)
def test_the_dashboard_with_long_warnings_fits_and_shows_the_newest(tmp_path, width, height, count):
    shown = Display(config(tmp_path), NUM_UPDATES, PPO.metrics, console=live_console(width, height))
    shown.update(row(1), LONG_WARNINGS[-count:])
    shown.update(row(120, **EVERY_METRIC), [])
    lines = picture(shown, width, height).splitlines()
    assert len(lines) < height
    assert {len(line) for line in lines} == {min(width, 118)}
    assert "return 0.600" in lines[1]
    assert any("! the newest" in line for line in lines) == (height >= 10)
    assert sum("! " in line for line in lines) == (count if height >= 12 else int(height >= 10))


def test_warnings_are_shown_whole_where_there_is_room(tmp_path):
    shown = Display(config(tmp_path), NUM_UPDATES, PPO.metrics, console=live_console(80, 40))
    shown.update(row(1), LONG_WARNINGS)
    text = " ".join(line.strip("│ ") for line in picture(shown, 80, 40).splitlines())
    assert all(warning in text for warning in LONG_WARNINGS)


@pytest.mark.parametrize(("width", "height"), [(20, 30), (100, 5)])
def test_a_terminal_that_is_too_small_for_a_dashboard_gets_lines(tmp_path, width, height):
    console = live_console(width, height)
    shown = Display(config(tmp_path), NUM_UPDATES, PPO.metrics, console=console)
    shown.update(row(1), [])
    assert console.file.getvalue().startswith("update ")
    assert console.file.getvalue().count("\n") == 1
