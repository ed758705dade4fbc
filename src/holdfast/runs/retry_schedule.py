"""A disk that is full, or a folder that cannot be written: say so, go on, try again."""

from __future__ import annotations

from collections.abc import Callable


class RetrySchedule:
    """When to try again to save. Decided by updates, not by the clock: all ranks must decide alike."""

    LONGEST_WAIT = 64  # updates

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self._retry_at: int | None = None
        self._wait = 1

    def due(self, update: int) -> bool:
        """Whether a save failed and it is time for another attempt."""
        return self._retry_at is not None and update >= self._retry_at

    def waits(self, update: int) -> bool:
        """Whether a save failed and it is too early for another attempt."""
        return self._retry_at is not None and update < self._retry_at

    def learn(self, problem: str | None, update: int) -> bool:
        """Take in how an attempt ended (None: well); whether it ended well."""
        if problem is None:
            if self._retry_at is not None:
                self.say("saved; what failed before is made good")
            self._retry_at, self._wait = None, 1
            return True
        if self._retry_at is None:
            self.say(f"cannot save ({problem}). Training goes on, and saving is tried again and again")
        self._retry_at = update + self._wait
        self._wait = min(2 * self._wait, self.LONGEST_WAIT)
        return False
