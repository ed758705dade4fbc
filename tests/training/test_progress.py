"""The counters of a run."""

from __future__ import annotations

import math
import time

from holdfast.training.iteration import RECENT_EPISODES, RunProgress, mean


def test_a_target_counts_only_over_a_full_window_of_recent_episodes():
    progress = RunProgress()
    progress.add_episodes([1.0] * (RECENT_EPISODES - 1), [3] * (RECENT_EPISODES - 1))
    assert not progress.reached(0.5)
    progress.add_episodes([1.0], [3])
    assert progress.reached(1.0) and not progress.reached(1.01) and not progress.reached(None)
    progress.add_episodes([0.0], [3])
    assert mean(progress.recent_returns) == 1 - 1 / RECENT_EPISODES, "the oldest has left the window"


def test_the_mean_of_no_episodes_is_not_a_number():
    assert math.isnan(mean(RunProgress().recent_returns)) and not RunProgress().reached(-math.inf)


def test_the_clock_adds_to_the_time_before_a_resume_and_stands_still_when_stopped():
    progress = RunProgress(earlier_seconds=100.0)
    assert progress.seconds == 100.0
    progress.start_clock()
    time.sleep(0.01)
    progress.stop_clock()
    stopped = progress.seconds
    assert 100.01 <= stopped < 101 and progress.seconds == stopped
