"""`Callback`: hooks into a run, for users. The trainer calls them; nothing here decides anything."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.rollout.segment import Segment
    from holdfast.training.evaluation import EvalResult
    from holdfast.training.trainer import Trainer


class Callback:
    """Hooks into a run. Return False from any of them to stop it after the current update.

    only_watches = True: no hook changes the run, other than by stopping it. On a GPU the next rollout may then begin before
    `on_update_end`; without it, a callback that has this hook costs the time that the two would have overlapped.

    In a distributed run every rank calls them, with the rollout of its own environments; if one rank stops, all stop.
    """

    only_watches: bool = False

    def on_run_start(self, trainer: Trainer) -> None: ...

    def on_rollout_end(self, trainer: Trainer, segment: Segment) -> bool | None: ...

    def on_update_end(self, trainer: Trainer, row: dict[str, float]) -> bool | None: ...

    def on_eval(self, trainer: Trainer, result: EvalResult) -> bool | None: ...

    def on_run_end(self, trainer: Trainer) -> None:
        """Called however the training loop ended, also after an error."""


class Hooks:
    """The callbacks of a run. `run` calls a hook of all of them; one that returns False stops the run after the current update."""

    def __init__(self, trainer: Trainer, callbacks: Any) -> None:
        self._trainer, self.callbacks = trainer, as_callbacks(callbacks)

    def run(self, hook: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            method = getattr(callback, hook, None)
            if method is not None and method(self._trainer, *arguments) is False:
                self._trainer.stop_signal.reason = self._trainer.stop_signal.reason or "callback"


HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))


def as_callbacks(given: Any) -> list[Any]:
    """A list of callbacks; a TypeError for what is no list of them, and for an object that would never be called."""
    if isinstance(given, (str, type)) or not isinstance(given, Iterable):
        kind = f"the class {given.__name__}" if isinstance(given, type) else f"a {type(given).__name__}"
        raise TypeError(f"callbacks is {kind}, expected a list of callbacks: callbacks=[...]")
    callbacks = list(given)
    for callback in callbacks:
        if isinstance(callback, type):
            raise TypeError(
                f"the callback {callback.__name__} is a class, expected an object: callbacks=[{callback.__name__}(...)]"
            )
        if not any(callable(getattr(callback, hook, None)) for hook in HOOKS):
            raise TypeError(
                f"the callback {callback!r:.60} has no hook, so it would never be called; expected an hf.Callback, or an "
                f"object with one of {', '.join(HOOKS)}"
            )
    return callbacks
