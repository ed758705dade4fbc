"""The soak's judgement: it notices a leak, a slow-down and a file that grows, and forgives warm-up and resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.runs.log import RunLog

FOLDER = Path(__file__).parents[2] / "benchmarks"
MB = 2**20


@pytest.fixture
def soak(monkeypatch: Any) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    import soak

    return soak


def judged(soak: Any, folder: Path, leak: float = 0.0, slowdown: float = 0.0, parts: int = 2) -> dict[str, Any]:
    """A made-up run of 200 updates per process: 0.1 s each, the first 5 of a process 10 s."""
    log = RunLog(folder, tensorboard=False, wandb=False, config={})
    elapsed, update = 0.0, 0
    for part in range(1, parts + 1):
        for i in range(200):
            update += 1
            elapsed += 10.0 if i < 5 else 0.1 * (1 + slowdown * update)
            row = {
                "update": update, "steps": 1000 * update, "soak/part": part, "time/elapsed": elapsed,
                "soak/cpu_seconds": 2 * elapsed, "memory/replay_gap": 0.0, "train/skipped_steps": 0.0,
                "rollout/ep_rew_mean": 1.0, "soak/rss": MB * (300 + 50 * part + min(i, 10) + leak * i),
                "soak/gpu": 1000.0 * MB, "soak/gpu_device": MB * (1500 + leak * i),
            }  # fmt: skip
            log.write(row, 0)
    log.close()
    found = soak.figures(folder)
    return {**found, **soak.verdict(found, on_gpu=True)}


def test_a_steady_run_passes_and_warm_up_counts_for_nothing(soak: Any, tmp_path: Path):
    found = judged(soak, tmp_path)
    assert found["throughput_kept"] and found["memory_flat"] and found["gpu_memory_flat"] and found["files_small"]
    assert found["steps_per_second"] == pytest.approx([10_000.0] * 10)
    assert found["steps_per_cpu_second"] == pytest.approx([5_000.0] * 10)
    assert found["processes"] == 2 and found["updates"] == 400
    assert found["rss_growth_mb"] == 0.0, "another process has other memory; growth is within one"


def test_a_leak_is_seen(soak: Any, tmp_path: Path):
    found = judged(soak, tmp_path, leak=0.2)
    # 180 counted updates per process: fifths of 36, so the last lies 144 updates x 0.2 MB above the first.
    assert found["rss_growth_mb"] == pytest.approx(28.8, abs=0.11)
    assert not found["memory_flat"] and not found["gpu_memory_flat"]


def test_a_slow_down_is_seen(soak: Any, tmp_path: Path):
    found = judged(soak, tmp_path, slowdown=0.001)
    assert not found["throughput_kept"] and found["last_tenth_over_first"] < 0.8


def test_a_large_file_is_seen(soak: Any, tmp_path: Path, monkeypatch: Any):
    monkeypatch.setattr(soak, "LARGEST_FILE", 1000)
    assert not judged(soak, tmp_path, parts=1)["files_small"]


def test_too_short_a_run_says_so(soak: Any, tmp_path: Path, monkeypatch: Any):
    monkeypatch.setattr(soak, "WARM_UP", 195)
    with pytest.raises(SystemExit, match="only 5 updates after warm-up"):
        judged(soak, tmp_path, parts=1)
