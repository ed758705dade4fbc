"""Masks with recurrence inside Stable-Baselines3: learned where both are needed, and never a forbidden action."""

from __future__ import annotations

import importlib.util
from pathlib import Path

PATH = Path(__file__).resolve().parents[2] / "examples" / "sb3_masked.py"


def test_masked_recurrent_ppo_learns_and_takes_no_forbidden_action_in_100k_steps():
    spec = importlib.util.spec_from_file_location("sb3_masked", PATH)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    result = example.main(["--steps", "100000"])  # its environment raises on a forbidden action
    assert result["steps"] >= 100_000
    assert result["right"] > 0.9  # 0.5 is what two allowed actions give without memory
