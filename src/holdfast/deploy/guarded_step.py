"""`GuardedStep`: a model's step, with NaN and infinity handled as the user of a `Runner` chose."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from holdfast.deploy import nonfinite
from holdfast.deploy.feedback import FeedBack
from holdfast.deploy.step_model import StepModel


class GuardedStep:
    """on_nonfinite: "raise", "skip" or "reset"; `hf.Runner` says what they mean."""

    def __init__(self, model: StepModel, on_nonfinite: str) -> None:
        if on_nonfinite not in nonfinite.POLICIES:
            raise ValueError(f"on_nonfinite is {on_nonfinite!r}, expected one of {', '.join(nonfinite.POLICIES)}")
        self.model, self.on_nonfinite = model, on_nonfinite
        self._warned: set[Hashable] = set()

    def __call__(
        self, ids: Sequence[Hashable], inputs: Any, flags: Any, state: Any, mask: Any, deterministic: bool, numpy: bool
    ) -> tuple[Any, Any, Any, Any]:
        """(action, value, raw action, new state) of the environments `ids`."""
        model = self.model
        bad_obs = nonfinite.bad_rows(inputs, numpy)
        if bad_obs is not None:
            self._report(ids, bad_obs, "observation")
            inputs = nonfinite.zeroed(inputs)
            if self.on_nonfinite == "reset":
                flags = nonfinite.flagged(flags, bad_obs, model.core.device())
        action, value, raw, new, logits = model.step(inputs, flags, state, mask, deterministic)
        bad_state = nonfinite.bad_rows(new, numpy)
        if bad_state is not None:
            self._report(ids, bad_state, "new state")
        if nonfinite.bad_rows([raw], numpy) is not None or nonfinite.impossible(logits, numpy):
            raise FloatingPointError("the policy's action holds NaN or infinity; look at its weights")
        if bad_state is None and (bad_obs is None or self.on_nonfinite == "reset"):
            return action, value, raw, new
        replaced = bad_state if bad_obs is None else bad_obs if bad_state is None else bad_obs | bad_state
        assert replaced is not None
        fresh = model.from_memory(model.core.initial_state(len(replaced)))
        if self.on_nonfinite == "skip":  # an episode that started with this step has started
            fresh = nonfinite.where(nonfinite.as_rows(flags, len(replaced)), fresh, state)
        after = nonfinite.where(replaced, fresh, new)
        if isinstance(model, FeedBack):  # the environment was given this action
            after = model.with_action_of(new, after)
        return action, value, raw, after

    def forget(self, ids: Iterable[Hashable] | None) -> None:
        """Warn again if these environments come back; None: all."""
        self._warned.clear() if ids is None else self._warned.difference_update(ids)

    def _report(self, ids: Sequence[Hashable], bad: nonfinite.Flags, what: str) -> None:
        which = [ids[int(row)] for row in bad.nonzero()[0]]
        if self.on_nonfinite == "raise":
            more = f" and of {len(which) - 1} more" if len(which) > 1 else ""
            raise FloatingPointError(
                f"the {what} of environment {which[0]!r}{more} holds NaN or infinity; its memory is unchanged. To continue "
                'without it: Runner(..., on_nonfinite="skip") or "reset"'
            )
        for env_id in which:
            if env_id not in self._warned:
                self._warned.add(env_id)
                how = "its memory stays as it was" if self.on_nonfinite == "skip" else "its memory starts afresh"
                warnings.warn(
                    f"the {what} of environment {env_id!r} holds NaN or infinity: {how} (said once per environment)",
                    stacklevel=5,
                )
