"""Spaces as plain data and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from holdfast.runs import checkpoint, space_data

SPACES = [
    spaces.Box(-1.0, 2.0, (3,), np.float32),
    spaces.Box(np.array([-np.inf, 0.0], np.float32), np.array([np.inf, 1.0], np.float32)),
    spaces.Box(0, 255, (8, 8, 3), np.uint8),
    spaces.Box(-1.0, 1.0, (), np.float64),
    spaces.Box(np.iinfo(np.int64).min, np.iinfo(np.int64).max, (2,), np.int64),
    spaces.Discrete(5, start=2),
    spaces.MultiDiscrete([3, 4], start=[1, 0]),
    spaces.MultiDiscrete([[2, 3], [4, 5]]),
    spaces.MultiBinary(4),
    spaces.MultiBinary([2, 3]),
    spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Dict({"c": spaces.MultiBinary(2)})}),
    spaces.Tuple([spaces.Discrete(2), spaces.Box(0.0, 1.0, (1,))]),
    spaces.Dict(
        [("z", spaces.Box(-1, 1, (2,))), ("a", spaces.Dict([("d", spaces.Discrete(3)), ("b", spaces.Discrete(2))]))]
    ),
]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_a_space_comes_back_from_a_checkpoint_as_it_was(tmp_path: Path, space: spaces.Space[Any]):
    checkpoint.save(tmp_path / "space.pt", space_data.to_data(space))
    back = space_data.from_data(checkpoint.load(tmp_path / "space.pt"))
    assert back == space and back.dtype == space.dtype and str(back) == str(space), "with keys in their order"


def test_a_space_that_cannot_be_saved_is_named():
    with pytest.raises(TypeError, match=r"Text.* cannot be saved"):
        space_data.to_data(spaces.Text(5))


@pytest.mark.parametrize("number", range(len(SPACES)))
def test_a_policy_fits_the_space_it_was_made_for_and_no_other(number: int):
    space_data.require_fit(SPACES[number], SPACES[number], "observation_space")
    for other in SPACES[:number] + SPACES[number + 1 :]:
        if {type(other), type(SPACES[number])} == {spaces.Box} and other.shape == SPACES[number].shape:
            space_data.require_fit(SPACES[number], other, "observation_space")  # bounds may change
            continue
        with pytest.raises(ValueError, match=r"the environment's action_space is .*, and the policy was made for "):
            space_data.require_fit(SPACES[number], other, "action_space")


def test_a_policy_that_sees_a_part_of_a_dict_fits_the_whole():
    whole = spaces.Dict({"seen": spaces.Discrete(2), "hidden": spaces.Discrete(3)})
    space_data.require_fit(spaces.Dict({"seen": spaces.Discrete(2)}), whole, "observation_space")
    space_data.require_fit(None, whole, "observation_space")


def test_other_bounds_of_actions_are_refused_because_actions_are_in_units_of_them():
    one, ten = spaces.Box(-1.0, 1.0, (2,)), spaces.Box(-10.0, 10.0, (2,))
    space_data.require_fit(one, ten, "observation_space")
    space_data.require_fit(one, spaces.Box(-1.0, 1.0, (2,), np.float64), "action_space")
    with pytest.raises(
        ValueError, match=r"the environment's action_space is Box\(-10\.0, 10\.0.*made for Box\(-1\.0, 1\.0"
    ):
        space_data.require_fit(one, ten, "action_space")
