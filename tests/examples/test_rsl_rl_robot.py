"""The rsl_rl script runs with our classes and with rsl_rl's own; only strings of its config differ."""

from __future__ import annotations

import pytest

pytest.importorskip("rsl_rl")

from integrations.rsl_rl.arm import EXAMPLE


@pytest.mark.parametrize("arguments", [[], ["--rnn-type", "lru"], ["--stock"]])
def test_the_robot_trains(arguments):
    result = EXAMPLE.main(["--iterations", "2", "--num-envs", "16", "--device", "cpu", *arguments])
    assert 0.0 < result["mean_reward"] < 1.0


def test_only_class_names_differ():
    ours, theirs = EXAMPLE.train_cfg(True), EXAMPLE.train_cfg(False)
    for part in ("actor", "critic", "algorithm"):
        assert ours[part].pop("class_name") == "holdfast.integrations.rsl_rl:" + theirs[part].pop("class_name")
    assert ours == theirs
