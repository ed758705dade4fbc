"""gymnasium spaces as JSON."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from holdfast.runs.space_json import MOST_NUMBERS, from_json, to_json

SPACES = [
    spaces.Box(-1, 1, (3, 2), np.float32),
    spaces.Box(np.array([-np.inf, 0.1], np.float32), np.array([np.inf, 3e38], np.float32)),
    spaces.Box(0, 255, (4, 4, 1), np.uint8),
    spaces.Box(-(2**40), 2**40, (2,), np.int64),
    spaces.Box(0, 2**16 - 1, (2,), np.uint16),
    spaces.Box(np.array([0, 1], np.uint32), np.array([2**32 - 1, 7], np.uint32), dtype=np.uint32),
    spaces.Box(0.1, 1 / 3, (), np.float64),
    spaces.Discrete(5, start=-2),
    spaces.MultiDiscrete([2, 3], start=[1, 0]),
    spaces.MultiDiscrete(np.array([[2, 3], [4, 5]])),
    spaces.MultiBinary(4),
    spaces.MultiBinary([2, 3]),
    spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Tuple([spaces.Box(-1, 1, (1,)), spaces.MultiBinary(1)])}),
    spaces.Dict(
        [("z", spaces.Box(-1, 1, (2,))), ("a", spaces.Dict([("d", spaces.Discrete(3)), ("b", spaces.Discrete(2))]))]
    ),
]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_a_space_comes_back_from_json_as_it_was(space: spaces.Space[Any]):
    text = json.dumps(to_json(space), allow_nan=False, sort_keys=True)
    back = from_json(json.loads(text))
    assert back == space and str(back) == str(space), "with keys in their order"


BOX = {"kind": "Box", "shape": [2], "dtype": "float32", "low": 0.0, "high": 1.0}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "space is a NoneType, expected a dict"),
        ({"kind": "Graph"}, "space is of the unknown kind 'Graph'"),
        ({**BOX, "dtype": "object"}, "space.dtype is 'object', expected one of bool"),
        ({**BOX, "dtype": ["float32"]}, "space.dtype is"),
        ({**BOX, "shape": [2**20, 2**20]}, f"expected at most {MOST_NUMBERS}"),
        ({**BOX, "shape": [-1]}, "expected an integer from 0"),
        ({**BOX, "dtype": "uint16", "low": 3, "high": 2}, "a lower bound is above its upper bound"),
        ({**BOX, "low": [0.0]}, "space.low has 1 entries, expected 2"),
        ({**BOX, "low": 2.0}, "a lower bound is above its upper bound"),
        ({**BOX, "low": "nan"}, "space.low is a str, expected a number"),
        ({**BOX, "dtype": "uint8", "low": -1}, "expected an integer from 0 to 255"),
        ({"kind": "Discrete", "n": 0, "start": 0}, "space.n is 0, expected an integer from 1"),
        ({"kind": "Dict", "parts": [["a", {"kind": "Discrete", "n": True, "start": 0}]]}, "space.parts[0].n is True"),
        ({"kind": "Dict", "parts": [["a"]]}, "space.parts[0] has 1 entries, expected 2"),
        ({"kind": "Dict", "parts": [[1, BOX]]}, "space.parts[0]: the key is 1, expected text"),
        ({"kind": "Dict", "parts": {"a": BOX}}, "space.parts is a dict, expected a list"),
    ],
)
def test_what_is_no_space_is_refused(data: Any, message: str):
    with pytest.raises(ValueError) as error:
        from_json(data)
    assert message in str(error.value)


def test_all_parts_of_a_space_share_one_budget_of_numbers():
    large = {**BOX, "shape": [MOST_NUMBERS // 2]}
    for space in (
        {"kind": "Dict", "parts": [[name, large] for name in "abc"]},
        {"kind": "Tuple", "parts": [large, {"kind": "Tuple", "parts": [large, BOX]}]},
        {"kind": "Tuple", "parts": [large, {"kind": "MultiBinary", "n": MOST_NUMBERS}]},
    ):
        with pytest.raises(
            ValueError, match=rf"^observation asks for \d+ numbers in all, expected at most {MOST_NUMBERS}"
        ):
            from_json(space, "observation")
    small = {"kind": "Tuple", "parts": [BOX] * 40}
    assert len(from_json(small)) == 40
