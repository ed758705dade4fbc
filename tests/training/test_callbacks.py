"""Callbacks: what is accepted as one, and what is refused because it would never be called."""

from __future__ import annotations

from typing import Any

import pytest

import holdfast as hf
from holdfast.training.callbacks import HOOKS, as_callbacks


class OneHook:
    def on_eval(self, trainer: Any, result: Any) -> None: ...


def test_any_object_with_a_hook_is_a_callback():
    given = (hf.Callback(), OneHook())
    assert as_callbacks(given) == list(given)
    assert as_callbacks(()) == []


def test_an_object_without_any_hook_is_refused_and_the_hooks_are_named():
    with pytest.raises(TypeError, match=f"print.* would never be called; .* one of {', '.join(HOOKS)}"):
        hf.Trainer(hf.TrainConfig(), callbacks=[print])
    assert "on_update_end" in HOOKS and "only_watches" not in HOOKS


def test_one_callback_that_is_no_list_is_refused():
    with pytest.raises(TypeError, match=r"callbacks is a Callback, expected a list of callbacks: callbacks=\[\.\.\.\]"):
        hf.Trainer(hf.TrainConfig(), callbacks=hf.Callback())  # type: ignore[arg-type]


def test_the_class_of_a_callback_is_refused():
    with pytest.raises(TypeError, match=r"the callback OneHook is a class, expected an object: callbacks=\[OneHook"):
        as_callbacks([OneHook])
