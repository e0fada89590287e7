"""When to try again: exponential backoff with full jitter, the service's Retry-After, and an end at closing."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import tenacity

from .transport import TemporaryError


class Patience:
    """How much time is left. Unlimited until closing begins, which wakes every sleeper once."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # of a reentrant lock
        self._deadline = math.inf

    @property
    def closing(self) -> bool:
        """Whether an end is set."""
        return self._deadline < math.inf

    def remaining(self) -> float:
        """Seconds left."""
        return self._deadline - time.monotonic()

    def expired(self) -> bool:
        """Whether no time is left."""
        return self.remaining() <= 0

    def close_within(self, seconds: float) -> None:
        """Set the end."""
        with self._changed:
            self._deadline = time.monotonic() + seconds
            self._changed.notify_all()

    def sleep(self, seconds: float) -> None:
        """Sleep between attempts, but not into the end; when closing begins, wake up for a last try."""
        with self._changed:
            if self.closing:
                self._changed.wait(max(min(seconds, self.remaining()), 0.0))
            else:
                self.pause(seconds)

    def pause(self, seconds: float) -> None:
        """Sleep unless closing has begun, or begins."""
        with self._changed:
            self._changed.wait_for(lambda: self.closing, seconds)


@dataclass(frozen=True, slots=True)
class Backoff:
    """Seconds between attempts: drawn from 0 up to ``first_s``, doubled each time, up to ``longest_s``."""

    first_s: float = 0.5
    longest_s: float = 60.0

    def retrying(
        self, patience: Patience, on_retry: Callable[[BaseException], None], attempts: float = math.inf
    ) -> tenacity.Retrying:
        """Repeats a call that raises ``TemporaryError``, and passes that on when time or attempts run out."""
        jitter = tenacity.wait_random_exponential(multiplier=self.first_s, max=self.longest_s)

        def wait(state: tenacity.RetryCallState) -> float:
            return max(jitter(state), getattr(_error(state), "retry_after_s", 0.0))

        def stop(state: tenacity.RetryCallState) -> bool:
            return state.attempt_number >= attempts or state.upcoming_sleep >= patience.remaining()

        return tenacity.Retrying(
            sleep=patience.sleep,
            stop=stop,
            wait=wait,
            retry=tenacity.retry_if_exception_type(TemporaryError),
            before_sleep=lambda state: on_retry(_error(state)),
            reraise=True,
        )


def _error(state: tenacity.RetryCallState) -> BaseException:
    error = state.outcome.exception() if state.outcome else None
    return error or TemporaryError("no outcome")
