"""When to try again after a disk refused a write: say so, go on, retry ever more rarely."""

from __future__ import annotations

from collections.abc import Callable


class RetrySchedule:
    """Counts updates, not seconds: all ranks must decide alike."""

    LONGEST_WAIT = 64  # updates

    def __init__(self, notify: Callable[[str], None]) -> None:
        self.notify = notify
        self._retry_at: int | None = None
        self._wait = 1

    def should_retry(self, update: int) -> bool:
        """Whether a write failed and it is time for another attempt."""
        return self._retry_at is not None and update >= self._retry_at

    def must_wait(self, update: int) -> bool:
        """Whether a write failed and it is too early for another attempt."""
        return self._retry_at is not None and update < self._retry_at

    def record(self, problem: str | None, update: int) -> bool:
        """Note how an attempt ended (None: it succeeded); returns whether it succeeded."""
        if problem is None:
            if self._retry_at is not None:
                self.notify("saved; everything that failed before is now written")
            self._retry_at, self._wait = None, 1
            return True
        if self._retry_at is None:
            self.notify(f"cannot save ({problem}). Training continues, and saving is retried")
        self._retry_at = update + self._wait
        self._wait = min(2 * self._wait, self.LONGEST_WAIT)
        return False
